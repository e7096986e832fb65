"""Saved activations on the host between forward and backward, as an alternative to recomputing them.

Called by the streamer (passes and modules) and, when memory is short, by residency. Invariant: backward gets bit for
bit what forward saved, or the error that plain torch would raise.

Note: life of a saved tensor.
    While a chosen module runs, torch hands every tensor that autograd saves to `pack`. What is device memory and large
    enough is copied to a block of the host pool; the device storage is held by that copy alone, and goes when it is
    done. `unpack` takes the storage itself if it is still there, else fetches the bytes into new device memory; while
    backward is at work on one layer, the bytes of the layer before are fetched as far as there is room.
"""

from __future__ import annotations

import fnmatch
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from offload_engine.device import Device, Transfer
from offload_engine.errors import ConfigError, StateError
from offload_engine.host import SlabAllocator
from offload_engine.streaming.blocks import find_blocks
from offload_engine.streaming.host_pool import HostBlock, HostPool
from offload_engine.streaming.lanelog import LaneLog
from offload_engine.timeline import CAUSE_ACTIVATION, D2H, H2D

__all__ = ["MIN_BYTES", "ActivationStore", "offloadable"]

MIN_BYTES = 4096
"""What is smaller stays on the device: starting its copy would cost more than its memory is worth."""

_ALIGN = 64
_log = logging.getLogger("offload_engine")
_graph_task_id = torch._C._current_graph_task_id
_hooks_enabled: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
_set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)
_no_modes = torch._C.DisableTorchFunction
_no_dispatch = torch._C._DisableTorchDispatch


def offloadable(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules whose activations may be offloaded, by name.

    Args:
        patterns: names, with "*" for any text between dots ("layers.*"; "" is the model itself). Empty: the blocks that
            the model is a sequence of.

    Raises:
        ConfigError: a pattern matches nothing, or there is neither a pattern nor a block.
    """
    if not patterns:
        blocks = dict(find_blocks(model))
        if not blocks:
            raise ConfigError(
                "activations = 'offload', but the model has no sequence of blocks to be found. Name the modules whose "
                "activations are to be offloaded: activation_modules = ['encoder.*']."
            )
        return blocks
    modules = dict(model.named_modules())
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        parts = pattern.split(".")
        found = {
            name: module
            for name, module in modules.items()
            if len(own := name.split(".")) == len(parts) and all(map(fnmatch.fnmatchcase, own, parts))
        }
        if not found:
            some = ", ".join(repr(name) for name in list(modules)[1:9])
            raise ConfigError(
                f"activation_modules has {pattern!r}, which is the name of no module. Names are those of "
                f"model.named_modules() ({some} ...), with '*' for any part between dots."
            )
        chosen.update(found)
    return chosen


class _Copy:
    """Bytes `start` to `start + nbytes` of one device storage on the host. Lives as long as a saved tensor of it."""

    __slots__ = (
        "__weakref__",
        "arriving",
        "block",
        "device",
        "leaving",
        "name",
        "nbytes",
        "place",
        "saved",
        "source",
        "start",
        "unpacked",
        "watch",
    )

    def __init__(
        self,
        name: str,
        source: torch.UntypedStorage,
        start: int,
        block: HostBlock,
        leaving: Transfer,
        place: int,
        watch: torch.Tensor,
    ) -> None:
        self.name = name
        self.watch = watch
        """Has the version counter of the tensors that it serves, and no memory."""
        self.source = weakref.ref(source)
        """The storage while anybody has it: torch keeps one object per memory block until its last user is gone."""
        self.start = start
        self.nbytes = block.tensor.numel()
        self.block = block
        self.leaving = leaving
        self.place = place
        """Where it comes in the order of saving."""
        self.saved = 0
        """How many saved tensors it serves."""
        self.device: torch.Tensor | None = None
        """The bytes back on the device, or on their way: 1-D uint8."""
        self.arriving: Transfer | None = None
        self.unpacked = 0
        """How many saved tensors were made of `device`."""

    def living(self) -> torch.UntypedStorage | None:
        """Return the storage that was saved, if it is still there as it was."""
        storage = self.source()
        return storage if storage is not None and storage.nbytes() >= self.start + self.nbytes else None


class _Layer:
    """One run of a module: what it saves belongs together."""

    __slots__ = ("hooks", "name", "nbytes", "pack")

    def __init__(self, name: str) -> None:
        self.name = name
        self.nbytes = 0
        self.pack: Callable[[torch.Tensor], Any] | None = None
        self.hooks: saved_tensors_hooks | None = None


class _Kept:
    """A saved tensor that stays where it is."""

    __slots__ = ("layer", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, layer: _Layer) -> None:
        # Anything but a leaf would, through its graph, hold the node that saves it: a cycle that is never freed.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = tensor._version
        self.layer = layer


class _Offloaded:
    """A saved tensor whose bytes are in a copy."""

    __slots__ = ("copy", "dtype", "layer", "offset_bytes", "shape", "stride", "version")

    def __init__(self, tensor: torch.Tensor, copy: _Copy, layer: _Layer) -> None:
        self.copy = copy
        self.layer = layer
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset_bytes = tensor.storage_offset() * tensor.element_size()
        self.version = tensor._version
        copy.saved += 1

    def view(self, storage: torch.UntypedStorage, start: int) -> torch.Tensor:
        """Return the saved tensor over a storage whose first byte is byte `start` of the one that was saved."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(
            storage, (self.offset_bytes - start) // empty.element_size(), self.shape, self.stride
        )


