"""Lanes, events and pools of both backends: order, dependencies, failures, rates, Ctrl-C, the interpreter's end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from offload_engine import kernels
from offload_engine.errors import KernelError

BACKENDS = ["native", "numba"]


@pytest.fixture(params=BACKENDS)
def backend(request) -> kernels.Backend:
    return kernels.load(request.param)


@pytest.fixture
def lane(backend) -> Iterator[kernels.Lane]:
    one = backend.Lane("lane")
    yield one
    one.close()


def run_python(code: str, *, timeout_s: float = 60, **kwargs) -> subprocess.CompletedProcess[str]:
    head = "import os, signal, sys, threading, time, torch\nfrom offload_engine import kernels\n"
    return subprocess.run(
        [sys.executable, "-c", head + code],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        **kwargs,
    )


def test_events_have_times_of_the_monotonic_clock(backend, lane):
    gate = backend.Event.manual()
    event = lane.copy([torch.zeros(8)], [torch.ones(8)], after=[gate])
    assert (event.start_ns, event.end_ns, event.done()) == (0, 0, False)
    assert event.wait(0.0) is False and event.wait(0.05) is False
    before = time.perf_counter_ns()
    gate.signal(before - 5, before)
    assert (gate.start_ns, gate.end_ns) == (before - 5, before)
    assert event.wait() is True and event.done()
    assert before <= event.start_ns <= event.end_ns <= time.perf_counter_ns()


def _ranked(lane: kernels.Lane, rank: int, after: list[kernels.Event]) -> kernels.Event:
    tensors = [torch.zeros(64) for _ in range(4)]
    segment = kernels.UpdateSegment(0, 64, 0.1, 0.9, 0.99, 1e-8, 0.0, 1, True, False)
    return lane.update("adam", tensors[0], tensors[1:3], tensors[3], None, [segment], after=after, rank=rank)


def test_a_lane_that_is_not_ordered_takes_the_lowest_rank_that_can_start():
    native = kernels.load("native")
    lane = native.Lane("ranked", ordered=False)
    gate, late = native.Event.manual(), native.Event.manual()
    waiting = [_ranked(lane, rank, [gate]) for rank in (3, 1, 2, 1)]
    blocked = _ranked(lane, 0, [late])  # the lowest rank of all cannot start: the others go first
    time.sleep(0.02)
    gate.signal(1, 1)
    for event in waiting:
        assert event.wait(5)
    assert not blocked.done()
    started = sorted(range(4), key=lambda i: waiting[i].start_ns)
    assert started == [1, 3, 2, 0]
    late.signal(1, 1)
    assert blocked.wait(5)
    lane.close()


def test_a_closing_lane_that_is_not_ordered_does_what_is_queued(backend):
    lane, other = backend.Lane("ranked", ordered=False), backend.Lane("other")
    gate = backend.Event.manual()
    first = other.copy([torch.zeros(8)], [torch.ones(8)], after=[gate])
    events = [_ranked(lane, rank, [first]) for rank in (2, 1)]
    threading.Timer(0.05, lambda: gate.signal(1, 1)).start()
    for event in events:
        event.wait(5)
    stuck = _ranked(lane, 0, [backend.Event.manual()])
    lane.close()
    with pytest.raises(KernelError, match="nobody had ended"):
        stuck.wait(1)
    other.close()


def test_jobs_of_a_lane_run_in_order(backend, lane):
    gate = backend.Event.manual()
    value = torch.zeros(100_000)
    events = [lane.copy([value], [torch.full_like(value, float(i))], after=[gate]) for i in range(20)]
    gate.signal(0, 0)
    events[-1].wait()
    assert value.eq(19).all() and all(event.done() for event in events)
    times = [time for event in events for time in (event.start_ns, event.end_ns)]
    assert times == sorted(times)


def test_lanes_wait_for_each_other_by_events_alone(backend):
    """A chain over three lanes, with the last link submitted first where that is possible."""
    lanes = [backend.Lane(name) for name in ("h2d", "cpu_update", "d2h")]
    gate = backend.Event.manual()
    x, y, z = torch.ones(50_000), torch.zeros(50_000), torch.zeros(50_000)
    first = lanes[0].copy([y], [x], after=[gate])
    second = lanes[1].accumulate(y, x, after=[first])
    third = lanes[2].copy([z], [y], after=[first, second])
    time.sleep(0.02)
    assert not third.done() and z.eq(0).all()
    gate.signal(0, 0)
    third.wait()
    assert z.eq(2).all() and first.end_ns <= second.start_ns and second.end_ns <= third.start_ns
    for lane in lanes:
        lane.close()


def test_a_failure_reaches_everything_after_it_and_nothing_else(backend, lane):
    other = backend.Lane("other")
    gate, x = backend.Event.manual(), torch.zeros(8)
    first = lane.copy([x], [torch.ones(8)], after=[gate])
    second = other.copy([x], [torch.ones(8)], after=[first])
    bystander = lane.copy([torch.zeros(8)], [torch.ones(8)])
    gate.fail("the disk is full")
    for event, words in [
        (gate, "^the disk is full"),
        (first, "copy on lane 'lane'"),
        (second, "copy on lane 'other'"),
    ]:
        for _ in range(2):  # every wait says so
            with pytest.raises(KernelError, match=words) as caught:
                event.wait()
            assert "the disk is full" in str(caught.value) and event.done() and event.end_ns > 0
    assert bystander.wait() and x.eq(0).all()
    other.close()


def test_manual_events_end_once(backend, lane):
    event = backend.Event.manual()
    event.signal(3, 4)
    event.fail("too late")
    assert event.wait() and (event.start_ns, event.end_ns) == (3, 4)
    event = lane.copy([torch.zeros(8)], [torch.ones(8)])
    for call in (lambda: event.signal(1, 2), lambda: event.fail("no")):
        with pytest.raises(KernelError, match="Event.manual"):
            call()


def test_waiting_leaves_other_python_threads_running(backend):
    gate = backend.Event.manual()
    timer = threading.Timer(0.05, gate.signal, (1, 2))
    timer.start()
    assert gate.wait(30.0)
    timer.join()


@pytest.mark.parametrize("pooled", [False, True])
def test_throttle_holds_its_rate(backend, pooled):
    """Each copy and the whole run take bytes / rate, within what a busy machine allows; a pause earns no burst."""
    pool = backend.WorkerPool(2) if pooled else None
    lane = backend.Lane("h2d", gbps=0.1, pool=pool)
    source, target = torch.ones(2_000_000, dtype=torch.uint8), torch.zeros(2_000_000, dtype=torch.uint8)
    time.sleep(0.05)
    events = [lane.copy([target], [source]) for _ in range(5)]
    events[-1].wait()
    span_s = (events[-1].end_ns - events[0].start_ns) / 1e9
    assert 0.099 <= span_s <= 0.4, span_s
    assert all((event.end_ns - event.start_ns) / 1e9 >= 0.018 for event in events)
    # It slept for nearly all of that: two megabytes are copied in a fraction of it.
    paced_s = sum(event.paced_ns for event in events) / 1e9
    assert 0.08 <= paced_s < sum(event.end_ns - event.start_ns for event in events) / 1e9
    assert target.eq(1).all()
    lane.close()


def test_throttle_is_per_lane_and_for_copies_only(backend):
    slow, fast = backend.Lane("slow", gbps=1e-4), backend.Lane("fast")
    x = torch.ones(20_000)
    throttled = slow.copy([torch.zeros_like(x)], [x])
    assert fast.copy([torch.zeros_like(x)], [x]).wait(5.0)
    assert not throttled.done() and throttled.wait(5.0)
    event = slow.accumulate(torch.zeros_like(x), x)
    event.wait()
    assert event.end_ns - event.start_ns < 400e6
    assert throttled.paced_ns > 0 and event.paced_ns == 0
    for lane in (slow, fast):
        lane.close()


def test_events_of_another_backend_are_refused(backend, lane):
    other = kernels.load({"native": "numba", "numba": "native"}[backend.name])
    for stranger in (other.Event.manual(), None):
        with pytest.raises(KernelError, match="events of this backend"):
            lane.copy([torch.zeros(8)], [torch.ones(8)], after=[stranger])


@pytest.mark.parametrize("gbps", [-1.0, float("nan"), float("inf")])
def test_a_rate_must_be_a_rate(backend, gbps):
    with pytest.raises(KernelError, match="gbps"):
        backend.Lane("h2d", gbps=gbps)


def test_a_pool_needs_a_thread(backend):
    with pytest.raises(KernelError, match="at least 1"):
        backend.WorkerPool(0)


def test_lanes_share_a_pool(backend):
    pool = backend.WorkerPool(3)
    lanes = [backend.Lane(f"lane{i}", pool=pool) for i in range(3)]
    sums = [torch.zeros(300_000) for _ in lanes]
    x = torch.ones(300_000)
    events = [lane.accumulate(total, x) for _ in range(20) for lane, total in zip(lanes, sums, strict=True)]
    for event in events:
        event.wait()
    assert all(total.eq(20).all() for total in sums)
    for lane in lanes:
        lane.close()
    pool.close()


def test_many_small_jobs(backend):
    pool = backend.WorkerPool(2)
    lane = backend.Lane("lane", pool=pool)
    x, total = torch.ones(100), torch.zeros(100)
    event = None
    for _ in range(2000):
        event = lane.accumulate(total, x, after=[] if event is None else [event])
    event.wait()
    assert total.eq(2000).all()
    lane.close()


def test_submitting_from_many_threads(backend, lane):
    total, x = torch.zeros(1000), torch.ones(1000)
    threads = [
        threading.Thread(target=lambda: [lane.accumulate(total, x) for _ in range(50)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lane.close()
    assert total.eq(200).all()


def test_close_does_what_is_queued_and_refuses_more(backend):
    lane = backend.Lane("lane", gbps=0.05)
    x = torch.zeros(1_000_000, dtype=torch.uint8)
    event = lane.copy([x], [torch.ones_like(x)])
    lane.close()
    assert event.done() and x.eq(1).all()
    lane.close()
    with pytest.raises(KernelError, match="lane 'lane' is closed"):
        lane.copy([x], [x.clone()])


def test_close_does_not_wait_for_what_nobody_will_signal(backend):
    """Directly, behind another job, and through another lane that is still open."""
    first, second = backend.Lane("first"), backend.Lane("second")
    gate, x = backend.Event.manual(), torch.zeros(8)
    blocked = first.copy([x], [torch.ones(8)], after=[gate])
    behind = first.copy([x], [torch.full((8,), 2.0)])
    far = second.copy([x], [torch.full((8,), 3.0)], after=[behind])
    last = second.copy([torch.zeros(8)], [torch.ones(8)])
    second.close()
    with pytest.raises(KernelError, match="copy on lane 'second': the lane was closed, and nobody"):
        far.wait()
    assert last.wait() and not blocked.done()
    first.close()
    with pytest.raises(KernelError, match="copy on lane 'first': the lane was closed, and nobody"):
        blocked.wait()
    assert behind.wait() and x.eq(2).all()


def test_a_dropped_lane_still_does_its_jobs(backend):
    gate = backend.Event.manual()
    x = torch.zeros(8)
    event = backend.Lane("dropped").copy([x], [torch.ones(8)], after=[gate])
    gate.signal(0, 0)
    assert event.wait(10.0) and x.eq(1).all()


# One process for both backends: importing torch takes most of the time.
INTERRUPTED = """
for name in ("native", "numba"):
    backend = kernels.load(name)
    for wait in ("event", "lane"):
        lane = backend.Lane("lane", gbps=1e-5)
        event = lane.copy([torch.zeros(1_000_000)], [torch.ones(1_000_000)])
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        try:
            event.wait() if wait == "event" else lane.close()
        except KeyboardInterrupt:
            print(name, wait, time.monotonic() - begin < 5, event.done())
