"""Layouts, meshes, exchanges and the watchdog, on gloo."""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offload_engine as oe
from offload_engine.config import ParallelConfig
from offload_engine.errors import RankError
from offload_engine.parallel.collectives import RankGroup, compare_ranks, source_digest, watchdog_of
from offload_engine.parallel.mesh import AXES, Layout, build_mesh, layout_of
from offload_engine.parallel.watchdog import EXIT_CODE, Watchdog
from tests.distributed.ranks import RankFailedError, on_ranks, start_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]

# Layouts.


def test_dp_takes_what_is_left() -> None:
    layout = layout_of(ParallelConfig(pp=2, tp=2), 8)
    assert layout == Layout(pp=2, dp=2, cp=1, tp=2, ep=1)
    assert (layout.world, layout.shard, layout.expert_data) == (8, 2, 2)
    assert layout_of(ParallelConfig(cp=2, ep=4), 8, experts=8).expert_data == 2


def test_every_rank_has_a_place_of_its_own() -> None:
    layout = Layout(pp=2, dp=3, cp=2, tp=2, ep=3)
    places = [tuple(layout.coordinates(rank).values()) for rank in range(layout.world)]
    assert len(set(places)) == 24
    assert layout.coordinates(1) == {"tp": 1, "cp": 0, "dp": 0, "pp": 0}  # tensor parallelism is innermost
    assert layout.coordinates(12) == {"tp": 0, "cp": 0, "dp": 0, "pp": 1}
    with pytest.raises(ValueError, match="rank 24 is not one of 24"):
        layout.coordinates(24)


@pytest.mark.parametrize(
    ("config", "world", "model", "fault", "nearest"),
    [
        ({"tp": 3}, 8, {}, "1 x 2 x 1 x 3 = 6 ranks", {"tp": (2, 4)}),
        ({"dp": 2, "tp": 2}, 8, {}, "= 4 ranks", {}),
        ({"pp": 4}, 8, {"layers": 2}, "pp = 4 stages have only 2 layers", {"pp": (1, 2)}),
        ({"tp": 4}, 4, {"heads": 2}, "tp = 4 ranks have only 2 heads of keys", {"tp": (1, 2)}),
        ({"ep": 3}, 4, {"experts": 6}, "ep = 3 does not divide dp x cp = 4", {"ep": (1, 2)}),
        ({"ep": 4}, 4, {"experts": 6}, "ep = 4 does not divide 6 experts", {"ep": (1, 2)}),
        ({"ep": 2}, 4, {}, "ep = 2, but the model has no experts", {"ep": (1,)}),
    ],
    ids=str,
)
def test_an_impossible_layout_names_the_nearest(
    config: dict[str, int], world: int, model: dict[str, int], fault: str, nearest: dict[str, tuple[int, ...]]
) -> None:
    with pytest.raises(oe.ConfigError, match=re.escape(fault)) as caught:
        layout_of(ParallelConfig(**config), world, **model)
    offers = str(caught.value).partition("that are: ")[2].rstrip(".").split("; ")
    assert 1 <= len(offers) <= 3
    for offer in offers:
        chosen = {axis: int(value) for axis, value in re.findall(r"(\w+) = (\d+)", offer)}
        assert layout_of(ParallelConfig(**chosen), world, **model).world == world  # it is possible
    first = dict(re.findall(r"(\w+) = (\d+)", offers[0]))
    for axis, values in nearest.items():
        assert int(first.get(axis, 1)) in values, offers


@pytest.mark.parametrize(
    "bad", [{"tp": 0}, {"pp": 1.5}, {"dp": -1}, {"ep": True}, {"zero_stage": 4}], ids=str
)
def test_settings_out_of_range(bad: dict[str, Any]) -> None:
    with pytest.raises(oe.ConfigError, match=next(iter(bad))):
        ParallelConfig(**bad)


# Meshes.


