"""Notices what users do to parameters between steps, and makes the host copies and masters follow.

Three ways lead there: `param.data = other` (another address or layout), writing in place (`load_state_dict`, `init.*`,
`param.copy_`: another version), and writing through `param.data`, which the guard notes as a touched bucket. Called
before parameters are used, updated or saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from offload_engine.buckets import Bucket, ParameterEntry, Registry
from offload_engine.errors import StateError
from offload_engine.streaming.lanelog import LaneLog
from offload_engine.timeline import CAUSE_READ

__all__ = ["ExternalChanges", "Touched"]

_no_dispatch = torch._C._DisableTorchDispatch


class Touched:
    """Buckets whose host memory somebody outside may have written, by what of it."""

    def __init__(self) -> None:
        self.values: set[int] = set()
        """Working copies (in fp32 the masters)."""
        self.gradients: set[int] = set()
        self.states: set[int] = set()
        """Masters that are not the working copy, and moments."""

    def note(self, bucket: Bucket, kind: str) -> None:
        """Note a write to one of the bucket's slabs (see `Bucket.slabs`). Called before it is made."""
        kinds = {"working copy": self.values, "gradient": self.gradients}
        if kind not in kinds:
            bucket.state_writes += 1
        elif kind == "working copy":
            bucket.keep_working()
        kinds.get(kind, self.states).add(bucket.index)


class ExternalChanges:
    """Compares every parameter with what the engine last saw of it."""

    def __init__(self, registry: Registry, buckets: Sequence[Bucket], touched: Touched, log: LaneLog) -> None:
        self._registry = registry
        self._log = log
        self._buckets = buckets
        self._touched = touched
        self.closing = False
        """The engine is being closed: the model may have what it likes."""
        self.on_unfrozen: Callable[[], None] = lambda: None
        """Called between passes when a parameter without a place for its gradient requires one."""

    def sweep(self) -> None:
        """Take over every change made since the last sweep.

        Raises:
            StateError: a parameter has another shape or dtype than at wrapping, or is new.
            UnsupportedError, DeviceMemoryError, HostMemoryError: one was frozen then, and cannot be trained now.
        """
        if not self.closing:
            self._registry.check_additions()
        self.take_touched()
        for entry in self._registry.entries:
            if entry.uses == 0:
                self._check_values(entry)
        if not self.closing and self.has_unfrozen(self._registry.entries):
            self.on_unfrozen()

    @staticmethod
    def has_unfrozen(entries: Sequence[ParameterEntry]) -> bool:
        """Whether one of them requires a gradient and has no place for it."""
        return any(entry.param.requires_grad and not entry.trainable for entry in entries)

    def take_touched(self) -> None:
        """Take over what was written through aliases of working copies."""
        while self._touched.values:
            bucket = self._buckets[self._touched.values.pop()]
            for entry in bucket.entries:
                seen = entry.param._version if entry.uses == 0 else entry.seen_version
                self.written(entry, entry.host_view)
                entry.seen_version = seen  # what a unit in use has done on the device is noticed when it ends
            bucket.kept_working = None

    def forget(self) -> None:
        """Drop gradients, and what was noted or assigned to parameters: other values have taken their place."""
        self._touched.values.clear()
        for bucket in self._buckets:
            bucket.kept_working = None
        for entry in self._registry.entries:
            entry.param.grad = None
            if entry.param.data_ptr() != entry.host_address:
                entry.param.data = entry.host_view

    def check(self, entry: ParameterEntry) -> None:
        """Take over what was done to one parameter that a unit is about to use.

        Raises:
            StateError: it was unfrozen since the pass began, or has another shape or dtype.
        """
        self._check_values(entry)
        if entry.param.requires_grad and not entry.trainable:
            raise StateError(
                f"parameter '{entry.name}' was frozen when this forward began and requires a gradient now. Freeze and "
                f"unfreeze between passes: then the engine makes room for its gradient and states."
            )

    def _check_values(self, entry: ParameterEntry) -> None:
        param = entry.param
        if (
            (param.data_ptr() != entry.host_address and entry.span_numel)
            or param.shape != entry.shape
            or param.stride() != entry.stride
        ):
            self._adopt(entry)
        elif param._version != entry.seen_version:
            self.written(entry, entry.host_view)

    def point_at_host(self, entry: ParameterEntry) -> None:
        """Make the parameter the host working copy again, with what was written or assigned while on the device.

        Raises:
            StateError: it was assigned something of another shape or dtype, which is dropped.
        """
        param = entry.param
        if (
            param._version != entry.seen_version
            or param.data_ptr() != entry.device_view.data_ptr()
            or param.shape != entry.shape
            or param.stride() != entry.stride
        ):
            self._adopt(entry)
        else:
            param.data = entry.host_view

    def _adopt(self, entry: ParameterEntry) -> None:
        new = entry.param.data
        entry.param.data = entry.host_view
        if new.shape != entry.shape:
            raise StateError(
                f"parameter '{entry.name}' had shape {tuple(entry.shape)} when it was wrapped and has "
                f"{tuple(new.shape)} now. Its bucket is laid out for the old shape: call engine.close(), change the "
                f"model, and wrap it anew."
            )
        widens = entry.working_dtype is not torch.float32 and new.dtype is torch.float32
        if new.dtype is not entry.working_dtype and not widens:
            raise StateError(
                f"parameter '{entry.name}' is {new.dtype} now (model.half(), .double() or .to(dtype)?); the engine "
                f"computes it in {entry.working_dtype}. Call engine.close() first, or choose EngineConfig.precision."
            )
        if new.data_ptr() == entry.host_address:
            new = new.clone()  # the same memory seen otherwise, transposed for example
        self.written(entry, new)

    def written(self, entry: ParameterEntry, value: torch.Tensor) -> None:
        """Make host copy and master hold `value`, in the best precision that there is.

        Where the new working value is the master's own rounding, the master stays: who scales half of a bf16
        parameter does not round the other half.
        """
        bucket = self._buckets[entry.bucket_index]
        with self._log.waiting_for(bucket.pending_update, CAUSE_READ, bucket.name, bucket.index):
            bucket.wait_update()
        bucket.bring_back("master", *bucket.states)
        with torch.no_grad(), _no_dispatch():  # host memory: nothing for the device's ledger
            if bucket.master is None or bucket.is_own_master or value.dtype is torch.float32:
                bucket.write_master(entry, value)
            elif bucket.is_split:
                self._follow_split(bucket, entry, value)
            else:
                if value is not entry.host_view:
                    entry.host_view.copy_(value)
                master = bucket.read_master(entry)
                kept = master.to(value.dtype) == entry.host_view
                master.copy_(torch.where(kept, master, entry.host_view.float()))
        bucket.version += 1
        entry.seen_version = entry.param._version

    @staticmethod
    def _follow_split(bucket: Bucket, entry: ParameterEntry, value: torch.Tensor) -> None:
        """Write a working value whose remainders belong to the working copy from before.

        Where nobody kept that (a write on a thread that never stepped), the value is the master, without a remainder.
        """
        before = bucket.kept_working
        if before is None and (value is not entry.host_view or entry.shares_version):
            before = bucket.working
        if before is None:
            bucket.write_master(entry, value)
        else:
            master = bucket.read_master(entry, before)
            kept = master.to(value.dtype) == value
            bucket.write_master(entry, torch.where(kept, master, value.float()))
