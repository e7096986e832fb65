"""Host memory: what machine, cgroup and locked-memory limit allow, and the ledger that is asked before allocation.

Called by the slab allocator and by the engine at set-up. Invariant: `HostBudget.reserve` raises before anything is
allocated, with what was found, the limit, and the remedy.
"""

from __future__ import annotations

import resource
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

from offload_engine.config import format_bytes
from offload_engine.errors import HostMemoryError, StateError
from offload_engine.host import cgroup
from offload_engine.host.topology import read_nodes


@dataclass(frozen=True)
class HostLimits:
    """What the host had when it was read, in bytes. None means: no such limit.

    `cgroup_limit_bytes` is the smallest limit on any level above the process (version 1 and 2), `cgroup_used_bytes`
    what is charged to that level without droppable page cache, `cgroup_available_bytes` the least room on any
    level. `left_out_bytes` is memory of NUMA nodes where no slab may lie, in none of the others: nodes without CPUs
    (a GPU's memory, on Grace) and those outside the cpuset. `memlock_bytes` (RLIMIT_MEMLOCK) is stated in messages but
    does not bound reservations: accelerator drivers pin memory without counting it there.
    """

    machine_total_bytes: int
    machine_available_bytes: int
    cgroup_limit_bytes: int | None = None
    cgroup_used_bytes: int | None = None
    memlock_bytes: int | None = None
    cgroup_available_bytes: int | None = None
    left_out_bytes: int = 0

    @property
    def available_bytes(self) -> int:
        """Return what can still be allocated: the least of the machine's and the cgroup's room."""
        if self.cgroup_available_bytes is not None:
            return min(self.machine_available_bytes, self.cgroup_available_bytes)
        if self.cgroup_limit_bytes is not None:
            return min(self.machine_available_bytes, self.cgroup_limit_bytes - (self.cgroup_used_bytes or 0))
        return self.machine_available_bytes

    def words(self) -> str:
        """Return the limits in one phrase for logs and errors."""
        words = (
            f"machine {format_bytes(self.machine_available_bytes)} available of "
            f"{format_bytes(self.machine_total_bytes)}"
        )
        if self.left_out_bytes:
            words += f" ({format_bytes(self.left_out_bytes)} of NUMA nodes without CPUs or outside the cpuset left out)"
        if self.cgroup_limit_bytes is None:
            words += ", no cgroup limit"
        else:
            used = format_bytes(self.cgroup_used_bytes or 0)
            words += f", cgroup limit {format_bytes(self.cgroup_limit_bytes)} with {used} used"
        memlock = "unlimited" if self.memlock_bytes is None else format_bytes(self.memlock_bytes)
        return f"{words}, memlock {memlock}"


def host_limits(root: Path = Path("/")) -> HostLimits:
    """Read the limits of this machine and process. `root` replaces the file system's root in tests."""
    meminfo = _meminfo(root / "proc/meminfo")
    if "MemTotal" not in meminfo or "MemAvailable" not in meminfo:
        memory = psutil.virtual_memory()
        meminfo = {"MemTotal": memory.total, "MemAvailable": memory.available}
    nodes = read_nodes(root)
    left_out = [node for node in nodes if not node.holds_slabs] if any(n.holds_slabs for n in nodes) else []
    group = cgroup.memory(root)
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostLimits(
        machine_total_bytes=meminfo["MemTotal"] - sum(node.total_bytes for node in left_out),
        machine_available_bytes=max(
            0, meminfo["MemAvailable"] - sum(node.available_bytes for node in left_out)
        ),
        cgroup_limit_bytes=group.limit_bytes,
        cgroup_used_bytes=group.used_bytes,
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        cgroup_available_bytes=group.available_bytes,
        left_out_bytes=sum(node.total_bytes for node in left_out),
    )


def _meminfo(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    values: dict[str, int] = {}
    for line in lines:
        name, _, rest = line.partition(":")
        fields = rest.split()
        if len(fields) == 2 and fields[1] == "kB" and fields[0].isdigit():
            values[name] = int(fields[0]) * 1024
    return values


class HostBudget:
    """The ledger of the engine's host memory, by name. May be used from any thread.

    Invariant: the sum of reservations never exceeds the user's limit, nor what the host had available when `limits`
    were read.

    Args:
        limit_bytes: the user's limit (config `host_memory`), None for no limit but the host's.
        limits: as read by `host_limits()` before the first reservation.
    """

    def __init__(self, limit_bytes: int | None, limits: HostLimits) -> None:
        self.limit_bytes = limit_bytes
        self.limits = limits
        self._reserved: dict[str, int] = {}
        self._used_bytes = 0
        # Re-entrant: a slab's release may run in a garbage collection inside `reserve`.
        self._lock = threading.RLock()

    @property
    def used_bytes(self) -> int:
        """Return the sum of all reservations."""
        return self._used_bytes

    @property
    def available_bytes(self) -> int:
        """Return what can still be reserved."""
        room = self.limits.available_bytes
        if self.limit_bytes is not None:
            room = min(room, self.limit_bytes)
        return max(0, room - self._used_bytes)

    def reserve(self, name: str, nbytes: int) -> None:
        """Take `nbytes` out of the budget under `name`, before they are allocated.

        Raises:
            HostMemoryError: the user's limit, the cgroup or the machine does not have them.
            StateError: `name` is reserved already.
        """
        with self._lock:
            if name in self._reserved:
                raise StateError(
                    f"host memory '{name}' is reserved already ({format_bytes(self._reserved[name])}); "
                    "release it first, or take another name."
                )
            if nbytes > self.available_bytes:
                raise HostMemoryError(self._refusal(name, nbytes))
            self._reserved[name] = nbytes
            self._used_bytes += nbytes

    def release(self, name: str) -> None:
        """Give a reservation back; an unknown name is ignored, so that clean-up may run twice."""
        with self._lock:
            self._used_bytes -= self._reserved.pop(name, 0)

    def _refusal(self, name: str, nbytes: int) -> str:
        total = self._used_bytes + nbytes
        head = (
            f"host memory '{name}' needs {format_bytes(nbytes)}; {format_bytes(self.available_bytes)} are left, with "
            f"{format_bytes(self._used_bytes)} reserved"
        )
        if self.limit_bytes is not None and total > self.limit_bytes:
            if total <= self.limits.available_bytes:
                remedy = f"Raise host_memory to at least {format_bytes(total)} ({total} bytes), or use a smaller model."
            else:
                remedy = f"Raising host_memory does not help: {self.limits.words()}. Use a machine with more memory."
            return f"{head} of host_memory = {format_bytes(self.limit_bytes)}. {remedy}"
        group_room = self.limits.cgroup_available_bytes
        if group_room is not None and group_room < self.limits.machine_available_bytes:
            remedy = "Raise the memory limit of the container or job"
        else:
            remedy = "Free memory on the machine, use one with more"
        return f"{head} ({self.limits.words()}). {remedy}, or use a smaller model."
