"""From a `ParallelConfig` and a number of ranks to a `DeviceMesh` with named axes, and the groups that the rooms use.

Rank r of the world lies at ((pp * dp + d) * cp + c) * tp + t: tensor parallelism innermost, where links are fastest.
Experts live on the same ranks as the dense parameters: the shard group dp x cp is cut again into ep ranks that share
out the experts, and dp x cp / ep that hold the same ones.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import TYPE_CHECKING

import torch.distributed as dist

from offload_engine.config import ParallelConfig
from offload_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AXES", "Layout", "Mesh", "build_mesh", "layout_of"]

AXES = ("pp", "dp", "cp", "tp")
"""The axes of the mesh, outermost first."""
SHARD = "dp_cp"
"""The flattened axis that dense parameters are sharded over."""
EXPERT_DATA, EXPERT = "dp_cp_by_ep", "ep"


@dataclasses.dataclass(frozen=True)
class Layout:
    """How many ranks each axis has. `pp * dp * cp * tp` is the world; `ep` divides `dp * cp`."""

    pp: int
    dp: int
    cp: int
    tp: int
    ep: int

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def shard(self) -> int:
        """Ranks that share out a dense parameter."""
        return self.dp * self.cp

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts, and share them out."""
        return self.shard // self.ep

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the place of a rank on each axis of `AXES`.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not one of {self.world}.")
        place: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place

    def words(self) -> str:
        """Return the layout as the settings that make it, axes of one rank left out."""
        parts = [f"{axis} = {getattr(self, axis)}" for axis in (*AXES, "ep") if getattr(self, axis) > 1]
        return ", ".join(parts) or "dp = 1"


def layout_of(
    config: ParallelConfig,
    world: int,
    *,
    layers: int | None = None,
    heads: int | None = None,
    experts: int | None = None,
) -> Layout:
    """Return the layout of `world` ranks that a config asks for; `dp` takes what the other axes leave.

    Args:
        layers: blocks of the model, at least one for each pipeline stage; None: not known.
        heads: attention heads (of keys, where those are fewer), which tensor parallelism shares out.
        experts: routed experts, which `ep` divides; None: the model has none.

    Raises:
        ConfigError: there is no such layout of that many ranks, or the model cannot be cut like that. The message has
            the nearest ones that are possible.
    """
    fixed = config.pp * config.cp * config.tp
    dp = config.dp if config.dp is not None else max(1, world // fixed)
    asked = Layout(config.pp, dp, config.cp, config.tp, config.ep)
    limits = (layers, heads, experts)
    faults = _faults(asked, world, *limits)
    if not faults:
        return asked
    nearest = sorted(_possible(world, *limits), key=functools.partial(_distance, asked))[:3]
    offer = "; ".join(each.words() for each in nearest)
    raise ConfigError(
        f"{config.words()} is not possible with {world} ranks: {'; '.join(faults)}. "
        f"{f'The nearest layouts of {world} ranks that are: {offer}.' if offer else 'No layout of that many ranks is.'}"
    )


def _faults(
    layout: Layout, world: int, layers: int | None, heads: int | None, experts: int | None
) -> list[str]:
    faults = []
    if layout.world != world:
        faults.append(
            f"pp x dp x cp x tp = {layout.pp} x {layout.dp} x {layout.cp} x {layout.tp} = {layout.world} ranks"
        )
    if layout.shard % layout.ep:
        faults.append(f"ep = {layout.ep} does not divide dp x cp = {layout.shard}")
    if layers is not None and layout.pp > layers:
        faults.append(f"pp = {layout.pp} stages have only {layers} layers")
    if heads is not None and layout.tp > heads:
        faults.append(f"tp = {layout.tp} ranks have only {heads} heads of keys")
    if layout.ep > 1 and experts is None:
        faults.append(f"ep = {layout.ep}, but the model has no experts")
    if experts is not None and experts % layout.ep:
        faults.append(f"ep = {layout.ep} does not divide {experts} experts")
    return faults


def _possible(world: int, layers: int | None, heads: int | None, experts: int | None) -> list[Layout]:
    divisors = [number for number in range(1, world + 1) if world % number == 0]
    found = []
    for pp, cp, tp in itertools.product(divisors, repeat=3):
        if world % (pp * cp * tp) == 0:
            dp = world // (pp * cp * tp)
            for ep in (number for number in range(1, dp * cp + 1) if dp * cp % number == 0):
                layout = Layout(pp, dp, cp, tp, ep)
                if not _faults(layout, world, layers, heads, experts):
                    found.append(layout)
    return found


def _distance(asked: Layout, other: Layout) -> tuple[float, tuple[int, ...]]:
    """Return how far two layouts are apart: factors of the axes, dp counting half, since nothing is cut for it."""
    weights = {"pp": 1.0, "dp": 0.5, "cp": 1.0, "tp": 1.0, "ep": 1.0}
    far = sum(
        weight * abs(math.log2(getattr(asked, axis) / getattr(other, axis)))
        for axis, weight in weights.items()
    )
    return far, dataclasses.astuple(other)


class Mesh:
    """The ranks of a run on their axes, and this rank's place among them.

    Owns nothing: groups are those of `torch.distributed`, which ends them.
    """

    def __init__(self, layout: Layout, device_mesh: DeviceMesh, experts: DeviceMesh) -> None:
        self.layout = layout
        self.device_mesh = device_mesh
        self._experts = experts
        self.rank = dist.get_rank()
        self.place = layout.coordinates(self.rank)
        """Axis -> this rank's number on it."""

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return this rank's group along an axis of `AXES`, or along "dp_cp", "ep" or "dp_cp_by_ep".

        Raises:
            ValueError: there is no such axis.
        """
        if axis in (EXPERT, EXPERT_DATA):
            return self._experts.get_group(axis)
        if axis == SHARD:
            return self.shard_mesh.get_group()
        if axis not in AXES:
            raise ValueError(f"axis is {axis!r}. Valid: {', '.join((*AXES, SHARD, EXPERT, EXPERT_DATA))}.")
        return self.device_mesh.get_group(axis)

    @functools.cached_property
    def shard_mesh(self) -> DeviceMesh:
        """The flat mesh dp x cp that dense parameters are sharded over."""
        return _flat_shard(self.device_mesh)

    def ranks(self, axis: str) -> Sequence[int]:
        """Return the world's ranks in this rank's group along an axis, in the group's order."""
        return dist.get_process_group_ranks(self.group(axis))


def _flat_shard(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["dp", "cp"]._flatten(SHARD)


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """Make the mesh of the running process group, and all groups of its axes. Every rank calls it alike.

    Raises:
        ConfigError: the process group has another number of ranks than the layout, or there is none.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "there is no process group: start the program by torchrun, and call torch.distributed."
            "init_process_group() first."
        )
    if dist.get_world_size() != layout.world:
        raise ConfigError(
            f"the layout {layout.words()} has {layout.world} ranks, torch.distributed {dist.get_world_size()}. Start "
            f"as many, as in torchrun --nproc-per-node {layout.world}."
        )
    from torch.distributed.device_mesh import init_device_mesh  # takes a while to import, and is for few

    sizes = tuple(getattr(layout, axis) for axis in AXES)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
    shard = _flat_shard(mesh)
    experts = shard._unflatten(0, (layout.expert_data, layout.ep), (EXPERT_DATA, EXPERT))
    made = Mesh(layout, mesh, experts)
    made.__dict__["shard_mesh"] = shard
    return made
