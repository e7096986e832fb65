"""The ranks of a run that hold the same model and see different data: they start alike, and stay so.

Called by the engine. Invariants: all ranks have the same settings, parameters and code, or none of them starts;
masters, states and buffers are rank 0's at the start; one rank writes a checkpoint, and none goes on before it is
whole.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from offload_engine.buckets import Bucket, BucketLayout, Registry
from offload_engine.config import EngineConfig, ParallelConfig
from offload_engine.device import Device
from offload_engine.errors import ConfigError, StateError
from offload_engine.parallel.collectives import (
    RankGroup,
    compare_ranks,
    host_group,
    rank_and_world,
    source_digest,
    watchdog_of,
)
from offload_engine.parallel.mesh import layout_of
from offload_engine.streaming import GradientExchange, GradientStore
from offload_engine.timeline import Timeline

__all__ = ["Replicas"]


class Replicas:
    """This process among those that train the same model; with one process it does nothing.

    Owns: a gloo group of its own for host memory, and a watchdog; until `close`.

    Args:
        config: its `parallel` says what the ranks of a running process group do.

    Raises:
        ConfigError: ranks differ in what must be alike, or the config asks for what several ranks cannot do.
    """

    def __init__(self, config: EngineConfig, registry: Registry) -> None:
        self.rank, self.world = 0, 1
        self._group: RankGroup | None = None
        self._exchange: GradientExchange | None = None
        self.close: Callable[[], None] = lambda: None
        rank, world = rank_and_world()
        layout = layout_of(config.parallel, world)
        _check(config, config.parallel, world)
        if world == 1:
            return
        self.rank, self.world = rank, layout.world
        compare_ranks(_facts(config, registry))
        watchdog = watchdog_of()
        self.close = watchdog.close
        try:
            self._group = host_group("replicas", watchdog)
        except BaseException:
            self.close()
            raise

    @property
    def place(self) -> dict[str, int]:
        """Return rank and world, as `plan_layout` takes them."""
        return {"rank": self.rank, "world": self.world}

    def compare_layouts(self, layouts: Sequence[BucketLayout], device: Device) -> None:
        """Raise a ConfigError unless all ranks have laid their parameters out alike, on devices of their own."""
        if self._group is not None:
            self._check_device(self._group, device)
            shape = [
                (layout.numel, str(layout.dtype), [e.name for e in layout.entries]) for layout in layouts
            ]
            digest = f"digest {zlib.crc32(repr(shape).encode()):08x}"
            budget = "as bucket_bytes and device_memory, or devices of several sizes, make them"
            compare_ranks({f"the layout of buckets, {budget},": f"{len(layouts)} buckets, {digest}"})

    def _check_device(self, group: RankGroup, device: Device) -> None:
        place = device.torch_device
        if place.type == "cpu":
            return
        mine = torch.tensor([zlib.crc32(f"{socket.gethostname()} {place}".encode())])
        places = torch.zeros(group.size, dtype=torch.int64)
        group.gather(mine, places, "devices of the ranks")
        shared = [
            rank for rank, other in enumerate(places.tolist()) if other == int(mine) and rank != self.rank
        ]
        if shared:
            raise ConfigError(
                f"ranks {self.rank} and {shared[0]} are both on {place} of this machine. Give each rank its own device "
                f"before wrapping: torch.accelerator.set_device_index(int(os.environ['LOCAL_RANK']))."
            )

    def words(self) -> list[str]:
        """Return what the log says of the ranks."""
        if self._group is None:
            return []
        return [
            f"ranks: {self.world} replicas, this is rank {self.rank}; gradients are averaged after backward on the "
            f"host (gloo), outside of no_sync"
        ]

    def start(
        self,
        model: nn.Module,
        registry: Registry,
        buckets: Sequence[Bucket],
        gradients: GradientStore,
        timeline: Timeline,
    ) -> None:
        """Give every rank the values of rank 0, and average gradients from now on."""
        if self._group is None:
            return
        group = self._group
        for bucket in buckets:
            for kind, array in _arrays(bucket):
                group.broadcast(array, 0, f"{kind} of bucket {bucket.name}")
            bucket.version += 1
        steps = torch.stack([entry.step for entry in registry.entries])
        group.broadcast(steps, 0, "step counters")
        with torch.no_grad():
            for entry, step in zip(registry.entries, steps, strict=True):
                entry.step.copy_(step)
            for name, buffer in model.named_buffers():
                value = buffer.detach().cpu().contiguous()
                group.broadcast(value.reshape(-1).view(torch.uint8), 0, f"buffer {name}")
                buffer.copy_(value)
        self._exchange = GradientExchange(group, registry, buckets, gradients, timeline)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a block in which gradients are not averaged."""
        return nullcontext() if self._exchange is None else self._exchange.paused()

    def once(self) -> AbstractContextManager[None]:
        """Return a block whose gradients are averaged once, at its end."""
        return nullcontext() if self._exchange is None else self._exchange.once()

    @contextmanager
    def writing(self, buckets: Sequence[Bucket]) -> Iterator[bool]:
        """Say whether this rank is the one that writes a checkpoint in the block; afterwards it is written.

        Raises:
            StateError: the ranks' values have come apart.
        """
        group = self._group
        if group is None:
            yield True
            return
        digests = torch.tensor([[_digest(bucket) for bucket in buckets]] * group.size)
        group.broadcast(digests[0], 0, "values of rank 0")
        apart = torch.tensor([int(own != first) for own, first in zip(digests[1], digests[0], strict=True)])
        group.sum(apart, "comparison of replicas")
        if apart.any():
            index = int(apart.nonzero()[0])
            raise StateError(
                f"the replicas have come apart: {int(apart[index])} of {group.size} ranks have other values than rank "
                f"0 in bucket {buckets[index].name}. Something has changed parameters on some ranks alone. Load the "
                f"last checkpoint on all of them."
            )
        failed = torch.ones(1, dtype=torch.int32)
        try:
            yield self.rank == 0
            failed.zero_()
        finally:
            group.sum(failed, "end of a checkpoint")  # waits, and tells of a disk that is full
        if int(failed):
            raise StateError("rank 0 could not write the checkpoint; its own error says why.")