def _mesh_facts(sizes: tuple[int, ...]) -> dict[str, Any]:
    layout = Layout(*sizes)
    mesh = build_mesh(layout, "cpu")
    axes = (*AXES, "dp_cp", "ep", "dp_cp_by_ep")
    return {"place": mesh.place, **{axis: list(mesh.ranks(axis)) for axis in axes}}


@pytest.mark.parametrize("sizes", [(1, 2, 2, 1, 2), (2, 2, 1, 1, 1), (1, 2, 1, 2, 2)], ids=str)
def test_groups_are_the_ranks_that_differ_on_their_axis(sizes: tuple[int, ...]) -> None:
    layout = Layout(*sizes)
    found = on_ranks(layout.world, _mesh_facts, sizes)
    places = [layout.coordinates(rank) for rank in range(layout.world)]
    for rank, facts in enumerate(found):
        assert facts["place"] == places[rank]
        for axis in AXES:
            others = [a for a in AXES if a != axis]
            same = [r for r in range(layout.world) if all(places[r][a] == places[rank][a] for a in others)]
            assert facts[axis] == same
        shard = [r for r in range(layout.world) if all(places[r][a] == places[rank][a] for a in ("pp", "tp"))]
        assert facts["dp_cp"] == shard
        assert len(facts["ep"]) == layout.ep and len(facts["dp_cp_by_ep"]) == layout.expert_data
        assert set(facts["ep"]) & set(facts["dp_cp_by_ep"]) == {rank}
        assert set(facts["ep"]) | set(facts["dp_cp_by_ep"]) <= set(shard)


# Exchanges.


