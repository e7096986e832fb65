"""Control groups, version 1 and 2: which memory limit, CPU quota and set of CPUs really bind this process.

Used by `budgets` and `topology`. A limit may sit on any level between the process's group and the mount point, so
every level is read. All paths start at a root folder that tests replace by recorded files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# Version 1 writes "no limit" as the largest page-aligned int64; no machine has this much.
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True)
class GroupMemory:
    """Memory of the groups above this process. None where no level has a limit.

    `limit_bytes` is the smallest limit on any level, `used_bytes` the use charged to that level without page cache
    that the kernel can drop, `available_bytes` the least room on any level.
    """

    limit_bytes: int | None = None
    used_bytes: int | None = None
    available_bytes: int | None = None


def memory(root: Path = Path("/")) -> GroupMemory:
    """Read the memory limits above this process; memory.high counts as a limit, since beyond it the kernel stalls."""
    found: list[tuple[int, int]] = []
    for level in _levels(root, "memory"):
        limits = [_bytes(level / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        known = [limit for limit in limits if limit is not None]
        if known:
            found.append((min(known), _used_bytes(level)))
    if not found:
        return GroupMemory()
    limit_bytes, used_bytes = min(found)
    return GroupMemory(limit_bytes, used_bytes, min(max(0, limit - used) for limit, used in found))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return how many CPUs' worth of time the groups above this process allow; None without a quota."""
    quotas: list[float] = []
    for level in _levels(root, "cpu"):
        quota, period = _read(level / "cpu.cfs_quota_us"), _read(level / "cpu.cfs_period_us")
        fields = (_read(level / "cpu.max") or f"{quota} {period}").split()
        if len(fields) == 2 and all(field.isdigit() for field in fields) and int(fields[1]) > 0:
            quotas.append(int(fields[0]) / int(fields[1]))
    return min(quotas, default=None)


def cpuset(root: Path = Path("/")) -> str | None:
    """Return the list of CPUs of this process's group, as the kernel writes it; None where no group has one."""
    for level in _levels(root, "cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):
            if text := _read(level / name):
                return text
    return None


def _levels(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's groups, innermost first, of both hierarchies that may hold `controller`."""
    groups = _groups(root)
    for kind, fs_root, mount in _mounts(root):
        group = groups.get(kind)
        if group is None or (kind and controller not in kind.split(",")):
            continue
        # A mount may show only a part of the hierarchy, as in a container without its own cgroup namespace.
        inside = PurePosixPath(group)
        relative = inside.relative_to(fs_root) if inside.is_relative_to(fs_root) else PurePosixPath()
        parts = [part for part in relative.parts if part != "/"]
        if ".." in parts:
            parts = []
        for depth in range(len(parts), -1, -1):
            level = mount.joinpath(*parts[:depth])
            if level.is_dir():
                yield level


def _groups(root: Path) -> dict[str, str]:
    """Return the group of this process by controller list; the key of version 2 is empty."""
    groups: dict[str, str] = {}
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            groups[fields[1]] = fields[2]
    return groups


def _mounts(root: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield (controller list, root inside the hierarchy, mount point) of every cgroup mount."""
    groups = _groups(root)
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        left, separator, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if not separator or len(fields) < 5 or len(kind) < 3:
            continue
        mount = root / fields[4].replace("\\040", " ").lstrip("/")
        if kind[0] == "cgroup2":
            yield "", fields[3], mount
        elif kind[0] == "cgroup":
            options = set(kind[2].split(","))
            for controllers in groups:
                if controllers and set(controllers.split(",")) <= options:
                    yield controllers, fields[3], mount


def _used_bytes(level: Path) -> int:
    used = _bytes(level / "memory.current")
    if used is None:
        used = _bytes(level / "memory.usage_in_bytes") or 0
    droppable = 0
    for line in (_read(level / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdigit():
            droppable = max(droppable, int(value))
    return max(0, used - droppable)


def _bytes(path: Path) -> int | None:
    text = _read(path)
    if text is None or not text.isdigit():
        return None
    value = int(text)
    return value if value < _NO_LIMIT_BYTES else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
