"""Which cores a rank takes, on which nodes its slabs lie, and how many threads each kind of work gets.

Called once per engine; what was chosen is logged with `ThreadSplit.sentence()`. Invariants: the update's threads do not
follow OMP_NUM_THREADS, which launchers set to 1 for every rank; every rank of a machine computes the same shares from
the same facts, so they need not talk to each other, and no core is in two of them unless there are fewer than ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from offload_engine.config import ThreadsConfig
from offload_engine.errors import ConfigError
from offload_engine.host.topology import Core, Topology, cpu_list, cpu_words, device_node, read_topology

__all__ = ["LocalRank", "ThreadSplit", "local_rank", "split_threads"]


@dataclasses.dataclass(frozen=True)
class LocalRank:
    """Place of this process among the `count` processes of the job on this machine.

    `device_nodes` are the NUMA nodes of all their devices, in order of rank; empty where not all are known.
    """

    index: int = 0
    count: int = 1
    device_nodes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ConfigError(
                f"LOCAL_RANK is {self.index} and LOCAL_WORLD_SIZE {self.count}; a rank is from 0 to one below the "
                f"size. Start with torchrun, or set both, or neither for a single process."
            )


def local_rank(
    environment: Mapping[str, str],
    devices: Callable[[], tuple[int, Sequence[str]]] = lambda: (0, ()),
    *,
    root: Path = Path("/"),
) -> LocalRank:
    """Return what the launcher says in LOCAL_RANK and LOCAL_WORLD_SIZE; without the latter, a rank on its own.

    Args:
        devices: asked where there are several ranks: this rank's device and the PCI addresses of all that it sees. The
            r-th rank is taken to have the r-th device; where this is not so, or not known, devices do not count.

    Raises:
        ConfigError: one of them is no number, or they do not fit together.
    """
    size = environment.get("LOCAL_WORLD_SIZE")
    if size is None:
        return LocalRank()
    rank = environment.get("LOCAL_RANK", "0")
    if not (size.isdigit() and rank.isdigit()):
        raise ConfigError(
            f"LOCAL_RANK is {rank!r} and LOCAL_WORLD_SIZE {size!r}; both must be numbers, as torchrun sets them."
        )
    found = LocalRank(int(rank), int(size))
    index, addresses = devices() if found.count > 1 else (0, ())
    if index != found.index or len(addresses) < found.count:
        return found
    nodes = [device_node(address, root) for address in addresses[: found.count]]
    known = tuple(node for node in nodes if node is not None)
    return dataclasses.replace(found, device_nodes=known if len(known) == found.count else ())


@dataclasses.dataclass(frozen=True)
class ThreadSplit:
    """Threads of each kind of work. `copies` is per copy lane; `cores` is what this rank may use."""

    compute: int
    update: int
    copies: int
    cores: int
    reason: str
    cpus: tuple[int, ...] = ()
    """Where the update's threads run. Empty: wherever the system puts them."""
    nodes: tuple[int, ...] = ()
    """Where slabs lie: one is preferred, several take turns page by page. Empty: wherever they are touched."""
    node_cpus: tuple[int, ...] = ()
    """The rank's CPUs, from which pages may be touched first where memory cannot be bound."""

    def sentence(self) -> str:
        """Return the split as one sentence for the log."""
        cores = f"{self.cores} usable core{'' if self.cores == 1 else 's'} ({self.reason})"
        bound = f"; the update stays on CPUs {cpu_words(self.cpus)}" if self.cpus else ""
        if len(self.nodes) == 1:
            bound += f"; slabs on NUMA node {self.nodes[0]}"
        elif self.nodes:
            bound += f"; slabs spread over NUMA nodes {cpu_words(self.nodes)}"
        threads = f"compute {self.compute}, update {self.update}, copies {self.copies} per lane"
        return f"Threads: {threads}, on {cores}{bound}."


def split_threads(
    config: ThreadsConfig, rank: LocalRank | None = None, *, root: Path = Path("/")
) -> ThreadSplit:
    """Choose the cores of this rank and split them.

    Compute keeps torch's own intra-op setting unless the config names a number, so that a plain loop beside the
    engine computes with the same threads. The update takes one thread on each core of its rank: it lies under compute,
    is bound by memory, which SMT siblings do not widen, and must finish soonest where compute waits for it.

    A rank's share is whole cores, next to each other on one node (whole nodes where there are fewer ranks), near its
    device where that is known. Threads and slabs are bound only where there is something to keep apart: threads where
    a share is a part of what the process may use, slabs where the machine has several nodes.

    Raises:
        ConfigError: `cpus` of the config is no list, or names CPUs that this process may not use.
    """
    rank = rank or LocalRank()
    topology = _restricted(read_topology(root), config.cpus)
    cores, reason, apart = _share(topology, rank)
    count = topology.within_quota(len(cores), rank.count)
    if count < len(cores) and topology.quota is not None:
        quota = f"by a cgroup quota of {topology.quota:g} of {len(topology.cores)}"
        reason = quota if rank.count == 1 else f"{reason}, {quota} for all"
    cpus = tuple(sorted(cpu for core in cores for cpu in core.cpus))
    binds = config.bind == "auto"
    if not binds:
        reason += "; bind = 'off'"
    return ThreadSplit(
        compute=config.compute or torch.get_num_threads(),
        update=config.update or count,
        copies=config.copies or 1,
        cores=count,
        reason=reason,
        cpus=cpus if binds and (config.cpus or (apart and set(cpus) != topology.cpus)) else (),
        nodes=_slab_nodes(topology, cores) if binds else (),
        node_cpus=cpus,
    )


