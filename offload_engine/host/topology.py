"""What the machine looks like to this process: NUMA nodes with their memory, and the physical cores it may use.

Read once per engine by `threads` and by `budgets`. All paths start at a root folder that tests replace by recorded
layouts; what a system does not tell (another kernel, a sandbox) is taken as one node and one core per CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path

from offload_engine.errors import ConfigError
from offload_engine.host import cgroup

__all__ = [
    "Core",
    "Node",
    "Topology",
    "cpu_list",
    "cpu_words",
    "device_node",
    "read_nodes",
    "read_topology",
    "usable_cores",
]


@dataclasses.dataclass(frozen=True)
class Node:
    """One NUMA node. `distances` are the firmware's relative latencies to other nodes by index, 10 for its own."""

    index: int
    cpus: frozenset[int] = frozenset()
    total_bytes: int = 0
    available_bytes: int = 0
    """Free, or page cache that the kernel can drop."""
    allowed: bool = True
    """The process may take memory there (cpuset.mems)."""
    distances: tuple[tuple[int, int], ...] = ()

    @property
    def holds_slabs(self) -> bool:
        """Whether slabs may lie there: nodes without CPUs are memory of GPUs (Grace) or of expanders."""
        return self.allowed and bool(self.cpus) and self.total_bytes > 0


@dataclasses.dataclass(frozen=True)
class Core:
    """One physical core: those of its CPUs (SMT siblings) that the process may use, in order."""

    cpus: tuple[int, ...]
    node: int
    package: int = 0


@dataclasses.dataclass(frozen=True)
class Topology:
    """`cores` are those that the process may use, by node, then by first CPU; at least one."""

    nodes: tuple[Node, ...]
    cores: tuple[Core, ...]
    quota: float | None = None
    """CPUs' worth of time that the cgroup allows; None: no limit."""
    bound_by_launcher: bool = False
    """The parent process may use more CPUs: who started this process has chosen its CPUs, for it alone."""

    @property
    def cpus(self) -> frozenset[int]:
        """Return the CPUs that the process may use."""
        return frozenset(cpu for core in self.cores for cpu in core.cpus)

    def within_quota(self, cores: int, ranks: int = 1) -> int:
        """Return how many of a rank's cores its share of the quota keeps busy, at least 1."""
        return cores if self.quota is None else min(cores, max(1, int(self.quota / ranks)))


def usable_cores(root: Path = Path("/")) -> int:
    """Return the physical cores that affinity, cpuset and CPU quota leave to this process, at least 1."""
    topology = read_topology(root)
    return topology.within_quota(len(topology.cores))


def cpu_list(text: str) -> frozenset[int]:
    """Return the numbers of a list as the kernel writes it: "0-3,8,10-11".

    Raises:
        ConfigError: it is no such list.
    """
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not (first.isdigit() and (last.isdigit() or not dash)) or int(last or first) < int(first):
            raise ConfigError(
                f"{text!r} is no list of CPUs: {part!r} is no range. Write one such as '0-15,32-47'."
            )
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def cpu_words(cpus: Iterable[int]) -> str:
    """Return numbers as the kernel writes them: {0, 1, 2, 8} -> "0-2,8"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def read_nodes(root: Path = Path("/")) -> tuple[Node, ...]:
    """Return the online NUMA nodes in order; none where the system tells nothing."""
    base = root / "sys/devices/system/node"
    indices = sorted(_listed(base / "online") or ())
    allowed = _allowed(root, "Mems_allowed_list")
    nodes = []
    for index in indices:
        folder = base / f"node{index}"
        memory = _meminfo(folder / "meminfo")
        row = (_read(folder / "distance") or "").split()
        nodes.append(
            Node(
                index,
                _listed(folder / "cpulist") or frozenset(),
                memory.get("MemTotal", 0),
                memory.get("MemFree", 0) + memory.get("Inactive(file)", 0) + memory.get("Active(file)", 0),
                allowed is None or index in allowed,
                tuple(zip(indices, map(int, row), strict=False)),
            )
        )
    return tuple(nodes)


def read_topology(root: Path = Path("/")) -> Topology:
    """Read nodes and cores, cut down to what affinity, cpuset and the CPUs online leave to this process."""
    nodes = read_nodes(root)
    allowed = _allowed(root, "Cpus_allowed_list")
    if allowed is None:
        allowed = _affinity()
    bound = _bound_by_launcher(root, allowed)
    for limit in (_read(root / "sys/devices/system/cpu/online"), cgroup.cpuset(root)):
        # A list that has nothing in common with the affinity is of another machine or group.
        allowed = allowed & (_parsed(limit) or allowed) or allowed
    node_of = {cpu: node.index for node in nodes for cpu in node.cpus}
    cores: dict[tuple[int, ...], Core] = {}
    for cpu in sorted(allowed):
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _listed(topology / "thread_siblings_list") or {cpu}
        usable = tuple(sorted(siblings & allowed | {cpu}))
        package = _read(topology / "physical_package_id") or "0"
        cores[usable] = Core(usable, node_of.get(cpu, 0), max(0, int(package)))
    return Topology(
        nodes,
        tuple(sorted(cores.values(), key=lambda core: (core.node, core.cpus))),
        cgroup.cpu_quota(root),
        bound,
    )


def device_node(pci_address: str, root: Path = Path("/")) -> int | None:
    """Return the NUMA node that a PCI device ("0000:17:00.0") hangs on; None where the firmware does not say."""
    text = _read(root / "sys/bus/pci/devices" / pci_address.lower() / "numa_node")
    return int(text) if text is not None and text.isdigit() else None


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _bound_by_launcher(root: Path, allowed: frozenset[int]) -> bool:
    for line in (_read(root / "proc/self/status") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "PPid":
            theirs = _status_list(root / f"proc/{value.strip()}/status", "Cpus_allowed_list")
            online = _listed(root / "sys/devices/system/cpu/online")
            return theirs is not None and bool((theirs & (online or theirs)) - allowed)
    return False


def _allowed(root: Path, name: str) -> frozenset[int] | None:
    return _status_list(root / "proc/thread-self/status", name)


def _status_list(path: Path, name: str) -> frozenset[int] | None:
    for line in (_read(path) or "").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return _parsed(value)
    return None


def _listed(path: Path) -> frozenset[int] | None:
    return _parsed(_read(path))


def _parsed(text: str | None) -> frozenset[int] | None:
    """Return what a system file lists; None where it is missing, empty, or written in another way."""
    with contextlib.suppress(ConfigError):
        return cpu_list(text or "") or None
    return None


def _meminfo(path: Path) -> dict[str, int]:
    """Return a node's meminfo ("Node 0 MemTotal: 123 kB") in bytes."""
    values = {}
    for line in (_read(path) or "").splitlines():
        fields = line.split()
        if len(fields) == 5 and fields[3].isdigit() and fields[4] == "kB":
            values[fields[2].rstrip(":")] = int(fields[3]) * 1024
    return values


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