def _check_version(
    saved: _Kept | _Offloaded, now: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]
) -> None:
    if now._version != saved.version:
        raise StateError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{dtype} {list(shape)}], saved in module '{saved.layer.name}', is at version {now._version}; expected "
            f"version {saved.version} instead. Use the operation that is not in place, or change a clone. "
            f"torch.autograd.set_detect_anomaly(True) shows which operation saved it."
        )


class ActivationStore:
    """Moves what autograd saves inside chosen modules to the host and back.

    Owns: the host pool, fetched device memory that backward has not used yet, and while chosen modules run one pair of
    saved-tensor hooks for each of them on torch's stack.

    Args:
        kept: returns the storages that are no activations (module buffers); asked at the start of each pass.
        engine_storages: ids of the engine's device buffers, where parameters lie.
    """

    def __init__(
        self,
        device: Device,
        log: LaneLog,
        slabs: SlabAllocator,
        kept: Callable[[], Iterable[torch.Tensor]],
        engine_storages: Iterable[int],
    ) -> None:
        self._device = device
        self._log = log
        self._kept = kept
        self._kept_storages: set[int] = set()
        self._engine_storages = set(engine_storages)
        self._pool = HostPool(slabs)
        self._empty = torch.empty(0, device=device.torch_device)
        self.names: frozenset[str] = frozenset()
        """The modules whose activations are offloaded (StepPlan.offloaded_activations)."""
        self.min_bytes = MIN_BYTES
        self.offloaded_bytes = 0
        """Bytes copied to the host since the start."""
        self.offloads = 0
        """Copies to the host since the start."""
        # Without a device that calls for help when memory runs short, copies on their way are kept to an eighth of it.
        budget = device.budget_bytes
        self._leaving_limit = None if device.counts_everything or budget is None else budget // 8
        self._leaving_bytes = 0
        self.idle_because = "none of those modules ran in a forward with gradients"
        """Why nothing was offloaded, where that is so."""
        self._said = False
        self._running: list[tuple[nn.Module, _Layer | None]] = []
        self._copies: weakref.WeakValueDictionary[tuple[int, int], _Copy] = weakref.WeakValueDictionary()
        """(id of the storage, version) -> its copy."""
        self._order: list[weakref.ref[_Copy]] = []
        self._ahead = -1
        """The place from which on, backwards, nothing is fetched yet."""
        self._fetched: weakref.WeakSet[_Copy] = weakref.WeakSet()
        self._layer: _Layer | None = None
        """The layer that backward is at."""
        self._window_bytes = 0
        """The largest layer so far: how much is fetched ahead."""

    # Modules, in forward.

    def add_storages(self, engine_storages: Iterable[int]) -> None:
        """Know further device buffers of the engine."""
        self._engine_storages.update(engine_storages)

    def enter(self, name: str, module: nn.Module) -> None:
        """Take over what autograd saves from here until `leave`. Not in a backward: what is recomputed is used at once.

        Somebody else's hooks are left alone: those of activation checkpointing around the module, say.
        """
        if name not in self.names:
            return
        layer: _Layer | None = None
        if not torch.is_grad_enabled() or _graph_task_id() != -1:
            pass
        elif not self._may_push():
            self.idle_because = (
                "other saved-tensor hooks are active around them, as those of activation checkpointing are"
            )
        else:
            self.idle_because = (
                f"all they save is parameters, buffers or tensors below {self.min_bytes} bytes"
            )
            layer = _Layer(name)
            layer.pack = partial(self._pack, layer)
            layer.hooks = saved_tensors_hooks(layer.pack, self._unpack)
            layer.hooks.__enter__()
        self._running.append((module, layer))

    def _may_push(self) -> bool:
        if torch.compiler.is_compiling() or not _hooks_enabled():
            return False
        pack = _top_pack()
        return pack is None or any(layer is not None and layer.pack is pack for _, layer in self._running)

    def leave(self, module: nn.Module) -> None:
        """End what `enter` began; also when the module has raised, and for modules in it that were left by that."""
        if any(each is module for each, _ in self._running):
            while self._leave_last() is not module:
                pass

    def _leave_last(self) -> nn.Module:
        module, layer = self._running.pop()
        if layer is not None:
            assert layer.hooks is not None
            if _top_pack() is layer.pack:
                layer.hooks.__exit__()
            layer.pack = layer.hooks = None  # they refer to each other
            self._window_bytes = max(self._window_bytes, layer.nbytes)
        return module

    def put_aside(self) -> list[tuple[nn.Module, _Layer | None]]:
        """Return the modules that run, and forget them: another call of the model goes on, on another thread."""
        running, self._running = self._running, []
        return running

    def take_up(self, running: list[tuple[nn.Module, _Layer | None]]) -> None:
        """Go on, on its own thread, with what `put_aside` has returned."""
        self._running = running

    def abandon(self) -> None:
        """Take off what is left of modules that ended without their hooks (an interrupt). Only when none runs."""
        while self._running:
            self._leave_last()

    # Saving.

    def _pack(self, layer: _Layer, tensor: torch.Tensor) -> _Kept | _Offloaded:
        with _no_modes(), _no_dispatch():
            extent = self._extent(tensor)
            if extent is None:
                return _Kept(tensor, layer)
            storage = tensor.untyped_storage()
            key = id(storage), tensor._version
            copy = self._copies.get(key)
            if (
                copy is None
                or copy.living() is not storage
                or extent[0] < copy.start
                or extent[1] > copy.start + copy.nbytes
                or not _same_counter(tensor, copy.watch)
            ):
                watch = tensor.detach()
                watch.data = self._empty
                copy = self._start_copy(layer, storage, *extent, watch)
                self._copies[key] = copy
            return _Offloaded(tensor, copy, layer)

    def _extent(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return the bytes of the tensor's storage that are to be copied, or None if the tensor stays.

        That is the whole storage, for other views of it and since it is freed only when all of it has left, unless
        the tensor is but a small part of it.
        """
        if (
            type(tensor) is not torch.Tensor
            or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
            or tensor.layout is not torch.strided
            or tensor.is_quantized
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.numel() == 0
        ):
            return None
        size = tensor.element_size()
        start = int(tensor.storage_offset()) * size
        end = (
            start + size + size * sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        )
        if end - start < self.min_bytes:
            return None
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._engine_storages or key in self._kept_storages or not self._device.holds(tensor):
            return None
        whole = storage.nbytes()
        if 4 * (end - start) >= whole:
            return 0, whole
        return start // _ALIGN * _ALIGN, end

    def _start_copy(
        self, layer: _Layer, storage: torch.UntypedStorage, start: int, end: int, watch: torch.Tensor
    ) -> _Copy:
        self._log.reap()
        nbytes = end - start
        if self._leaving_limit is not None:
            while self._leaving_bytes + nbytes > self._leaving_limit and self._wait_leaving():
                pass
        block = self._pool.take(nbytes)
        source = torch.empty(0, dtype=torch.uint8, device=storage.device)
        source.set_(storage, start, (nbytes,), (1,))
        transfer = self._device.start_d2h([(block.tensor, source)], f"activations of {layer.name}")
        copy = _Copy(layer.name, storage, start, block, transfer, len(self._order), watch)
        self._order.append(weakref.ref(copy))
        self._leaving_bytes += nbytes
        layer.nbytes += nbytes
        self.offloaded_bytes += nbytes
        self.offloads += 1

        def done() -> None:
            transfer.release()
            self._leaving_bytes -= block.tensor.numel()  # and the block is held until here

        self._log.job(transfer.event, D2H, transfer.name, nbytes=nbytes, on_done=done)
        return copy

    def _wait_leaving(self) -> bool:
        oldest = self._log.oldest(D2H)
        if oldest is None:
            return False
        with self._log.waiting(CAUSE_ACTIVATION, "activations on their way to the host"):
            oldest.wait()
        self._log.reap()
        return True

    # Using, in backward.

    def _unpack(self, saved: _Kept | _Offloaded) -> torch.Tensor:
        if isinstance(saved, _Kept):
            _check_version(saved, saved.tensor, saved.tensor.dtype, saved.tensor.shape)
            return saved.tensor
        _check_version(saved, saved.copy.watch, saved.dtype, saved.shape)
        with _no_modes():
            copy = saved.copy
            if saved.layer is not self._layer:
                self._layer = saved.layer
                for each in list(self._fetched):
                    if each.unpacked:
                        self._drop(each)
            storage, start = copy.living(), 0
            if storage is None:
                start = copy.start
                if copy.device is None:
                    self._start_fetch(copy)
                    self._ahead = copy.place - 1
            self._look_ahead()
            if storage is None:
                self._wait_fetch(copy)
                assert copy.device is not None
                storage = copy.device.untyped_storage()
            with _no_dispatch():
                tensor = saved.view(storage, start)
            if copy.device is not None:
                copy.unpacked += 1
                if copy.unpacked >= copy.saved:
                    self._drop(copy)  # from here on autograd alone holds it
            return tensor

    def _start_fetch(self, copy: _Copy) -> None:
        name = f"activations of {copy.name}"
        device = self._device.new_tensor(copy.nbytes, name)
        block = copy.block
        transfer = self._device.start_h2d(device, block.tensor, name, (copy.leaving.event,))
        copy.device, copy.arriving, copy.unpacked = device, transfer, 0
        self._fetched.add(copy)

        def done(_: HostBlock = block) -> None:  # the block is held until here
            transfer.release()

        self._log.job(transfer.event, H2D, name, nbytes=copy.nbytes, on_done=done)

    def _wait_fetch(self, copy: _Copy) -> None:
        transfer = copy.arriving
        if transfer is not None:
            if transfer.done():
                transfer.wait()  # raises if it failed
            else:
                with self._log.waiting(CAUSE_ACTIVATION, transfer.name):
                    self._device.wait_compute(transfer)
            copy.arriving = None
            self._log.reap()

    def _look_ahead(self) -> None:
        """Fetch what comes next in backward: at most as much as the largest layer, and half of what is free."""
        ahead = sum(copy.nbytes for copy in self._fetched if copy.device is not None and not copy.unpacked)
        while self._ahead >= 0:
            copy = self._order[self._ahead]()
            if copy is not None and copy.device is None and copy.living() is None:
                free = self._device.free_bytes()
                ahead += copy.nbytes
                if ahead > self._window_bytes or (free is not None and copy.nbytes > free // 2):
                    return
                self._start_fetch(copy)
            self._ahead -= 1

    def _drop(self, copy: _Copy) -> None:
        """Let go of fetched memory; a copy on its way holds it until it is done."""
        copy.device = copy.arriving = None
        self._fetched.discard(copy)

    def free_one(self) -> bool:
        """Give fetched memory back: what is needed last first. False when there is none."""
        fetched = [copy for copy in self._fetched if copy.device is not None]
        if not fetched:
            return False
        copy = min(fetched, key=lambda copy: (copy.unpacked > 0, copy.place))
        arriving = copy.arriving
        self._ahead = max(self._ahead, copy.place)
        self._drop(copy)
        if arriving is not None:
            arriving.event.wait()
            self._log.reap()
        return True

    # Passes and steps.

    def begin_forward(self) -> None:
        """Start a pass of the model."""
        self._forget_dead()
        self._kept_storages = {id(tensor.untyped_storage()) for tensor in self._kept()}

    def begin_backward(self) -> None:
        """Start a backward: what was saved last is needed first."""
        self._ahead = len(self._order) - 1
        self._look_ahead()

    def end_backward(self) -> None:
        """Let go of what backward did not use."""
        for copy in list(self._fetched):
            self._drop(copy)
        self._layer = None
        self._ahead = -1
        self._forget_dead()

    def end_step(self) -> None:
        """Fit the host memory to what the step needed. The only place where host memory is pinned."""
        self.abandon()
        self._pool.end_step()
        if self.names and not self.offloads and not self._said:
            self._said = True
            _log.warning(f"activations = 'offload', but nothing was offloaded: {self.idle_because}")

    def _forget_dead(self) -> None:
        living = [copy for ref in self._order if (copy := ref()) is not None]
        for place, copy in enumerate(living):
            copy.place = place
        self._order = [weakref.ref(copy) for copy in living]


def _same_counter(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether a change of `a` in place counts as one of `b`.

    Tensors of one storage may have counters of their own, and then equal versions are not equal values: the gates of
    torch's GRU are chunks that are changed one by one.
    """
    version = a._version
    if b._version != version:
        return False
    _set_versions((a,), (version + 1,))
    same: bool = b._version == version + 1
    _set_versions((a,), (version,))
    return same


def _top_pack() -> Any:
    """Return the pack hook that torch would call now, or None."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if top is None else top[0]
