"""`OffloadEngine`: wires the rooms together, nothing more. The one class that users meet."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import nn

from offload_engine import kernels
from offload_engine.buckets import (
    Bucket,
    Registry,
    allocate_buckets,
    assign_states,
    check_budget,
    default_bucket_bytes,
    discover,
    plan_layout,
)
from offload_engine.buckets.owners import Owner, give_up, refuse_wrapped, take_over
from offload_engine.checkpoint.load import load_state
from offload_engine.checkpoint.save import save_state
from offload_engine.checkpoint.values import whole_values
from offload_engine.checkpoint.weights import MetaValues, WeightSource
from offload_engine.config import EngineConfig, sized
from offload_engine.device import Device, open_device, visible_devices
from offload_engine.device.generators import generator_states
from offload_engine.errors import ConfigError, StateError
from offload_engine.growth import grow, newcomers
from offload_engine.host import HostBudget, SlabAllocator, bound_threads, host_limits, peak_rss_bytes
from offload_engine.optim import (
    DeviceUpdates,
    OffloadOptimizer,
    Stepper,
    UpdatePipeline,
    check_optimizer,
    check_states,
    state_keys,
    updates_matrices,
)
from offload_engine.plan import StepPlan
from offload_engine.policy import check_plan, facts_of, plan_of, run_summary, setup_lines, spared_buckets
from offload_engine.replicas import Replicas
from offload_engine.streaming import (
    ActivationStore,
    ExternalChanges,
    LaneLog,
    LossFunction,
    MicroBatches,
    MicroBatchOrder,
    ResidencyManager,
    Streamer,
    Touched,
    UseOrder,
    gradient_store,
    landing_slabs,
    moved,
    offloadable,
)
from offload_engine.timeline import CPU_GRADIENT, CPU_UPDATE, UPDATE, Timeline

__all__ = ["OffloadEngine"]

_log = logging.getLogger("offload_engine")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_no_modes = torch._C.DisableTorchFunction


class OffloadEngine(Owner):
    """Trains a model whose states live in host memory, with the same numbers as without.

    The model's parameter objects, hooks and structure stay as they are. Between steps every `p.data` is the host
    working copy and every `p.grad` the host gradient; while a module runs, its parameters are on the device.

    Owns: host slabs (model states), device buffers, copy lanes and the update pool, all hooks; until `close`.

    Args:
        model: any `nn.Module`. Changed in place: parameters move into the engine's slabs.
        optimizer: over the model's parameters, of a class that `optim.groups` lists. Its groups are adopted, as is what
            state it has; its `step` and `zero_grad` act on the engine from now on.
        config: see `EngineConfig`.
        weights: the values of parameters and buffers on the meta device: a safetensors file, a folder of them, or a
            mapping by name. One at a time is read, so that the host never holds the model twice.

    Raises:
        UnsupportedError: the model or optimizer has something that would not be computed exactly.
        DeviceMemoryError: the device budget cannot hold the neediest bucket; says which and what would do.
        HostMemoryError: the host cannot hold the states; raised before anything is allocated.
        BuildError: the native kernels are missing.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: EngineConfig | None = None,
        *,
        weights: WeightSource | None = None,
    ) -> None:
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(
                f"config is a {type(config).__name__}; an EngineConfig is needed: "
                f"OffloadEngine(model, optimizer, EngineConfig(device_memory='6GiB'))."
            )
        self.config = config or EngineConfig()
        self.module = model
        self._closed = True  # until set-up is through: close() of a half-made engine does nothing
        with _no_modes():  # a default device of the user's is not where host memory lies
            self._set_up(model, optimizer, weights)

    def _set_up(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, weights: WeightSource | None
    ) -> None:
        config = self.config
        check_optimizer(optimizer)
        precision = _DTYPES[config.precision]
        backend = kernels.load(config.kernels, config.isa)
        threads, binding = bound_threads(config.threads, partial(visible_devices, config))
        if config.threads.compute:
            torch.set_num_threads(config.threads.compute)
        registry = discover(model, optimizer.param_groups, precision, filled=weights is not None)
        values = MetaValues(model, registry, weights)
        refuse_wrapped(registry)
        self._kind = kind = type(optimizer)
        assign_states(registry, config, partial(state_keys, kind=kind), partial(updates_matrices, kind=kind))
        check_states(registry, dict(optimizer.state))
        offloads = config.activations == "offload"
        offloaded = offloadable(model, config.activation_modules) if offloads else {}

        self._replicas = replicas = Replicas(config, registry)
        with ExitStack() as undo:  # on any error in here the model stays as it was
            undo.callback(replicas.close)
            self.device: Device = open_device(config, backend, copy_threads=threads.copies)
            undo.callback(self.device.close)
            undo.callback(values.undo)
            values.fill_buffers()
            for buffer in model.buffers():
                self.device.move_buffer(buffer)
            budget = self.device.budget_bytes
            bucket_bytes = sized(config.bucket_bytes) or default_bucket_bytes(registry, budget)
            layouts = plan_layout(registry, bucket_bytes=bucket_bytes, **replicas.place)
            replicas.compare_layouts(layouts, self.device)
            check_budget(registry, layouts, budget, self.device.used_bytes())
            self.timeline = Timeline(
                time.monotonic_ns, capacity=config.timeline_events, enabled=config.timeline
            )
            self.host_budget = HostBudget(sized(config.host_memory), host_limits())
            self._slabs = SlabAllocator(
                self.host_budget, self.device.pin, self.device.unpin, self.device.name_memory, binding.place
            )
            undo.callback(self._slabs.close)
            self._buckets = allocate_buckets(layouts, self._slabs, self.device, config)
            self._landing = landing_slabs(config, self._slabs, self._buckets)
            plan = plan_of(config, self._buckets, budget, offloaded)
            self._registry = registry
            self._check_plan(plan, self._buckets)
            for bucket in spared_buckets(plan, self._buckets):
                bucket.take_spare(self._slabs)
            self._pool = backend.WorkerPool(threads.update, binding.cpus)
            self._cpu_lane = self.device.lane(backend, CPU_UPDATE, pool=self._pool, ordered=False)
            self._gradient_lane = self.device.lane(backend, CPU_GRADIENT, pool=self._pool)
            values.fill_parameters(self._buckets)
            undo.pop_all()
        for bucket in self._buckets:
            bucket.adopt(self.device)
        self._wire(model, optimizer, offloaded, plan)
        replicas.start(model, registry, self._buckets, self._gradients, self.timeline)
        self.steps = 0
        """Optimizer steps done by this engine and by the checkpoint that it loaded."""
        self._step_start_ns = self.timeline.clock()
        below = config, backend, self.device, self._buckets, self._slabs, self._residency, self._gradients
        above = self._activations, self._updates, self._stepper, self.timeline
        self._facts = partial(facts_of, *below, *above)
        self.model_state_bytes = self._facts().state_bytes
        self._words = setup_lines(
            self._facts(), backend.describe(), threads.sentence(), *binding.refusals, *replicas.words()
        )
        self._updates.guard.install()
        take_over(registry, self)
        self._closed = False
        for line in self._words:
            _log.info(line)

    def _wire(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        offloaded: Mapping[str, nn.Module],
        plan: StepPlan,
    ) -> None:
        """Make the rooms and connect them. From here on the model is changed."""
        config, registry, buckets, device = self.config, self._registry, self._buckets, self.device
        self._lanes = log = LaneLog(self.timeline, device)
        self._order = UseOrder([bucket.index for bucket in buckets])
        self._residency = ResidencyManager(buckets, device, log, plan)
        self._touched = Touched()
        self._gradients = gradient_store(
            self._landing, registry, buckets, device, log, self._gradient_lane, self._slabs, self._touched
        )
        self._gradients.expected_micro_batches = config.micro_batches
        self._activations = ActivationStore(
            device, log, self._slabs, model.buffers, (id(bucket.buffer.storage) for bucket in buckets)
        )
        self._external = ExternalChanges(registry, buckets, self._touched, log)
        rooms = device, self._residency, self._gradients, self._external, self._order, log, self._activations
        self._streamer = Streamer(model, registry, buckets, *rooms, offloaded)
        self._micro_batches = MicroBatches(
            self, self._streamer, self._gradients, self._residency, self._order, device
        )
        self._device_updates = DeviceUpdates(device, log)
        self._residency.free_gradients = self._gradients.free_one
        self._residency.free_activations = self._activations.free_one
        self._residency.free_states = self._device_updates.give_up_one
        device.set_pressure_handler(self._residency.relieve)
        self._stepper = Stepper(config, self._gradients, self._groups, self._kind, self._streamer.phase_s)
        self._streamer.before_backward = self._stepper.check_backward
        around = self._gradients, self._residency, self._device_updates, self._cpu_lane, log, self._touched
        self._updates = UpdatePipeline(buckets, *around, self._stepper.expected, self._stepper.settings)
        self._follow(plan)
        self.optimizer = OffloadOptimizer(
            optimizer, registry, buckets, self._step, self._updates.wait_bucket, self._grow
        )
        self._external.on_unfrozen = self._grow

    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    # The plan.

    def _check_plan(self, plan: StepPlan, buckets: list[Bucket]) -> None:
        check_plan(
            plan,
            self._registry,
            buckets,
            budget_bytes=self.device.budget_bytes,
            in_use_bytes=self.device.used_bytes(),
            host=self.host_budget,
        )

    def _end_work(self, what: str) -> None:
        """Have nothing under way and no bucket on the device, so that it can be checked what may be there."""
        if self._streamer.busy:
            raise StateError(f"{what} inside a forward or backward; do it between micro-batches.")
        self._updates.wait()
        self._device_updates.close()
        self._residency.evict_idle(keep_resident=False)

    def change_plan(self, plan: StepPlan) -> None:
        """Follow another plan from the next micro-batch on. Changes times and bytes, never numbers.

        Raises:
            ConfigError, DeviceMemoryError, HostMemoryError: it cannot be carried out; the present one stays.
            StateError: called inside a forward or backward.
        """
        self._check_open()
        with _no_modes():
            self._streamer.settle()
            self._end_work("change_plan was called")
            self._check_plan(plan, self._buckets)
            self._updates.arrange_spares(spared_buckets(plan, self._buckets), self._slabs)
            self._follow(plan)

    def _grow(self) -> None:
        """Give parameters that were unfrozen or got a param group a place for their gradients and states."""
        self._check_open()
        groups = self._groups()
        found = newcomers(self._registry, groups)
        if not found:
            return
        with _no_modes():
            self._streamer.settle()
            self._end_work("a parameter was unfrozen, or a param group added,")
            self._gradients.settle()
            rooms = self._registry, self._buckets, self._slabs, self.device
            new, plan = grow(found, groups, self._kind, self.config, *rooms, self.plan, self._check_plan)
            self._order.add(bucket.index for bucket in new)
            self._residency.follow_layout(new)
            self._gradients.follow_layout()
            self._streamer.follow_layout(new)
            self._updates.guard.add(new)
            self._updates.arrange_spares(spared_buckets(plan, self._buckets), self._slabs)
            self._follow(plan)
            self.optimizer.start_anew(found)
            self.model_state_bytes = self._facts().state_bytes

    def _follow(self, plan: StepPlan) -> None:
        self.plan = self._residency.plan = plan
        self._gradients.sums_on_device = plan.accumulation == "device"
        self._activations.names = plan.offloaded_activations
        self._stepper.follow(plan)
        self._updates.follow(plan)

    def describe(self) -> list[str]:
        """Return the facts of this engine as lines for a log: device, kernels, threads, what is off and why."""
        return list(self._words)

    # The training step.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Move the inputs to the device and run the model. Returns what the model returns."""
        self._check_open()
        cast = _DTYPES[self.config.precision] if self.config.cast_inputs else None
        args, kwargs = (moved(value, self.device, cast) for value in (args, kwargs))
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run `loss.backward(**kwargs)`; in fp16 the scaled loss's, so that every `p.grad` has the loss scale in it.

        Afterwards all gradients are in `p.grad`, on the host.
        """
        self._check_open()
        self._stepper.scale_loss(loss).backward(**kwargs)

    def train_batch(
        self,
        batches: Iterable[Any],
        loss_fn: LossFunction | None = None,
        *,
        order: MicroBatchOrder = "layer_major",
    ) -> list[torch.Tensor]:
        """Run forward and backward of micro-batches; return their losses, detached. Then call `step()`.

        In layer-major order all of them go through one block before the next: each weight is fetched twice in all, and
        all activations are there at once. Same gradients, bit for bit, unless the model draws random numbers.

        Args:
            batches: what the engine takes: mappings of keywords, tuples or lists of arguments, or single arguments.
            loss_fn: (output, batch as given) -> loss, divided by the number of micro-batches if that is what you want.
                None: the output, if it is a scalar, or its `loss`.

        Raises:
            UnsupportedError: layer-major order, and the model has no sequence of blocks, or does not run them as one.
            ConfigError, StateError: no batches, no loss, `no_grad`. An error while they run drops the step's gradients.
        """
        self._check_open()
        with self._replicas.once():
            return self._micro_batches.train(batches, loss_fn, order)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a block in which backwards add up on each rank by itself; the next one outside averages the sums."""
        self._check_open()
        return self._replicas.no_sync()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale (fp16; else the loss itself), for a `backward()` of your own."""
        self._check_open()
        return self._stepper.scale_loss(loss)

    def step(self) -> None:
        """Start the update of every parameter that has a gradient, and return.

        Settings of the param groups are read now. Updates go on under the next forward, which waits bucket by bucket;
        whatever else reads a parameter, a gradient or a state waits for what it reads.
        """
        self.optimizer.step()

    def _step(self) -> None:
        self._check_open()
        with _no_modes():
            start_ns = self.timeline.clock()
            self._streamer.settle()
            self._streamer.end_step()
            self._external.sweep()
            entries = [entry for entry in self._gradients.settle() if entry.group is not None]
            order = self._order.first_uses()
            if self._stepper.step(self.steps + 1, entries, self._updates, order):
                self.steps += 1
            self._gradients.end_step()
            self._activations.end_step()
            self._residency.end_step()
            self._updates.end_step()
            self._residency.retire(self._slabs, self._updates.guard.forget_retired)
            self._lanes.reap()
            self._residency.record_memory()
            end_ns = self.timeline.clock()
            self.timeline.phase(UPDATE, start_ns, end_ns)
            self.timeline.step(self.steps, self._step_start_ns, end_ns)
            self._step_start_ns = end_ns

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`; return the norm before (fp64 scalar).

        As `torch.nn.utils.clip_grad_norm_` over all parameters. `EngineConfig.max_grad_norm` does the same inside the
        update, without a pass of its own and, in bf16, without rounding the scaled gradient to bf16.
        """
        self._check_open()
        with _no_modes():
            self._streamer.settle()
            norm = self._stepper.clip(float(max_norm), self._updates)
            return torch.tensor(norm, dtype=torch.float64)

    @property
    def grad_norm(self) -> float:
        """Global 2-norm of the gradients that are there now.

        From a clipping (`max_grad_norm` in a step, or `clip_grad_norm_`) until the next backward: the norm before it.
        """
        with _no_modes():
            self._streamer.settle()
            kept = self._stepper.kept_norm()
            if kept is not None:
                return kept
            self._check_open()
            return self._stepper.norm_of(self._gradients.settle())

    @property
    def max_grad_norm(self) -> float | None:
        """What `step()` clips the global gradient norm to; None: it does not."""
        return self._stepper.max_grad_norm

    @property
    def loss_scale(self) -> float:
        """What the next backward's gradients are multiplied by: 1, but in fp16."""
        return self._stepper.loss_scale

    @property
    def skipped_steps(self) -> int:
        """Steps that fp16 gradients made overflow, and that were skipped."""
        return 0 if self._stepper.scaler is None else self._stepper.scaler.skipped

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters of the optimizer."""
        self.optimizer.zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Wait until every update, copy and computation is done. Errors of pending work are raised here."""
        if self._closed:
            return
        with _no_modes():
            self._streamer.settle()
            self._updates.wait()
            self.device.synchronize()
            self._lanes.drain()

    # Whole values.

    def _settle_values(self) -> None:
        """Have every value on the host, with what users wrote."""
        self._streamer.settle()
        self._external.sweep()
        self._updates.wait()

    @contextmanager
    def full_parameters(self, names: Sequence[str] | None = None) -> Iterator[dict[str, torch.Tensor]]:
        """Give the master value of every parameter by global name, to read and to write.

        Args:
            names: only these; None: all. Tied names give the same tensor.

        Returns:
            CPU tensors, the masters (fp32; a frozen parameter's working copy), valid inside the block: views, or
            decoded copies of other state layouts. What is written into them is the parameter's value after the block.

        Raises:
            StateError: a name that the model does not have.
        """
        self._check_open()
        with _no_modes():
            self._settle_values()
        with whole_values(self._registry, self._buckets, self._touched, names) as values:
            yield values

    def _kept(self) -> tuple[nn.Module, Registry, list[Bucket], list[dict[str, Any]]]:
        """Return whose values a checkpoint has."""
        return self.module, self._registry, self._buckets, self._groups()

    def save(self, path: str | PathLike[str], extra: dict[str, Any] | None = None) -> None:
        """Write a checkpoint folder, atomically; the folder that was there stays loadable until then.

        Args:
            extra: JSON values of the user's own, given back by `load`.
        """
        self._check_open()
        self._gradients.check_whole()
        with _no_modes():
            self._settle_values()
            facts = {"steps": self.steps, "precision": self.config.precision, "extra": extra or {}}
            generators = generator_states(self.device.torch_device)
            with self._replicas.writing(self._buckets) as writes:
                if writes:
                    save_state(path, *self._kept(), {**facts, **self._stepper.facts()}, generators)

    def load(self, path: str | PathLike[str]) -> dict[str, Any]:
        """Take over a checkpoint: values, moments, counters, settings, buffers, random generators.

        Gradients that are there are dropped. Returns what `save` got as `extra`.

        Raises:
            CheckpointError: it is missing, damaged, or of another model; nothing is changed then.
        """
        self._check_open()
        with _no_modes():
            self._streamer.settle()
            self._streamer.end_step()
            self._updates.end()
            self._residency.evict_idle(keep_resident=False)
            facts = load_state(
                path, *self._kept(), self._stepper.rules, self.device.torch_device, self._stepper.check_facts
            )
            self.steps = int(facts["steps"])
            self._updates.forget()
            self._external.forget()
            self._gradients.forget()
            self._stepper.take_facts(facts)
            extra: dict[str, Any] = facts["extra"]
            return extra

    # Facts.

    @property
    def device_bytes(self) -> int:
        """Device bytes in use now."""
        return self.device.used_bytes()

    @property
    def device_peak_bytes(self) -> int:
        """Largest device bytes in use since wrapping."""
        return self.device.peak_bytes()

    @property
    def device_budget_bytes(self) -> int | None:
        """The device budget; None: unlimited."""
        return self.device.budget_bytes

    @property
    def updates_ahead(self) -> tuple[int, int]:
        """Updates started before `step()` so far: (committed, made in vain)."""
        return self._updates.early.committed, self._updates.early.dropped

    def summary(self) -> dict[str, Any]:
        """Return the facts of the run so far, as JSON values: bytes, shares and waits by lane and cause, memory.

        "overlaps" has for every kind of overlap and placement whether it was active, the reason, and whether it was
        missed: off, or not always on, though it was asked for or would have saved time.
        """
        self.synchronize()
        timeline = self.timeline.summary(device_budget_bytes=self.device_budget_bytes).as_dict()
        memory = {
            "device_peak_bytes": self.device_peak_bytes,
            "host_slab_bytes": self._slabs.allocated_bytes,
            "host_peak_bytes": peak_rss_bytes(),
        }
        return {**timeline, **run_summary(self._facts()), **memory}

    def train(self, mode: bool = True) -> OffloadEngine:
        """Set the module's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> OffloadEngine:
        """Set the module's evaluation mode."""
        return self.train(False)

    # End of life.

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("this engine is closed; wrap the model again to go on training.")

    def close(self) -> None:
        """Finish pending work, take off all hooks, end all threads. Idempotent; never raises, but logs what failed.

        The model goes on working as a plain one: its parameters are the host working copies, its adopted optimizer
        has its own methods and the present state.
        """
        if self._closed:
            return
        self._external.closing = True
        for finish in (
            self.synchronize,
            self._external.sweep,
            self._device_updates.close,
            self._streamer.close,
            partial(self._residency.evict_idle, keep_resident=False),
            self.optimizer.detach,
        ):
            try:
                with _no_modes():
                    finish()
            except Exception:
                _log.exception(
                    "an engine was closed, but some of its work had failed or could not be finished"
                )
        self._closed = True
        give_up(self._registry)
        self._updates.guard.remove()
        self.device.set_pressure_handler(None)
        self._replicas.close()
        self._cpu_lane.close()
        self._gradient_lane.close()
        self._pool.close()
        self.device.close()
        self._slabs.close()