def _restricted(topology: Topology, cpus: str) -> Topology:
    """Return the topology cut down to the CPUs that the user names."""
    if not cpus:
        return topology
    wanted = cpu_list(cpus)
    if not wanted <= topology.cpus:
        raise ConfigError(
            f"threads.cpus is {cpus!r}; CPUs {cpu_words(wanted - topology.cpus)} are offline or not this process's. It "
            f"may use {cpu_words(topology.cpus)}: name some of these, or leave threads.cpus out."
        )
    cut = (
        dataclasses.replace(core, cpus=tuple(cpu for cpu in core.cpus if cpu in wanted))
        for core in topology.cores
    )
    return dataclasses.replace(topology, cores=tuple(core for core in cut if core.cpus))


def _share(topology: Topology, rank: LocalRank) -> tuple[Sequence[Core], str, bool]:
    """Return (the rank's cores, why these, whether they are its own)."""
    cores = topology.cores
    if rank.count == 1:
        return cores, "by affinity", True
    if topology.bound_by_launcher:
        return cores, f"rank {rank.index} of {rank.count}, bound by its launcher", True
    if rank.count > len(cores):
        only = f"{len(cores)} core{'' if len(cores) == 1 else 's'}"
        words = f"{rank.count} ranks share {only}; start fewer ranks, or give the job more cores"
        return [cores[rank.index % len(cores)]], words, False
    by_node: dict[int, list[Core]] = {}
    for core in cores:
        by_node.setdefault(core.node, []).append(core)
    near = "near its device"
    groups = _near_devices(topology, by_node, rank.device_nodes) if rank.device_nodes else {}
    if not groups or any(len(ranks) > sum(len(by_node[n]) for n in nodes) for nodes, ranks in groups.items()):
        groups = {tuple(by_node): tuple(range(rank.count))}
        near = "its device's node has too few cores" if rank.device_nodes else ""
    nodes, ranks = next((nodes, ranks) for nodes, ranks in groups.items() if rank.index in ranks)
    mine = _part(by_node, nodes, ranks.index(rank.index), len(ranks))
    on = sorted({core.node for core in mine})
    place = f"node{'' if len(on) == 1 else 's'} {cpu_words(on)}"
    parts = [f"rank {rank.index} of {rank.count}", *([place] if len(topology.nodes) > 1 else []), near]
    return mine, ", ".join(filter(None, parts)), True


def _near_devices(
    topology: Topology, by_node: Mapping[int, Sequence[Core]], device_nodes: Sequence[int]
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return groups of nodes and the ranks whose devices are near them.

    A node without devices goes to the nearest one in its package, of equally near ones to that with the fewest cores a
    rank: its memory would lie idle otherwise.
    """
    distances = {node.index: dict(node.distances) for node in topology.nodes}

    def far(one: int, other: int) -> int:
        return distances.get(one, {}).get(other, 10 if one == other else 255)

    # A device may hang on a node without CPUs of its own.
    homes = [
        node if node in by_node else min(by_node, key=lambda n: (far(node, n), n)) for node in device_nodes
    ]
    groups = {home: [home] for home in sorted(set(homes))}
    package = {node: cores[0].package for node, cores in by_node.items()}

    def cores_a_rank(home: int) -> float:
        return sum(len(by_node[node]) for node in groups[home]) / homes.count(home)

    for node in sorted(set(by_node) - set(homes)):
        beside = [home for home in groups if package[home] == package[node]]
        if beside:
            best = min(beside, key=lambda home: (far(node, home), cores_a_rank(home), home))
            groups[best].append(node)
    return {
        tuple(sorted(nodes)): tuple(r for r, node in enumerate(homes) if node == home)
        for home, nodes in groups.items()
    }


def _part(
    by_node: Mapping[int, Sequence[Core]], nodes: Sequence[int], index: int, ranks: int
) -> Sequence[Core]:
    """Return the cores of the index-th of some ranks on some nodes."""
    if ranks <= len(nodes):
        mine = nodes[index * len(nodes) // ranks : (index + 1) * len(nodes) // ranks]
        return [core for node in mine for core in by_node[node]]
    # Each rank lives on one node; nodes take ranks in proportion to their cores (D'Hondt).
    taken = dict.fromkeys(nodes, 0)
    for _ in range(ranks):
        taken[max(nodes, key=lambda node: (len(by_node[node]) / (taken[node] + 1), -node))] += 1
    for node in nodes:
        if index < taken[node]:
            cores, here = by_node[node], taken[node]
            return cores[index * len(cores) // here : (index + 1) * len(cores) // here]
        index -= taken[node]
    raise AssertionError("every rank has a node")


def _slab_nodes(topology: Topology, cores: Sequence[Core]) -> tuple[int, ...]:
    """Return the nodes that slabs are bound to: those of the cores; none where the machine has one memory only."""
    if sum(node.total_bytes > 0 for node in topology.nodes) < 2:
        return ()
    holding = {node.index for node in topology.nodes if node.holds_slabs}
    return tuple(sorted({core.node for core in cores} & holding))
