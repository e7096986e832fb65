"""Sums of micro-batches' gradients kept on the device, in fp32, until the step's last micro-batch.

Called by the gradient store when the plan says accumulation = "device". Invariant: a sum is added up in the same order
and precision as on the host, so its bits are the same; what does not fit goes to the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload_engine.buckets import Bucket, ParameterEntry
from offload_engine.device import Device, DeviceBuffer
from offload_engine.errors import DeviceMemoryError

__all__ = ["DeviceSums"]


class DeviceSums:
    """Owns: one device buffer per bucket that has a sum, with its memory from a first gradient until `free`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: dict[int, DeviceBuffer] = {}
        self._sums: dict[int, torch.Tensor] = {}
        self._leaving: dict[int, int] = {}
        """Bucket -> how many copies of its sums to the host have not been seen done."""
        self.added = 0
        """Times that a bucket's gradients were added to its sums here, or began them."""
        self.refused = 0
        """Times that they had no room here and went to the host."""
        self.spilled = 0
        """Times that a bucket's sums went to the host before the step's last micro-batch."""

    def add(self, bucket: Bucket, items: Sequence[tuple[ParameterEntry, torch.Tensor]]) -> bool:
        """Add gradients (flat, in working dtype) to their sums, or begin them. False if the device has no room."""
        if bucket.index not in self._buffers:
            self._buffers[bucket.index] = self._device.new_buffer(
                f"gradient sum of bucket {bucket.name}", 4 * bucket.numel
            )
        buffer = self._buffers[bucket.index]
        try:
            buffer.allocate()
        except DeviceMemoryError:
            self.refused += 1
            return False
        self.added += 1
        if bucket.index not in self._sums:
            self._sums[bucket.index] = buffer.view(torch.float32, 0, (bucket.numel,), (1,))
        total = self._sums[bucket.index]
        for entry, grad in items:
            part = bucket.span(entry, total)
            if entry.on_device_sum:
                part.add_(
                    grad
                )  # in fp32; a converted copy would need room, for which this very sum might be spilled
            else:
                part.copy_(grad)
                entry.on_device_sum = True
        return True

    def sum_of(self, bucket: Bucket, entry: ParameterEntry) -> torch.Tensor:
        """Return the sum of one parameter: fp32, 1-D, on the device."""
        return bucket.span(entry, self._sums[bucket.index])

    def start_leaving(self, bucket: Bucket) -> None:
        """Note that a copy of some of the bucket's sums to the host has been queued; `left` ends it."""
        self._leaving[bucket.index] = self._leaving.get(bucket.index, 0) + 1

    def left(self, bucket: Bucket) -> None:
        """Note that one such copy is done; after the last one the bucket's memory is given back."""
        self._leaving[bucket.index] -= 1
        self.free(bucket)

    def free(self, bucket: Bucket) -> None:
        """Give the bucket's memory back, unless a sum is still there or a copy still reads one. Idempotent."""
        if (
            bucket.index in self._buffers
            and not self._leaving.get(bucket.index)
            and not any(entry.on_device_sum for entry in bucket.entries)
        ):
            self._buffers[bucket.index].free()

    def held(self) -> list[int]:
        """Return the buckets that have sums on the device, the largest first."""
        held = [index for index, buffer in self._buffers.items() if buffer.allocated]
        return sorted(held, key=lambda index: -self._buffers[index].nbytes)
