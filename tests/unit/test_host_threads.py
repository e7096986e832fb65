"""Cores and NUMA nodes of ranks on recorded machines: whole cores, near devices, never one core for two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload_engine.config import ThreadsConfig
from offload_engine.errors import ConfigError
from offload_engine.host import LocalRank, ThreadSplit, host_limits, local_rank, split_threads, usable_cores
from offload_engine.host.topology import cpu_list, cpu_words, read_topology
from tests.topologies import FIXTURES, address, layout, machine, siblings

AUTO = ThreadsConfig()


def splits(
    root: Path, ranks: int, devices: tuple[int, ...] = (), config: ThreadsConfig = AUTO
) -> list[ThreadSplit]:
    return [split_threads(config, LocalRank(index, ranks, devices), root=root) for index in range(ranks)]


# Layout, what the process may use, ranks, whether devices are known -> each rank's (CPUs, node of its slabs).
SHARES: dict[str, tuple[str, dict[str, str], int, bool, list[tuple[str, str]]]] = {
    "one node": ("vm_2_cores", {}, 2, False, [("0", ""), ("1", "")]),
    "one node with SMT": ("vm_smt", {}, 2, False, [("0-7", ""), ("8-15", "")]),
    "uneven": ("vm_smt", {}, 3, False, [("0-3", ""), ("4-9", ""), ("10-15", "")]),
    "two nodes, 8 ranks": (
        "hgx_h100", {}, 8, True,
        [(f"{14 * r}-{14 * r + 13},{112 + 14 * r}-{112 + 14 * r + 13}", str(r // 4)) for r in range(8)],
    ),
    "two nodes, 4 ranks with devices on one": (
        "hgx_h100", {}, 4, True,
        [(f"{14 * r}-{14 * r + 13},{112 + 14 * r}-{112 + 14 * r + 13}", "0") for r in range(4)],
    ),
    "two nodes, 3 ranks": (
        "hgx_h100", {}, 3, False,
        [("0-27,112-139", "0"), ("28-55,140-167", "0"), ("56-111,168-223", "1")],
    ),
    "cpuset": (
        "hgx_h100", {"cpuset": "50-59"}, 2, False, [("50-55", "0"), ("56-59", "1")],
    ),
    "affinity in which one node has the most": (
        "hgx_h100", {"allowed": "54-55,56-61"}, 4, False,
        [("54-55", "0"), ("56-57", "1"), ("58-59", "1"), ("60-61", "1")],
    ),
    "offline CPUs": (
        "hgx_h100", {"online": "0-3,56-59,112-113"}, 4, False,
        [("0-1,112-113", "0"), ("2-3", "0"), ("56-57", "1"), ("58-59", "1")],
    ),
    "four nodes, 2 ranks": ("epyc_nps4", {}, 2, False, [("0-31", "0-1"), ("32-63", "2-3")]),
    "four nodes, 4 ranks": ("epyc_nps4", {}, 4, False, [(f"{16 * r}-{16 * r + 15}", str(r)) for r in range(4)]),
    "eight nodes, devices near four of them": (
        "dgx_a100", {}, 8, True,
        [(f"{16 * n}-{16 * n + 15},{128 + 16 * n}-{143 + 16 * n}", str(n)) for n in (2, 3, 0, 1, 6, 7, 4, 5)],
    ),
    "eight nodes, no devices": (
        "dgx_a100", {}, 2, False, [("0-63,128-191", "0-3"), ("64-127,192-255", "4-7")],
    ),
    "Grace": ("gh200", {}, 2, False, [("0-35", "0"), ("36-71", "0")]),
}  # fmt: skip


@pytest.mark.parametrize("case", SHARES)
def test_ranks_take_whole_cores_on_their_nodes(tmp_path: Path, case: str) -> None:
    name, limits, ranks, devices, expected = SHARES[case]
    facts = layout(name)
    root = machine(tmp_path, name, **limits)
    found = splits(root, ranks, tuple(facts.get("device_nodes", ())[:ranks]) if devices else ())
    assert [(cpu_words(s.cpus), cpu_words(s.nodes)) for s in found] == expected
    total = sum(len(cpu_list(node["cpus"])) for node in facts["nodes"])
    cores = [{min(siblings(facts["siblings"], cpu, total)) for cpu in split.cpus} for split in found]
    assert sum(map(len, cores)) == len(set().union(*cores)), "a core is in two shares"
    assert [split.update for split in found] == [len(mine) for mine in cores]
    for split in found:
        assert f"the update stays on CPUs {cpu_words(split.cpus)}" in split.sentence()


@pytest.mark.parametrize(
    ("name", "cores", "nodes"),
    [
        ("vm_2_cores", 2, ""),
        ("vm_smt", 8, ""),
        ("hgx_h100", 112, "0-1"),
        ("epyc_nps4", 64, "0-3"),
        ("dgx_a100", 128, "0-7"),
        ("gh200", 72, "0"),
    ],
)
def test_a_single_rank_takes_all_cores_and_stays_unbound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, cores: int, nodes: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    split = split_threads(AUTO, root=machine(tmp_path, name))
    assert (split.update, split.cores, split.cpus, cpu_words(split.nodes)) == (cores, cores, (), nodes)
    assert layout(name)["source"] and len(list(FIXTURES.glob("*.json"))) == 6


def test_memory_of_a_gpu_is_neither_budget_nor_place_of_slabs(tmp_path: Path) -> None:
    limits = host_limits(machine(tmp_path, "gh200"))
    assert limits.machine_total_bytes == limits.machine_available_bytes == 490300 << 20
    assert limits.left_out_bytes == 97280 << 20
    assert "95.0 GiB of NUMA nodes without CPUs" in limits.words()


def test_nodes_outside_the_cpuset_hold_no_slabs(tmp_path: Path) -> None:
    root = machine(tmp_path, "hgx_h100", mems="0")
    assert host_limits(root).machine_total_bytes == 1031000 << 20
    assert [split.nodes for split in splits(root, 2)] == [(0,), ()]
    plain = machine(tmp_path / "plain", "vm_smt")
    assert host_limits(plain).left_out_bytes == 0


def test_the_quota_is_shared_by_the_ranks(tmp_path: Path) -> None:
    root = machine(tmp_path, "hgx_h100", cpu_max="2450000 100000")
    assert usable_cores(root) == 24
    found = splits(root, 8)
    assert [split.update for split in found] == [3] * 8
    assert len(found[0].cpus) == 28, "fewer threads, in the same share"
    assert "rank 5 of 8, node 1, by a cgroup quota of 24.5 of 112 for all" in found[5].sentence()


def test_more_ranks_than_cores_share_unbound_and_it_is_said(tmp_path: Path) -> None:
    found = splits(machine(tmp_path, "vm_smt"), 9)
    assert [(split.update, split.cpus) for split in found] == [(1, ())] * 9
    assert "9 ranks share 8 cores; start fewer ranks" in found[8].sentence()


def test_a_launchers_binding_is_kept(tmp_path: Path) -> None:
    root = machine(tmp_path, "hgx_h100", allowed="56-69,168-181", launcher="0-223")
    split = split_threads(AUTO, LocalRank(4, 8), root=root)
    assert (split.update, split.cpus, split.nodes) == (14, (), (1,))
    assert "rank 4 of 8, bound by its launcher" in split.sentence()
    # A job started with fewer CPUs, launcher and all, shares them.
    root = machine(tmp_path / "taskset", "hgx_h100", allowed="56-69,168-181")
    assert [cpu_words(split.cpus) for split in splits(root, 2)] == ["56-62,168-174", "63-69,175-181"]


def test_devices_on_a_node_with_too_few_cores_do_not_count(tmp_path: Path) -> None:
    root = machine(tmp_path, "hgx_h100", allowed="0,56-59")
    found = splits(root, 4, (0, 0, 0, 0))
    assert [cpu_words(split.cpus) for split in found] == ["0", "56", "57", "58-59"]
    assert "its device's node has too few cores" in found[0].sentence()


def test_a_device_on_a_node_without_cpus_takes_the_nearest_cores(tmp_path: Path) -> None:
    root = machine(tmp_path, "gh200")
    assert [cpu_words(split.cpus) for split in splits(root, 2, (1, 1))] == ["0-35", "36-71"]


def test_cpus_and_bind_of_the_config(tmp_path: Path) -> None:
    root = machine(tmp_path, "hgx_h100")
    named = ThreadsConfig(cpus="0-3,112-113,56-57")
    split = split_threads(named, root=root)
    assert (split.update, cpu_words(split.cpus), split.nodes) == (6, "0-3,56-57,112-113", (0, 1))
    assert [cpu_words(split.cpus) for split in splits(root, 2, config=named)] == ["0-3,112-113", "56-57"]
    for split in splits(root, 2, config=ThreadsConfig(bind="off")):
        assert (split.update, split.cpus, split.nodes) == (56, (), ())
        assert "bind = 'off'" in split.sentence()
    with pytest.raises(ConfigError, match="CPUs 224-299 are offline or not this process's. It may use 0-223"):
        split_threads(ThreadsConfig(cpus="200-299"), root=root)
    with pytest.raises(ConfigError, match="'3-1' is no range"):
        split_threads(ThreadsConfig(cpus="0,3-1"), root=root)
    with pytest.raises(ConfigError, match="nothing would stay on these CPUs"):
        ThreadsConfig(cpus="0-3", bind="off")


def test_ranks_come_from_the_launchers_environment(tmp_path: Path) -> None:
    root = machine(tmp_path, "dgx_a100")
    addresses = [address(index).upper() for index in range(8)]
    env = {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}
    assert local_rank({}) == local_rank({"LOCAL_RANK": "3"}) == LocalRank()
    assert local_rank(env, lambda: (2, addresses), root=root) == LocalRank(2, 4, (3, 3, 1, 1))
    # One device each, another device than the rank's, a device that the system does not know.
    for seen in [(0, addresses[:1]), (0, addresses), (2, ["0000:00:00.0"] * 4)]:
        assert local_rank(env, lambda seen=seen: seen, root=root) == LocalRank(2, 4)  # type: ignore[misc]
    with pytest.raises(ConfigError, match="LOCAL_RANK is 4 and LOCAL_WORLD_SIZE 4"):
        local_rank({"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"})
    with pytest.raises(ConfigError, match="must be numbers"):
        local_rank({"LOCAL_WORLD_SIZE": "four"})


def test_system_files_that_say_nothing_or_nonsense_are_one_node(tmp_path: Path) -> None:
    (tmp_path / "sys/devices/system/node").mkdir(parents=True)
    (tmp_path / "sys/devices/system/node/online").write_text("what?\n")
    topology = read_topology(tmp_path)
    assert topology.nodes == () and len(topology.cores) >= 1
    assert split_threads(AUTO, root=tmp_path).nodes == ()


@pytest.mark.parametrize("text", ["", "0", "0-3,8,10-11", "5,7"])
def test_lists_of_cpus_are_written_as_they_are_read(text: str) -> None:
    assert cpu_words(cpu_list(text)) == text
