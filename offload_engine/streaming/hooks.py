"""The only place that touches user modules: hooks that hold a unit's parameters on the device while it works.

Note: life of a unit.
    Forward: before it runs, its buckets are fetched and its parameters point at the device; afterwards they point at
    the host again and the buckets may leave. Backward: a pre-hook on the node that made the unit's output does the
    same; the unit stays "in use" until the next unit's pre-hook comes that does not lie inside it. Recomputation
    (activation checkpointing) is a forward inside a backward: it counts as part of the backward.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from offload_engine.buckets import Bucket, ParameterEntry, Registry, Unit, is_compiled
from offload_engine.device import Device
from offload_engine.device.torch_modes import (
    keep_out_of_compiled_code,
    lift_function_modes,
    put_back_function_modes,
)
from offload_engine.errors import StateError, UnsupportedError
from offload_engine.streaming.activations import ActivationStore
from offload_engine.streaming.external import ExternalChanges
from offload_engine.streaming.gradients import GradientStore
from offload_engine.streaming.lanelog import LaneLog
from offload_engine.streaming.order import UseOrder
from offload_engine.streaming.residency import ResidencyManager
from offload_engine.streaming.structures import map_tensors, tensors_in
from offload_engine.timeline import BACKWARD, EVAL, FORWARD

__all__ = ["Streamer"]

_log = logging.getLogger("offload_engine")

_graph_task_id = torch._C._current_graph_task_id
_no_modes = torch._C.DisableTorchFunction
"""The engine's own tensor calls go past torch function modes: the user's, and the read guard."""

_Frame = tuple[Unit, ...]
"""A unit in progress and the units around it, innermost first."""


class _Hook:
    """A module hook that stays with its module: copied or pickled, it is one that does nothing."""

    __slots__ = ("act",)

    def __init__(self, act: Callable[..., Any]) -> None:
        self.act = act

    def __call__(self, *args: Any) -> Any:
        return self.act(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return nullcontext().__exit__

    def __reduce__(self) -> Any:
        # Takes anything, returns None, and can be unpickled where this package is not installed.
        return getattr, (nullcontext(), "__exit__")


class _Task:
    """Lives as long as one backward, whether it comes to its end or fails: autograd holds its callback that long."""


class Streamer:
    """Follows the model's passes and keeps the right buckets on the device.

    Owns: all hooks on modules and parameters, until `close`.
    """

    def __init__(
        self,
        model: nn.Module,
        registry: Registry,
        buckets: Sequence[Bucket],
        device: Device,
        residency: ResidencyManager,
        gradients: GradientStore,
        external: ExternalChanges,
        order: UseOrder,
        log: LaneLog,
        activations: ActivationStore,
        offloadable: Mapping[str, nn.Module],
    ) -> None:
        self._activations = activations
        self._buckets = buckets
        self._registry = registry
        self._device = device
        self._residency = residency
        self._gradients = gradients
        self._external = external
        self._order = order
        self._log = log
        self._key = f"offload_engine {id(self)}"
        self._stack: list[Unit] = []
        self._recompute_stack: list[Unit] = []
        self._root_depth = 0
        self._pass_kind = ""
        self._phase_start_ns = 0
        self.phase_s: dict[str, float] = {}
        """Phase -> seconds of the last one."""
        self.before_backward: Callable[[int], None] = lambda task: None
        """Called with autograd's number of a backward that begins; may raise, and the backward fails."""
        self._backward_tasks: dict[int, weakref.ref[_Task]] = {}
        self._differentiable = False
        """Whether the backward in progress makes a graph of its own (create_graph=True)."""
        self._pinned: dict[int, Bucket] = {}
        self._backward_frame: _Frame = ()
        self._in_use: _Frame = ()
        self._unit_buckets: dict[int, list[Bucket]] = {}
        self._handles: list[Any] = []
        self._lifted: list[list[Any]] = []
        """The engines' function modes, taken away while compiled units run."""
        self._takers: dict[int, Any] = {}
        """Index of a parameter -> the handle of the hook that takes its gradient."""
        self._has_old_buckets = False
        self._buffer_keys = {id(bucket.buffer.storage) for bucket in buckets}
        # First, and so inside the others: who enters the model can tell what an interrupt has left behind.
        for name, module in offloadable.items():
            self._hook(
                module, partial(activations.enter, name, module), partial(self._leave_offloaded, module)
            )
        self._hook_modules(model)
        self._hook_parameters()
        if device.counts_everything and any(map(is_compiled, model.modules())):
            _log.warning(
                "torch.compile: off (the emulated device's memory ledger counts every operation, and torch compiles "
                "nothing under such a mode; memory_ledger = false lets it)"
            )

    def _hook_modules(self, model: nn.Module) -> None:
        units = {id(unit.module): unit for unit in self._registry.units}
        root = units.pop(id(model), None) or Unit("model", model, [], [])
        self._hook(model, lambda: self._enter_root(root), lambda output: self._exit_root(root, output))
        self._all_units = (root, *units.values())
        self._find_buckets()
        for unit in units.values():
            self._hook(unit.module, partial(self._enter, unit), partial(self._exit, unit))

    def _hook(self, module: nn.Module, enter: Callable[[], None], leave: Callable[[Any], Any]) -> None:
        self._handles.append(module.register_forward_pre_hook(_Hook(lambda *_: enter()), prepend=True))
        self._handles.append(
            module.register_forward_hook(_Hook(lambda _, __, output: leave(output)), always_call=True)
        )

    def _leave_offloaded(self, module: nn.Module, _: Any) -> None:
        self._activations.leave(module)

    def _find_buckets(self) -> None:
        for unit in self._all_units:
            indices = dict.fromkeys(entry.bucket_index for entry in unit.entries)
            self._unit_buckets[id(unit)] = [self._buckets[index] for index in indices]

    def follow_layout(self, new: Sequence[Bucket]) -> None:
        """Take in buckets to which parameters have moved. No pass is going on.

        Until `end_step`, units hold those that they had before, too: a graph made then reads them in its backward.
        """
        storages = {id(bucket.buffer.storage) for bucket in new}
        self._buffer_keys |= storages
        self._activations.add_storages(storages)
        before = dict(self._unit_buckets)
        self._find_buckets()
        for key, kept in before.items():
            found = self._unit_buckets[key]
            found.extend(bucket for bucket in kept if bucket not in found)
        self._has_old_buckets = True
        self._hook_parameters()

    def _hook_parameters(self) -> None:
        for entry in self._registry.entries:
            if entry.trainable and entry.index not in self._takers:
                before = self._gradient_hook(Streamer._before_accumulate, entry)
                self._handles.append(entry.param.register_hook(before))
                self._take_last(entry)

    def _before_accumulate(self, entry: ParameterEntry) -> None:
        hooks: Any = entry.param._post_accumulate_grad_hooks
        if next(reversed(hooks), None) != self._takers[entry.index].id:
            self._take_last(entry)
        if len(hooks) > 1 and entry.param.grad is not None:
            raise UnsupportedError(
                f"'{entry.name}' has a post-accumulate hook of yours and a gradient from an earlier backward: the hook "
                f"would find this micro-batch's gradient in p.grad, not the sum, which is on the host. Use a hook on "
                f"the gradient (param.register_hook), or change p.grad after backward."
            )
        self._gradients.before_accumulate(entry)

    def _after_accumulate(self, entry: ParameterEntry) -> None:
        self._gradients.after_accumulate(entry)

    def _take_last(self, entry: ParameterEntry) -> None:
        """Take the gradient after all hooks of the user's own, which find it in `p.grad`."""
        if entry.index in self._takers:
            self._takers[entry.index].remove()
        after = self._gradient_hook(Streamer._after_accumulate, entry)
        self._takers[entry.index] = entry.param.register_post_accumulate_grad_hook(after)

    def _gradient_hook(
        self, act: Callable[[Streamer, ParameterEntry], None], entry: ParameterEntry
    ) -> Callable[[torch.Tensor], None]:
        # Weakly: the garbage collector does not see what hooks on the accumulation of a gradient refer to, and would
        # keep an engine that nobody names any more, with all its memory.
        streamer, its = weakref.ref(self), weakref.ref(entry)

        def hook(_: torch.Tensor) -> None:
            alive, found = streamer(), its()
            if alive is not None and found is not None:
                with _no_modes():
                    alive._begin_backward()
                    act(alive, found)

        return hook

    def close(self) -> None:
        """Take all hooks off. Idempotent."""
        self.settle()
        self.end_step()
        for handle in (*self._handles, *self._takers.values()):
            handle.remove()
        self._handles.clear()
        self._takers.clear()

    # Forward.

    def _enter_root(self, root: Unit) -> None:
        with _no_modes():
            if _graph_task_id() == -1:
                if self._root_depth == 0:
                    self.settle()
                    self._external.sweep()
                    self._activations.abandon()
                    self._begin_pass()
                    self._phase_start_ns = self._log.timeline.clock()
                self._root_depth += 1
                self._device.enter_compute()
            self._enter_unit(root)

    def _exit_root(self, root: Unit, output: Any) -> Any:
        with _no_modes():
            changed = self._exit_unit(root, output)
            if _graph_task_id() == -1 and self._root_depth > 0:
                self._root_depth -= 1
                self._device.exit_compute()
                if self._root_depth == 0:
                    self._end_pass()
            return changed

    def _begin_pass(self) -> None:
        keep_out_of_compiled_code("offload_engine.streaming", "offload_engine.optim", "offload_engine.device")
        self._pass_kind = FORWARD if torch.is_grad_enabled() else EVAL
        self._order.begin(self._pass_kind)
        self._activations.begin_forward()

    def _end_pass(self) -> None:
        kind = self._pass_kind
        self._pass_kind = ""
        self._order.end()
        self._log.idle()
        self._record_phase(kind)
        if not torch.is_grad_enabled():
            self._residency.evict_idle()

    def _record_phase(self, kind: str) -> None:
        now = self._log.timeline.clock()
        self.phase_s[kind] = (now - self._phase_start_ns) / 1e9
        if self._log.timeline.enabled:
            self._log.timeline.phase(kind, self._phase_start_ns, now)

    # Several calls of the model beside each other, as one pass. Called by `layer_major`.

    def begin_joint_forward(self) -> None:
        """Start a pass that lasts until `end_joint_forward`, over any number of calls of the model."""
        with _no_modes():
            self.settle()
            self._external.sweep()
            self._activations.abandon()
            self._begin_pass()
            self._phase_start_ns = self._log.timeline.clock()
            self._root_depth = 1
            self._device.enter_compute()

    def end_joint_forward(self) -> None:
        """End that pass, and what an exception has left open in it. Idempotent."""
        with _no_modes():
            if self._root_depth:
                while self._root_depth:
                    self._root_depth -= 1
                    self._device.exit_compute()
                self._end_open_pass()

    def put_aside(self) -> tuple[list[Unit], Any]:
        """Return what is open of the call in progress, and have nothing open, so that another call can go on."""
        aside = self._stack, self._activations.put_aside()
        self._stack = []
        return aside

    def take_up(self, aside: tuple[list[Unit], Any]) -> None:
        """Go on with the call that `put_aside` was called in."""
        self._stack, running = aside
        self._activations.take_up(running)

    def buckets_in(self, module: nn.Module) -> frozenset[int]:
        """Return the buckets that the module and the modules in it use."""
        inside = {id(each) for each in module.modules()}
        units = [unit for unit in self._registry.units if id(unit.module) in inside]
        return frozenset(entry.bucket_index for unit in units for entry in unit.entries)

    # Units.

    def _enter(self, unit: Unit) -> None:
        with _no_modes():
            self._enter_unit(unit)

    def _enter_unit(self, unit: Unit) -> None:
        if _graph_task_id() != -1:
            self._recompute_stack.append(unit)
            self._use_in_backward(self._backward_frame)
            return
        alone = not self._stack and self._root_depth == 0
        if not self._pass_kind or (alone and self._external.has_unfrozen(unit.entries)):
            # A part of the model is called without the whole: there is no telling where the pass ends.
            self.settle()
            self._external.sweep()
            self._begin_pass()
            self._phase_start_ns = self._log.timeline.clock()
        self._registry.check_slots(unit)
        self._hold(unit)
        self._stack.append(unit)
        if unit.compiled:
            self._lifted.append(lift_function_modes())  # torch compiles no more than pieces under them

    def _exit(self, unit: Unit, output: Any) -> Any:
        with _no_modes():
            return self._exit_unit(unit, output)

    def _exit_unit(self, unit: Unit, output: Any) -> Any:
        """Let go of the unit. Runs also when its forward raised (then `output` is None)."""
        if unit.compiled and _graph_task_id() == -1 and unit in self._stack:
            put_back_function_modes(self._lifted.pop())
        recomputing = _graph_task_id() != -1
        stack = self._recompute_stack if recomputing else self._stack
        while (
            unit in stack
        ):  # it is not when entering it has failed; what lies above it has been left by an exception
            last = stack.pop()
            if not recomputing:
                self._let_go(last)
            if last is unit:
                break
        if output is None or not unit.entries:
            return None
        changed = self._detach_escapes(output)
        if torch.is_grad_enabled():
            frame = (unit, *reversed(stack))
            seen: set[int] = set()
            for tensor in tensors_in(output if changed is None else changed):
                node = tensor.grad_fn
                if node is None or id(node) in seen:
                    continue
                seen.add(id(node))
                # The first unit that puts out a node has made it: a unit around it, or one that only hands it on, has
                # not, and must not send the maker away when its backward is about to run.
                metadata: Any = node.metadata  # torch annotates the property as a method
                if metadata.setdefault(self._key, frame) is frame:
                    node.register_prehook(lambda _, frame=frame: self._enter_backward(frame))
            if not seen and any(entry.trainable for entry in unit.entries):
                self._pin(unit)
        return changed

    def _detach_escapes(self, output: Any) -> Any:
        """Return the output with views of device buffers replaced by copies, or None if it has none.

        A module that returns (a view of) its parameter, as position embeddings do, would hand out memory that is
        freed when its bucket leaves.
        """
        keys = self._buffer_keys
        if not any(
            id(tensor.untyped_storage()) in keys for tensor in tensors_in(output) if _has_storage(tensor)
        ):
            return None

        def own(tensor: torch.Tensor) -> torch.Tensor:
            escapes = _has_storage(tensor) and id(tensor.untyped_storage()) in keys
            return tensor.clone() if escapes else tensor

        return map_tensors(output, own)

    # Holding: buckets on the device, parameters pointing there.

    def _pin(self, unit: Unit) -> None:
        """Keep a unit's buckets on the device until `end_step`: its graph will be read and no hook will say when.

        Not needed where the device sees operators and refills what they read.
        """
        if self._device.counts_everything:
            return
        for bucket in self._unit_buckets[id(unit)]:
            if bucket.index not in self._pinned:
                self._residency.require(bucket)
                bucket.uses += 1
                self._pinned[bucket.index] = bucket

    def end_step(self) -> None:
        """Let go of what the step's graphs needed: an update is about to make them invalid."""
        self._unhold_buckets(list(self._pinned.values()))
        self._pinned.clear()
        if self._has_old_buckets:
            self._has_old_buckets = False
            self._find_buckets()

    def _hold(self, unit: Unit) -> None:
        buckets = self._unit_buckets[id(unit)]
        self._external.take_touched()
        for entry in unit.entries:
            if entry.uses == 0:
                self._external.check(entry)
        for bucket in buckets:
            bucket.uses += 1
        for bucket in buckets:
            try:
                self._residency.require(bucket)
            except BaseException:
                self._unhold_buckets(buckets)
                raise
        for entry in unit.entries:
            if entry.uses == 0:
                entry.param.data = entry.device_view
            entry.uses += 1
        for bucket in buckets:
            if self._order.note(bucket.index):
                self._residency.prefetch(self._order.upcoming())
                self._log.busy(bucket.name, bucket.index)

    @staticmethod
    def _unhold_buckets(buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            bucket.uses -= 1

    def _let_go(self, unit: Unit) -> None:
        self._unhold_buckets(self._unit_buckets[id(unit)])
        failure: StateError | None = None
        for entry in unit.entries:
            entry.uses -= 1
            if entry.uses == 0:
                try:
                    self._external.point_at_host(entry)
                except StateError as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    # Backward.

    def _enter_backward(self, frame: _Frame) -> None:
        with _no_modes():
            self._begin_backward()
            self._backward_frame = frame
            self._recompute_stack.clear()
            self._use_in_backward(frame)

    def _use_in_backward(self, frame: _Frame) -> None:
        wanted = tuple(dict.fromkeys((*reversed(self._recompute_stack), *frame)))
        before = self._in_use
        if wanted == before:
            return
        # Let go first: what the last unit leaves makes room for the next one.
        kept = tuple(unit for unit in before if unit in wanted)
        self._in_use = kept
        for unit in before:
            if unit not in wanted:
                self._let_go(unit)
        for unit in wanted:
            if unit not in kept:
                self._hold(unit)
                self._in_use = (*self._in_use, unit)
                if self._differentiable:
                    self._pin(unit)
        self._in_use = wanted

    def _begin_backward(self) -> None:
        task = _graph_task_id()
        if task == -1 or task in self._backward_tasks:
            return
        self.before_backward(task)
        if not self._backward_tasks:
            self._end_open_pass()
            self._gradients.take_touched()
            self._pass_kind = BACKWARD
            self._differentiable = torch.is_grad_enabled()
            self._order.begin(BACKWARD)
            self._phase_start_ns = self._log.timeline.clock()
        life = _Task()
        self._backward_tasks[task] = weakref.ref(life, lambda _: self._end_backward(task))
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_backward, task, life))
        if len(self._backward_tasks) == 1:
            self._activations.begin_backward()

    def _end_backward(self, task: int, life: _Task | None = None) -> None:
        """Finish one backward: called by autograd at its end, or by the death of `life` when it failed."""
        with _no_modes():
            if self._backward_tasks.pop(task, None) is not None and not self._backward_tasks:
                self._finish_backward(failed=life is None)

    def _finish_backward(self, *, failed: bool) -> None:
        self._recompute_stack.clear()
        self._backward_frame = ()
        self._use_in_backward(())
        self._log.idle()
        self._activations.end_backward()
        self._differentiable = False
        try:
            self._gradients.finish_backward(failed)
        finally:
            self._order.end()
            self._pass_kind = ""
            self._residency.evict_idle()
            self._record_phase(BACKWARD)

    @property
    def busy(self) -> bool:
        """Whether a forward or backward is in progress."""
        return self._root_depth > 0 or bool(self._stack) or bool(self._backward_tasks)

    def settle(self) -> None:
        """Close what an exception, or a call of a part of the model, has left open."""
        if _graph_task_id() != -1:
            return
        if self._backward_tasks:
            self._backward_tasks.clear()
            self._finish_backward(failed=True)
        self._end_open_pass()

    def _end_open_pass(self) -> None:
        while self._lifted and self._root_depth == 0:
            put_back_function_modes(self._lifted.pop())
        while self._stack and self._root_depth == 0:
            self._let_go(self._stack.pop())
        if self._pass_kind and self._root_depth == 0:
            self._end_pass()


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta"
