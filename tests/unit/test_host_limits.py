"""Limits read from recorded control groups of both versions, and the ledger that refuses before allocation."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from offload_engine.errors import HostMemoryError, StateError
from offload_engine.host import HostBudget, HostLimits, cgroup, host_limits

GIB = 1 << 30
V2_MOUNT = (
    "29 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
)
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:12 - cgroup cgroup rw,memory\n"
    "38 31 0:35 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)
V1_UNLIMITED = "9223372036854771712\n"


def tree(root: Path, files: dict[str, str | int]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text) if isinstance(text, str) else f"{text}\n")
    return root


def v2(root: Path, files: dict[str, str | int], group: str = "/user.slice/job.scope") -> Path:
    return tree(
        root,
        {"proc/self/cgroup": f"0::{group}\n", "proc/self/mountinfo": V2_MOUNT}
        | {f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    )


def test_version_2_takes_the_smallest_limit_up_the_tree(tmp_path: Path) -> None:
    v2(
        tmp_path,
        {
            "user.slice/memory.max": 4 * GIB,
            "user.slice/memory.high": "max\n",
            "user.slice/memory.current": 3 * GIB,
            "user.slice/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file 5\n",
            "user.slice/job.scope/memory.max": 8 * GIB,
            "user.slice/job.scope/memory.current": GIB,
        },
    )
    assert cgroup.memory(tmp_path) == cgroup.GroupMemory(4 * GIB, 2 * GIB, 2 * GIB)


def test_version_2_least_room_may_be_on_another_level(tmp_path: Path) -> None:
    v2(
        tmp_path,
        {
            "user.slice/memory.max": 8 * GIB,
            "user.slice/memory.current": 8 * GIB - 5,
            "user.slice/job.scope/memory.max": 4 * GIB,
            "user.slice/job.scope/memory.current": GIB,
        },
    )
    assert cgroup.memory(tmp_path) == cgroup.GroupMemory(4 * GIB, GIB, 5)


def test_version_2_high_counts_and_max_means_none(tmp_path: Path) -> None:
    files: dict[str, str | int] = {
        "user.slice/job.scope/memory.max": "max\n",
        "user.slice/job.scope/memory.current": 7,
    }
    assert cgroup.memory(v2(tmp_path, files)) == cgroup.GroupMemory(None, None, None)
    v2(tmp_path, {"user.slice/job.scope/memory.high": 100})
    assert cgroup.memory(tmp_path) == cgroup.GroupMemory(100, 7, 93)


def test_version_2_in_a_container_reads_the_mount_itself(tmp_path: Path) -> None:
    v2(tmp_path, {"memory.max": 2 * GIB, "memory.current": 3 * GIB}, group="/")
    assert cgroup.memory(tmp_path) == cgroup.GroupMemory(2 * GIB, 3 * GIB, 0)
    v2(tmp_path, {"../../other/memory.max": 5}, group="/../../other")  # a group outside of this namespace
    assert cgroup.memory(tmp_path).limit_bytes == 2 * GIB


def v1(root: Path, files: dict[str, str | int]) -> Path:
    return tree(
        root,
        {
            "proc/self/cgroup": "7:blkio:/\n4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n",
            "proc/self/mountinfo": V1_MOUNTS,
        }
        | {f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    )


def test_version_1_with_its_unlimited_number(tmp_path: Path) -> None:
    v1(
        tmp_path,
        {
            "memory/memory.limit_in_bytes": V1_UNLIMITED,
            "memory/docker/memory.limit_in_bytes": 6 * GIB,
            "memory/docker/memory.usage_in_bytes": 5 * GIB,
            "memory/docker/memory.stat": f"cache 9\ntotal_inactive_file {GIB}\ninactive_file 12\n",
            "memory/docker/abc/memory.limit_in_bytes": V1_UNLIMITED,
            "memory/docker/abc/memory.usage_in_bytes": GIB,
        },
    )
    assert cgroup.memory(tmp_path) == cgroup.GroupMemory(6 * GIB, 4 * GIB, 2 * GIB)


def test_version_1_mount_that_shows_only_its_own_part(tmp_path: Path) -> None:
    v1(tmp_path, {"memory/memory.limit_in_bytes": 3 * GIB, "memory/memory.usage_in_bytes": 1})
    mounts = V1_MOUNTS.replace("0:32 / /sys", "0:32 /docker/abc /sys")
    (tmp_path / "proc/self/mountinfo").write_text(mounts)
    assert cgroup.memory(tmp_path).limit_bytes == 3 * GIB


def test_cpu_quota_of_both_versions(tmp_path: Path) -> None:
    assert cgroup.cpu_quota(tmp_path) is None
    two = v2(
        tmp_path / "2",
        {"user.slice/cpu.max": "150000 100000\n", "user.slice/job.scope/cpu.max": "max 100000\n"},
    )
    assert cgroup.cpu_quota(two) == 1.5
    one = v1(tmp_path / "1", {"cpu,cpuacct/docker/abc/cpu.cfs_quota_us": -1})
    v1(one, {"cpu,cpuacct/docker/abc/cpu.cfs_period_us": 100_000})
    assert cgroup.cpu_quota(one) is None
    v1(one, {"cpu,cpuacct/docker/cpu.cfs_quota_us": 300_000, "cpu,cpuacct/docker/cpu.cfs_period_us": 100_000})
    assert cgroup.cpu_quota(one) == 3.0


def test_garbage_reads_as_no_limit(tmp_path: Path) -> None:
    v2(
        tmp_path,
        {"user.slice/memory.max": "garbage\n", "user.slice/cpu.max": "1 2 3\n", "cpu.max": "100 0\n"},
    )
    assert cgroup.memory(tmp_path) == cgroup.GroupMemory()
    assert cgroup.cpu_quota(tmp_path) is None
    (tmp_path / "proc/self/mountinfo").write_bytes(b"\xff\xfe garbage - \n")
    assert cgroup.memory(tmp_path) == cgroup.GroupMemory()


def test_host_limits_of_a_recorded_machine(tmp_path: Path) -> None:
    v2(tmp_path, {"user.slice/memory.max": 4 * GIB, "user.slice/memory.current": GIB})
    tree(
        tmp_path,
        {"proc/meminfo": "MemTotal:  16777216 kB\nMemFree: 1 kB\nMemAvailable:  2097152 kB\nHugePages: 0\n"},
    )
    limits = host_limits(tmp_path)
    assert (limits.machine_total_bytes, limits.machine_available_bytes) == (16 * GIB, 2 * GIB)
    assert (limits.cgroup_limit_bytes, limits.cgroup_used_bytes) == (4 * GIB, GIB)
    assert limits.available_bytes == 2 * GIB
    assert "cgroup limit 4.0 GiB with 1.0 GiB used" in limits.words()


def test_host_limits_of_this_machine() -> None:
    limits = host_limits()
    assert 0 < limits.available_bytes <= limits.machine_total_bytes
    assert limits.memlock_bytes is None or limits.memlock_bytes >= 0


def limits(machine: int = 100 * GIB, group: int | None = None, used: int = 0) -> HostLimits:
    room = None if group is None else group - used
    return HostLimits(200 * GIB, machine, group, None if group is None else used, 64 << 10, room)


def test_budget_counts_by_name() -> None:
    budget = HostBudget(10 * GIB, limits())
    budget.reserve("masters", 6 * GIB)
    budget.reserve("moments", 4 * GIB)
    assert budget.used_bytes == 10 * GIB
    assert budget.available_bytes == 0
    budget.release("masters")
    budget.release("masters")
    budget.release("never there")
    assert budget.used_bytes == 4 * GIB
    budget.reserve("masters", 6 * GIB)


def test_a_name_is_reserved_once() -> None:
    budget = HostBudget(None, limits())
    budget.reserve("masters", 5)
    with pytest.raises(StateError, match="'masters' is reserved already"):
        budget.reserve("masters", 5)
    assert budget.used_bytes == 5


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (
            HostBudget(4 * GIB, limits()),
            ["of host_memory = 4.0 GiB", "Raise host_memory to at least 6.0 GiB"],
        ),
        (
            HostBudget(4 * GIB, limits(5 * GIB)),
            ["Raising host_memory does not help", "machine 5.0 GiB available"],
        ),
        (HostBudget(None, limits(5 * GIB)), ["machine 5.0 GiB available", "Free memory on the machine"]),
        (
            HostBudget(None, limits(group=5 * GIB, used=GIB)),
            ["cgroup limit 5.0 GiB with 1.0 GiB used", "container"],
        ),
        (HostBudget(50 * GIB, limits(group=5 * GIB)), ["cgroup limit 5.0 GiB", "limit of the container"]),
    ],
)
def test_a_refusal_names_found_limit_and_remedy(budget: HostBudget, said: list[str]) -> None:
    budget.reserve("masters", GIB)
    with pytest.raises(HostMemoryError) as caught:
        budget.reserve("moments", 5 * GIB)
    message = str(caught.value)
    for part in ["'moments' needs 5.0 GiB", "1.0 GiB reserved", *said]:
        assert part in message
    assert budget.used_bytes == GIB
    assert isinstance(caught.value, MemoryError)


def test_many_threads_never_pass_the_limit() -> None:
    budget = HostBudget(1000, limits())
    refused = []

    def work(index: int) -> None:
        for i in range(200):
            try:
                budget.reserve(f"{index}.{i}", 7)
            except HostMemoryError:
                refused.append(i)
            assert budget.used_bytes <= 1000

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.used_bytes == 994
    assert len(refused) == 800 - 142
