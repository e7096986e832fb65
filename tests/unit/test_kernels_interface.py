"""Choosing a backend, and what each refuses: every mistake is a KernelError that names the tensor and the remedy."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from offload_engine import kernels
from offload_engine.errors import BuildError, ConfigError, KernelError
from offload_engine.kernels import UpdateSegment, api

SEGMENT = UpdateSegment(0, 8, 1e-3, 0.9, 0.999, 1e-8, 0.0, 1, True, False)


@pytest.fixture(params=["native", "numba"])
def backend(request) -> kernels.Backend:
    return kernels.load(request.param)


@pytest.fixture
def lane(backend) -> Iterator[kernels.Lane]:
    one = backend.Lane("lane")
    yield one
    one.close()


def update(lane, master, exp_avg, exp_avg_sq, grad, working=None) -> kernels.Event:
    return lane.update("adam", master, (exp_avg, exp_avg_sq), grad, working, [SEGMENT])


def test_load_picks_the_best_and_takes_names():
    isas = kernels.available_isas()
    assert isas[-1] == "scalar"
    assert kernels.load().isa == isas[0]
    for isa in isas:
        backend = kernels.load("native", isa)
        assert (backend.name, backend.isa) == ("native", isa) and isa in backend.describe()
    assert kernels.load("numba").name == "numba"


@pytest.mark.parametrize(
    ("backend", "isa", "words"),
    [
        ("cuda", "auto", "'native' or 'numba'"),
        ("native", "avx1024", "this build and CPU have"),
        ("numba", "scalar", "Set isa = 'auto'"),
    ],
)
def test_load_refuses_what_is_not_there(backend, isa, words):
    with pytest.raises(ConfigError, match=words):
        kernels.load(backend, isa)


def test_without_the_extension_only_loading_it_fails(monkeypatch):
    monkeypatch.setattr(kernels, "_native", None)
    assert kernels.available_isas() == []
    with pytest.raises(BuildError, match="kernels = 'numba'"):
        kernels.load()
    assert kernels.load("numba").name == "numba"


def test_importing_does_not_compile_or_start_anything():
    code = (
        "import sys, threading, offload_engine.kernels as k\n"
        "assert 'numba' not in sys.modules and threading.active_count() == 1\n"
        "k.load(); assert 'numba' not in sys.modules and threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_both_backends_have_the_whole_interface(backend, lane):
    pool = backend.WorkerPool(2)
    for protocol, made in [(api.Lane, lane), (api.Event, backend.Event.manual()), (api.WorkerPool, pool)]:
        wanted = {name for name in (*vars(protocol), *protocol.__annotations__) if not name.startswith("_")}
        assert wanted <= set(dir(made)), wanted - set(dir(made))
    assert pool.threads == 2 and lane.name == "lane"
    pool.close()
    pool.close()


def test_signatures_take_the_interface_s_names(lane):
    """The native methods have no Python signature: call them by keyword instead."""
    x = torch.ones(8)
    out = torch.zeros(1, dtype=torch.float64)
    events = [
        lane.copy(dsts=[x.clone()], srcs=[x], after=[]),
        lane.move(dsts=[x.clone()], srcs=[x.clone()], pages=True, after=()),
        lane.convert(dst=x.half(), src=x, after=()),
        lane.accumulate(acc_fp32=x.clone(), src=x, after=()),
        lane.square_sums(src=x, spans=[(0, 8)], out_f64=out, after=()),
        lane.update(
            rule="adam", master=x.clone(), states=(x.clone(), x.clone()), grad=x, working=None, segments=[SEGMENT],
            grad_scale=1.0, after=(), out=None,
        ),
    ]  # fmt: skip
    assert all(event.wait(timeout_s=10.0) and event.done() for event in events)
    assert [event.nbytes for event in events] == [32, 32, 16 + 32, 96, 32, 8 * 28]
    assert out.item() == 8.0
    for name in ("copy", "move", "convert", "accumulate", "square_sums", "update"):
        assert inspect.getdoc(getattr(api.Lane, name))


@pytest.mark.parametrize("role", ["master", "exp_avg", "exp_avg_sq", "grad", "working"])
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (torch.ones(8, dtype=torch.float64), "float64"),
        (torch.ones(8, dtype=torch.int32), "int32"),
        (torch.ones(16)[::2], "not contiguous"),
        (torch.ones(7), "elements"),
        (torch.empty(8, device="meta"), "CPU memory"),
        (torch.ones(8).to_sparse(), "cannot be read"),
        ([1.0] * 8, "cannot be read"),
    ],
    ids=["double", "integer", "strided", "size", "meta", "sparse", "list"],
)
def test_updates_refuse_wrong_tensors(lane, role, bad, words):
    tensors = {name: torch.ones(8) for name in ("master", "exp_avg", "exp_avg_sq", "grad", "working")}
    tensors[role] = bad
    with pytest.raises(KernelError, match=words) as caught:
        update(lane, **tensors)
    named = caught.value.args[0]
    assert named.startswith("update: ") and (role in named or (role == "master" and words == "elements"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"numel": 9}, r"\[0, \+9\) leaves the tensor's 8 elements"),
        ({"offset_numel": -1}, "leaves the tensor"),
        ({"offset_numel": 9, "numel": 0}, "leaves the tensor"),
        ({"numel": -1}, "leaves the tensor"),
        ({"step": 0}, "1 for the first"),
        ({"beta1": 1.0}, r"must be in \[0, 1\)"),
        ({"beta2": -0.1}, r"must be in \[0, 1\)"),
    ],
)
def test_updates_refuse_wrong_segments(lane, change, words):
    tensors = [torch.ones(8) for _ in range(4)]
    with pytest.raises(KernelError, match=words):
        lane.update("adam", tensors[0], tensors[1:3], tensors[3], None, [SEGMENT._replace(**change)])
    with pytest.raises(KernelError, match="overlap at element 7"):
        twice = [SEGMENT, SEGMENT._replace(offset_numel=7, numel=1)]
        lane.update("adam", tensors[0], tensors[1:3], tensors[3], None, twice)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({0: torch.zeros(7)}, "master_out has 7 elements. It must have 8"),
        ({1: torch.zeros(8).half()}, "exp_avg_out is float16. It must be float32"),
        ({2: torch.zeros(16)[::2]}, "exp_avg_sq_out is not contiguous"),
        ({3: torch.zeros(8)}, "working_out is float32. It must be bfloat16"),
        ({3: torch.zeros(7).bfloat16()}, "working_out has 7 elements"),
        ({3: None}, "working_out is None, working is not. Pass both or neither"),
    ],
)
def test_updates_refuse_wrong_outputs(lane, change, words):
    inputs = [torch.ones(8) for _ in range(4)]
    out = {0: torch.zeros(8), 1: torch.zeros(8), 2: torch.zeros(8), 3: torch.zeros(8).bfloat16()}
    inputs = ("adam", inputs[0], inputs[1:3], inputs[3])
    bad = out | change
    with pytest.raises(KernelError, match=f"update: {words}"):
        lane.update(*inputs, torch.ones(8).bfloat16(), [SEGMENT], out=(bad[0], (bad[1], bad[2]), bad[3]))
    with pytest.raises(KernelError, match="working is None, working_out is not. Pass both or neither"):
        lane.update(*inputs, None, [SEGMENT], out=(out[0], (out[1], out[2]), out[3]))
    with pytest.raises(KernelError, match="out is not a tuple of three"):
        lane.update(*inputs, None, [SEGMENT], out=(out[0], (out[1], out[2])))
    with pytest.raises(KernelError, match="1 outputs for 2 states"):
        lane.update(*inputs, None, [SEGMENT], out=(out[0], (out[1],), None))


def call(numel: int = 600, **changed) -> dict[str, object]:
    """Return a right call over a split master and 8-bit states, with what is changed."""
    codes = [torch.zeros(numel + 4 * -(-numel // 256), dtype=torch.uint8) for _ in range(2)]
    right = {
        "rule": "adam", "master": torch.zeros(numel + -(-numel // 16), dtype=torch.int16), "states": codes,
        "grad": torch.zeros(numel), "working": torch.zeros(numel, dtype=torch.bfloat16),
        "segments": [SEGMENT._replace(numel=numel)],
    }  # fmt: skip
    return right | changed


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rule": "rmsprop"}, "rule is 'rmsprop'"),
        ({"states": [torch.zeros(612, dtype=torch.uint8)]}, "1 states"),
        ({"states": [torch.zeros(600), torch.zeros(600).bfloat16()]}, "exp_avg_sq is bfloat16"),
        ({"states": [torch.zeros(600).half(), torch.zeros(600).half()]}, "exp_avg is float16"),
        ({"states": [torch.zeros(611, dtype=torch.uint8)] * 2}, "exp_avg has 611 elements. It must have 612"),
        ({"master": torch.zeros(637, dtype=torch.int16)}, "master has 637 elements. It must have 638"),
        ({"master": torch.zeros(638, dtype=torch.int8)}, "master has 638 elements. It must have 600"),
        ({"master": torch.zeros(600).half()}, "master is float16"),
        ({"working": None}, "working is None"),
        ({"working": torch.zeros(600)}, "working is float32. It must be bfloat16"),
        ({"master": torch.zeros(600).bfloat16()}, "A bfloat16 master is one: pass None"),
        ({"segments": [SEGMENT._replace(offset_numel=16)]}, "start at a multiple of 256"),
        (
            {"segments": [SEGMENT._replace(offset_numel=8)], "states": [torch.zeros(600), torch.zeros(600)]},
            "start at a multiple of 16",
        ),
        ({"segments": [SEGMENT._replace(seed=2**32)]}, "seed is 4294967296"),
        ({"segments": [SEGMENT._replace(beta1=float("nan"))]}, "betas are nan"),
        ({"segments": [SEGMENT._replace(eps=-1.0)]}, "eps is -1.0"),
        ({"segments": [SEGMENT._replace(eps=float("nan"))]}, "eps is nan"),
        ({"segments": [SEGMENT._replace(lr=float("inf"))]}, "lr is inf"),
        ({"rule": "sgd", "states": []}, "there is no momentum_buffer"),
        ({"working": torch.zeros(1).bfloat16().expand(600)}, "working is not contiguous"),
    ],
)
def test_updates_refuse_what_is_no_layout(changed, words):
    one = kernels.load("native").Lane("lane")
    one.update(**call()).wait()
    with pytest.raises(KernelError, match=words):
        one.update(**call(**changed))
    one.close()


def test_memory_that_is_written_may_not_be_used_twice():
    one = kernels.load("native").Lane("lane")
    memory = torch.zeros(24)
    tensors = [memory[:8], memory[8:16], memory[16:], torch.ones(8)]
    for bad in range(1, 4):
        twice = [*tensors]
        twice[bad] = memory[1:9]
        with pytest.raises(KernelError, match="overlap in memory"):
            update(one, *twice)
    out = (torch.zeros(8), (torch.zeros(8), tensors[1]), None)
    with pytest.raises(
        KernelError, match="exp_avg and exp_avg_sq_out overlap|exp_avg_sq_out and exp_avg overlap"
    ):
        one.update("adam", tensors[0], tensors[1:3], tensors[3], None, [SEGMENT], out=out)
    for refused in (
        lambda: one.convert(memory[:8], memory[4:12]),
        lambda: one.accumulate(memory[:8], memory[:8]),
        lambda: one.copy([memory[:8], memory[8:16]], [memory[16:], memory[7:15]]),
    ):
        with pytest.raises(KernelError, match="overlap in memory"):
            refused()
    update(one, *tensors).wait()
    assert memory[:8].ne(0).all()
    one.close()


def test_an_update_of_nothing_is_a_job_that_does_nothing():
    one = kernels.load("native").Lane("lane")
    event = one.update(**call(0, segments=[]))
    assert event.wait(10.0) and event.nbytes == 0
    one.close()


def test_copies_and_conversions_refuse_mismatches(lane):
    x = torch.ones(8)
    refused = [
        (lambda: lane.copy([x], [x, x]), "1 destinations, 2 sources"),
        (lambda: lane.copy([x], [x.bfloat16()]), "dst is (torch.)?float32, src is (torch.)?bfloat16"),
        (lambda: lane.copy([x], [torch.ones(9)]), "dst has 8 elements, src has 9"),
        (lambda: lane.copy([x], [torch.ones(8, device="meta")]), "CPU memory"),
        (lambda: lane.move([x], [x, x]), "move: 1 destinations, 2 sources"),
        (lambda: lane.move([x], [x.bfloat16()]), "move: dst is (torch.)?float32, src is (torch.)?bfloat16"),
        (lambda: lane.move([x], [torch.ones(9)]), "move: dst has 8 elements, src has 9"),
        (lambda: lane.move([x], [torch.ones(16)[::2]]), "move: src is not contiguous"),
        (lambda: lane.move([x[:5]], [x[3:]]), "move: dst and src overlap"),
        (lambda: lane.convert(x, torch.ones(8, dtype=torch.int64)), "src is int64"),
        (lambda: lane.convert(x, torch.ones(7)), "src has 7 elements"),
        (lambda: lane.accumulate(x.half(), x), "acc_fp32 is float16"),
        (lambda: lane.accumulate(x, torch.ones(7)), "src has 7 elements"),
        (lambda: lane.square_sums(x, [(0, 8)], torch.zeros(1)), "out_f64 is (torch.)?float32"),
        (lambda: lane.square_sums(x, [(0, 8)], torch.zeros(0, dtype=torch.float64)), "spans need 1"),
        (lambda: lane.square_sums(x, [(4, 5)], torch.zeros(1, dtype=torch.float64)), "leaves the tensor"),
    ]
    for call, words in refused:
        with pytest.raises(KernelError, match=words):
            call()
    assert x.eq(1).all()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.int64, torch.float64, torch.float16, torch.complex64]
)
def test_copies_move_any_dtype(lane, dtype):
    source = torch.randint(0, 2, (1001,), generator=torch.Generator().manual_seed(0)).to(dtype)
    target = torch.zeros(1003, dtype=dtype)
    lane.copy([target[1:1002], target[:0]], [source, source[:0]]).wait()
    assert torch.equal(target[1:1002], source) and not target[0] and not target[-1]


def test_parameters_that_require_gradients_are_taken_as_memory(lane):
    parameter = torch.nn.Parameter(torch.ones(8))
    lane.update("adam", parameter, (torch.zeros(8), torch.zeros(8)), torch.ones(8), None, [SEGMENT]).wait()
    assert parameter.requires_grad and parameter.is_leaf and parameter.detach().lt(1).all()


def test_jobs_keep_their_tensors_alive_and_then_let_go(backend, lane):
    """Everything is dropped by Python right after the submit; nothing is held once the event was waited for."""
    gate = backend.Event.manual()
    target = torch.zeros(1_000_000)
    owner = np.arange(1_000_000, dtype=np.float32)
    alive = weakref.ref(owner)
    event = lane.copy([target], [torch.from_numpy(owner)], after=[gate])
    del owner
    gc.collect()
    filler = [torch.full((1_000_000,), 7.0) for _ in range(4)]  # would take the freed memory
    assert alive() is not None
    gate.signal(1, 2)
    event.wait()
    assert torch.equal(target, torch.arange(1_000_000, dtype=torch.float32)) and len(filler) == 4
    gc.collect()
    assert alive() is None


def test_a_refused_job_holds_nothing(lane):
    owner = np.zeros(8, np.float32)
    alive = weakref.ref(owner)
    with pytest.raises(KernelError):
        lane.copy([torch.from_numpy(owner)], [torch.zeros(9)])
    del owner
    gc.collect()
    assert alive() is None
