"""The event graph on its own: which orders of accesses are refused, and which are not."""

from __future__ import annotations

import random

import pytest

from offload_engine.device.eventgraph import EventGraph, HazardError, Job, Span, _Past

A, B = Span(1000, 1000, 1064), Span(1000, 1032, 1096)
"""Two runs of one block that share 32 bytes."""
APART = Span(1000, 1096, 1128)


def queue(
    graph: EventGraph, lane: str, reads: list[Span], writes: list[Span], *after: Job, ordered: bool = True
) -> Job:
    return graph.queue(lane, f"job on {lane}", reads, writes, after, ordered=ordered)


@pytest.mark.parametrize(
    ("first", "second", "refused"), [("w", "r", True), ("r", "w", True), ("w", "w", True), ("r", "r", False)]
)
def test_of_two_accesses_one_of_which_writes_one_comes_after_the_other(
    first: str, second: str, refused: bool
) -> None:
    graph = EventGraph()
    graph.names[1000] = "'the slab'"
    job = queue(graph, "h2d", [A] if first == "r" else [], [A] if first == "w" else [])
    queue(graph, "d2h", [APART], [APART])
    spans = ([B] if second == "r" else [], [B] if second == "w" else [])
    if not refused:
        queue(graph, "cpu_update", *spans)
        return
    verbs = {"r": "reads", "w": "writes"}
    with pytest.raises(HazardError) as caught:
        queue(graph, "cpu_update", *spans, ordered=False)
    assert str(caught.value) == (
        f"job 2 of lane 'cpu_update' (job on cpu_update) {verbs[second]} bytes 32 to 64 of 'the slab', which job 0 of "
        f"lane 'h2d' (job on h2d) {verbs[first]}, and does not come after it. The missing wait is for the event of "
        f"job 0: name it in `after`, or wait for it on the host before."
    )
    assert graph.violations == [str(caught.value)]
    with pytest.raises(HazardError, match="operator x writes bytes 0 to 64"):
        graph.host_uses(A, "operator x", writes=True)
    graph.join(job)
    graph.host_uses(A, "operator x", writes=True)


def test_after_reaches_through_jobs_between() -> None:
    graph = EventGraph()
    first = queue(graph, "d2h", [], [A])
    second = queue(graph, "cpu_gradient", [], [], first)
    queue(graph, "cpu_update", [], [B], second, ordered=False)
    with pytest.raises(HazardError):  # jobs of a lane that is not ordered are in no order by themselves
        queue(graph, "cpu_update", [B], [], second, ordered=False)


def test_an_ordered_lane_orders_its_jobs() -> None:
    graph = EventGraph()
    queue(graph, "h2d", [], [A])
    queue(graph, "h2d", [], [B])
    assert not graph.is_quiet(A) and graph.is_quiet(Span(1000, 1096, 1100))


def test_the_host_joins_what_came_before_a_job_and_drops_it() -> None:
    graph = EventGraph()
    over: list[str] = []
    first = queue(graph, "d2h", [], [A])
    other = queue(graph, "h2d", [], [APART])
    last = queue(graph, "cpu_gradient", [A], [], first)
    first.after_join = lambda: over.append("first")
    first.keep = object()
    graph.join(last)
    assert over == ["first"] and first.keep is None
    assert graph.has_joined(first) and not graph.has_joined(other) and not graph.idle
    with pytest.raises(HazardError):
        graph.host_uses(APART, "operator x", writes=False)
    graph.host_uses(A, "operator x", writes=True)
    graph.join(other)
    assert graph.idle and graph.is_quiet(APART)


def test_sets_of_jobs_join_as_sets_do() -> None:
    chance = random.Random(0)

    def past_of(numbers: set[int]) -> _Past:
        past = _Past(0, 0)
        for number in numbers:
            past = past.joined(_Past(0, 1 << number))
        return past

    for _ in range(200):
        a, b = ({n for n in range(20) if chance.random() < 0.7} for _ in range(2))
        joined = past_of(a).joined(past_of(b))
        assert {n for n in range(25) if n in joined} == a | b
        assert joined.bits & 1 == 0  # what is full is in the floor