"""


def test_ctrl_c_ends_a_wait():
    """A copy that would take minutes; an interrupted close fails it."""
    done = run_python(INTERRUPTED)
    assert done.returncode == 0, done.stderr
    rows = [f"{name} {wait} True {wait == 'lane'}" for name in BACKENDS for wait in ("event", "lane")]
    assert done.stdout.splitlines() == rows


LEFT_OPEN = """
for name in ("native", "numba"):
    backend = kernels.load(name)
    pool = backend.WorkerPool(2)
    lane = backend.Lane("busy", gbps=0.0001, pool=pool)
    stuck = backend.Lane("stuck", pool=pool)
    x = torch.zeros(10_000_000)
    lane.copy([x], [torch.ones_like(x)])
    for _ in range(3):
        stuck.copy([x], [torch.ones_like(x)], after=[backend.Event.manual()])
        lane.accumulate(x, torch.ones_like(x))
    idle = backend.Lane("idle")
time.sleep(0.1)
print("end")
"""


@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1)])
def test_leaving_without_close_neither_hangs_nor_crashes(end, code):
    """A copy that would take minutes, jobs that wait for ever, an idle lane, a pool: all abandoned at exit."""
    begin = time.monotonic()
    done = run_python(LEFT_OPEN + end)
    assert done.stdout.strip() == "end"
    assert done.returncode == code, done.stderr
    assert time.monotonic() - begin < 40


FORKED = """
made = []
for name in ("native", "numba"):
    backend = kernels.load(name)
    pool = backend.WorkerPool(2)
    lane = backend.Lane("lane", pool=pool)
    made.append((pool, lane))
x = torch.zeros(8)
for pool, lane in made:
    lane.copy([x], [torch.ones(8)]).wait()
child = os.fork()
if child == 0:
    for pool, lane in made:
        try:
            lane.copy([x], [torch.ones(8)])
        except RuntimeError as error:
            print("fork" in str(error), flush=True)
        lane.close()
    del lane, pool, made
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_and_can_leave():
    done = run_python(FORKED)
    assert done.stdout.split() == ["True", "True", "5"], done.stderr


def test_signals_handled_elsewhere_do_not_end_a_wait(backend):
    gate = backend.Event.manual()
    seen = []
    old = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        threading.Timer(0.4, gate.signal, (1, 2)).start()
        assert gate.wait(30.0) and seen == [1]
    finally:
        signal.signal(signal.SIGUSR1, old)