def _check(config: EngineConfig, asked: ParallelConfig, world: int) -> None:
    if asked.zero_stage != 0 or max(asked.pp, asked.cp, asked.tp, asked.ep) > 1:
        raise ConfigError(
            f"parallel asks for {asked.words()}, zero_stage = {asked.zero_stage}; the engine has replicas so far: dp, "
            f"and zero_stage = 0."
        )
    if world > 1:
        for name, value in {"gradients": "release", "update_timing": "during_backward"}.items():
            if getattr(config, name) == value:
                raise ConfigError(
                    f"{name} = {value!r} updates parameters before the gradients of other ranks are there. With "
                    f"several ranks use {name} = {'keep' if name == 'gradients' else 'under_forward'!r}."
                )


def _facts(config: EngineConfig, registry: Registry) -> dict[str, object]:
    """Return what must be the same on all ranks."""
    named = [(e.name, tuple(e.shape), str(e.original_dtype), e.trainable) for e in registry.entries]
    settings = [
        {key: value for key, value in (entry.group or {}).items() if key != "params"}
        for entry in registry.entries
    ]
    alike = {
        key: value for key, value in vars(config).items() if key not in ("device", "threads", "host_memory")
    }
    return {
        **alike,
        "the parameters": f"{len(named)} parameters, digest {zlib.crc32(repr(named).encode()):08x}",
        "the optimizer's settings": f"digest {zlib.crc32(repr(settings).encode()):08x}",
        "torch": torch.__version__,
        "the package's code": source_digest(),
    }


def _arrays(bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    yield "working copy", bucket.working.view(torch.uint8)
    if bucket.master is not None and not bucket.is_own_master:
        yield "master", bucket.master.view(torch.uint8)
    for key, array in bucket.states.items():
        yield key, array.view(torch.uint8)


def _digest(bucket: Bucket) -> int:
    """Return a checksum of the bucket's values."""
    digest = 0
    for _, array in _arrays(bucket):
        digest = zlib.crc32(array.numpy().data, digest)
    return digest