def _exchange(dtype: torch.dtype) -> dict[str, Any]:
    group = RankGroup(None, "all", watchdog_of())
    rank, size = group.rank, group.size
    generator = torch.Generator().manual_seed(rank)
    full = torch.randn(size * 5, generator=generator).to(dtype)
    out = torch.empty(5)
    group.reduce(full, out, "reduce")
    whole = torch.zeros(size * 5)
    whole[rank * 5 : rank * 5 + 5] = out
    group.gather(whole[rank * 5 : rank * 5 + 5], whole, "gather in place")
    total = torch.full((3,), float(rank + 1), dtype=torch.float64)
    group.sum(total, "sum")
    flags = torch.tensor([rank == 0, False, rank == size - 1])
    group.any(flags, "flags")
    eight = torch.arange(2 * size, dtype=torch.uint8).view(torch.float8_e4m3fn)
    gathered = torch.empty(2 * size, dtype=torch.float8_e4m3fn)
    group.gather(eight[2 * rank : 2 * rank + 2], gathered, "float8")
    given = torch.tensor([float(rank)])
    group.broadcast(given, size - 1, "given")
    group.barrier("end")
    assert group._watchdog is not None
    group._watchdog.close()
    return {
        "sum": whole,
        "total": total,
        "flags": flags,
        "float8": gathered.view(torch.uint8),
        "given": given,
        "bytes": group.bytes_sent,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_exchanges_are_made_in_the_order_of_ranks(world: int, dtype: torch.dtype) -> None:
    found = on_ranks(world, _exchange, dtype)
    parts = [
        torch.randn(world * 5, generator=torch.Generator().manual_seed(r)).to(dtype).float()
        for r in range(world)
    ]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    for facts in found:
        assert torch.equal(facts["sum"], total)  # bits, on every rank
        assert facts["total"].tolist() == [world * (world + 1) / 2] * 3
        assert facts["flags"].tolist() == [True, False, True]
        assert facts["float8"].tolist() == list(range(2 * world))
        assert facts["given"].item() == world - 1
        assert (facts["bytes"] > 0) == (world > 1)


# Ranks that differ.


def _compared(differs: int) -> str:
    rank = dist.get_rank()
    facts = {"device_memory": "6GiB", "code": source_digest(), "names": 12}
    if rank == differs:
        facts["device_memory"] = "4GiB"
    try:
        compare_ranks(facts)
        compare_ranks({"again": 1})
    except oe.ConfigError as error:
        return str(error)
    return ""


def test_ranks_with_different_settings_are_refused_on_all_of_them() -> None:
    assert on_ranks(3, _compared, -1) == ["", "", ""]
    for message in on_ranks(3, _compared, 2):
        assert "the ranks differ: device_memory is '6GiB' on rank 0 and '4GiB' on rank 2" in message


def _absent() -> str:
    if dist.get_rank() == 1:
        time.sleep(3)
        return "late"
    try:
        compare_ranks({"x": 1}, timeout_s=1)
    except RankError as error:
        return str(error)
    return ""


def test_a_rank_that_does_not_come_is_named() -> None:
    assert "rank 1 has not said within 1 s" in on_ranks(2, _absent)[0]


# The watchdog.


class Store:
    """What a TCPStore does, in one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> str:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


@pytest.fixture
def watched() -> Iterator[tuple[Store, Watchdog, list[str], threading.Event]]:
    store, said, ended = Store(), [], threading.Event()

    def end(message: str) -> None:
        said.append(message)
        ended.set()

    dog = Watchdog(store, 0, limit_s=0.3, gone_s=1.5, period_s=0.02, end=end)
    yield store, dog, said, ended
    dog.close()


def other(beat: int, entered: int, ended: bool = False, waits: Any = None) -> str:
    facts = {
        "beat": beat,
        "entered": {"all": entered},
        "last": {"all": "gather 1"},
        "ended": ended,
        "waits": waits,
    }
    return json.dumps(facts)


def test_a_rank_that_waits_elsewhere_is_named(watched: Any) -> None:
    store, dog, said, ended = watched
    beats = itertools.count()
    with dog.on("all", [0, 1, 2], "gather 1"):
        pass
    with dog.on("all", [0, 1, 2], "gather 2"):
        deadline = time.monotonic() + 5
        while not ended.is_set() and time.monotonic() < deadline:
            elsewhere = ["experts", 4, "tokens", [0, 1]]
            store.set("offload-engine watchdog all 1", other(next(beats), 1, waits=elsewhere))
            here = ["all", 2, "gather 2", [0, 1, 2]]
            store.set("offload-engine watchdog all 2", other(next(beats), 2, waits=here))
            time.sleep(0.01)
    assert "collective 2 of all, 'gather 2', with ranks [0, 1, 2]" in said[0]
    assert "Rank 1 waits in another collective: 'tokens' of experts" in said[0]
    assert "Rank 2" not in said[0]


def test_a_rank_that_is_busy_is_waited_for(watched: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It writes a checkpoint, say."""
    caplog.set_level("WARNING", logger="offload_engine")
    store, dog, said, _ = watched
    beats = itertools.count()
    with dog.on("all", [0, 1], "gather 1"):
        for _ in range(70):  # more than twice the limit
            store.set("offload-engine watchdog all 1", other(next(beats), 0))
            time.sleep(0.01)
    assert not said
    assert caplog.text.count("Rank 1 has not come to it (its last one there: number 0, 'gather 1')") == 1
    assert "They are alive, and are waited for." in caplog.text


def test_a_watchdog_that_has_lost_its_store_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """From then on nobody names who is missing."""
    caplog.set_level("WARNING", logger="offload_engine")

    class Lost(Store):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Broken pipe")

    dog = Watchdog(Lost(), 3, period_s=0.01)
    dog._thread.join(5)
    dog.close()
    assert caplog.text.count("rank 3 has lost the store that all ranks share (Broken pipe)") == 1


def test_patience_has_an_end() -> None:
    store, said, ended = Store(), [], threading.Event()

    def end(message: str) -> None:
        said.append(message)
        ended.set()

    dog = Watchdog(store, 0, limit_s=0.05, patience_s=0.2, gone_s=60, period_s=0.02, end=end)
    store.set("offload-engine watchdog all 1", other(1, 0))
    with dog.on("all", [0, 1], "gather 1"):
        assert ended.wait(5)
    dog.close()
    assert "Rank 1 has not come to it" in said[0]


def test_a_rank_without_a_sign_of_life_is_gone(watched: Any) -> None:
    store, dog, said, ended = watched
    store.set("offload-engine watchdog all 1", other(7, 1))
    with dog.on("all", [0, 1], "gather 1"):
        assert ended.wait(5)
    assert "Rank 1 is gone: no sign of life" in said[0]


def test_a_rank_that_has_ended_as_it_should_is_not_gone(watched: Any) -> None:
    store, dog, said, ended = watched
    store.set("offload-engine watchdog all 1", other(7, 1, ended=True))
    with dog.on("all", [0, 1], "gather 1"):
        assert not ended.wait(0.25)  # it did its part of this one
    with dog.on("all", [0, 1], "gather 2"):
        assert ended.wait(5)
    assert "Rank 1 has ended its training already" in said[0]


def test_watchdogs_of_one_process_do_not_speak_for_each_other(watched: Any) -> None:
    """The end of one engine is not the end of the rank's others."""
    store, dog, said, ended = watched
    store.set("offload-engine watchdog all 1", other(1, 1))
    store.set("offload-engine watchdog 7 1", other(9, 0, ended=True))
    beats = itertools.count(2)
    with dog.on("all", [0, 1], "gather 1"):
        for _ in range(15):
            store.set("offload-engine watchdog all 1", other(next(beats), 1))
            time.sleep(0.01)
    assert not said
    second = Watchdog(store, 0, name="7", period_s=0.02)
    second.close()
    assert json.loads(store.get("offload-engine watchdog 7 0"))["ended"]
    assert not json.loads(store.get("offload-engine watchdog all 0"))["ended"]


def test_short_collectives_are_left_alone(watched: Any) -> None:
    store, dog, said, _ = watched
    store.set("offload-engine watchdog all 1", other(1, 0))
    for number in range(20):
        with dog.on("all", [0], f"gather {number}"):
            time.sleep(0.01)
    assert not said


def _killed(who: int) -> str:
    group = RankGroup(None, "all", watchdog_of(limit_s=6.0, gone_s=2.0, period_s=0.2))
    group.barrier("start")
    if dist.get_rank() == who:
        time.sleep(0.5)
        os._exit(9)
    for _ in range(1000):
        group.sum(torch.ones(4), "count")
        time.sleep(0.01)
        if dist.get_rank() == 2:  # waits for a rank that is alive and itself waits
            time.sleep(0.05)
    return "not reached"


def test_a_killed_rank_ends_all_within_seconds(tmp_path: Path) -> None:
    """The others end by an error of the backend's that names the exchange, or by the watchdog's exit code."""
    processes, answers = start_ranks(3, _killed, 1, folder=tmp_path)
    processes[1].join(60)  # the first to start waits for the server, which imports torch
    start = time.monotonic()
    for process in processes:
        process.join(30)
    assert not any(process.is_alive() for process in processes)
    assert time.monotonic() - start < 30
    said: dict[int, str] = {}
    while len(said) + sum(process.exitcode == EXIT_CODE for process in processes) < 2:
        rank, fine, value = answers.get(timeout=2)
        assert not fine
        said[rank] = value
    assert processes[1].exitcode == 9
    for rank in (0, 2):
        assert processes[rank].exitcode == EXIT_CODE or "'count' of all" in said[rank]


def _elsewhere() -> None:
    watchdog = watchdog_of(limit_s=1.0, gone_s=20.0, period_s=0.1)
    group, second = RankGroup(None, "all", watchdog), RankGroup(dist.new_group(), "second", watchdog)
    group.barrier("start")
    (group if dist.get_rank() == 0 else second).sum(torch.ones(1), "norm of step 3")


def test_a_hang_ends_with_the_names(tmp_path: Path) -> None:
    processes, _ = start_ranks(2, _elsewhere, folder=tmp_path)
    processes[0].join(60)
    assert processes[0].exitcode == EXIT_CODE
    for process in processes:
        process.kill()
        process.join()


def test_a_failing_rank_fails_the_test() -> None:
    with pytest.raises(RankFailedError, match="rank 1: ValueError: as asked"):
        on_ranks(2, _raises)


def _raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("as asked")
