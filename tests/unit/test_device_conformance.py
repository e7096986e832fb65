"""One suite for both devices: whatever the rooms above rely on.

The accelerator's part runs its own code on CPU stand-ins everywhere, and on the real thing where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from offload_engine import kernels
from offload_engine.device.base import Device
from offload_engine.device.emulated import EmulatedDevice
from offload_engine.errors import DeviceMemoryError, KernelError
from tests.standin import install_accelerator_standin

MIB = 2**20
BUDGET = 64 * MIB


def _open(kind: str) -> Device:
    backend = kernels.load("auto")
    if kind == "accelerator":
        if not torch.accelerator.is_available():
            pytest.skip("no accelerator: torch.accelerator.is_available() is False")
        from offload_engine.device.accelerator import AcceleratorDevice

        return AcceleratorDevice(backend, budget_bytes=BUDGET)
    if kind == "accelerator code on stand-ins":
        from offload_engine.device import accelerator

        return accelerator.AcceleratorDevice(backend, budget_bytes=BUDGET)
    return EmulatedDevice(backend, budget_bytes=BUDGET, ledger=kind == "emulated")


@pytest.fixture(
    params=[
        "emulated",
        "emulated without ledger",
        "accelerator code on stand-ins",
        pytest.param("accelerator", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    if request.param == "accelerator code on stand-ins":
        install_accelerator_standin(monkeypatch)
    device = _open(request.param)
    yield device
    device.close()


def test_budget_is_checked_before_allocation_and_bytes_come_back(device: Device) -> None:
    before = device.free_bytes()
    assert before is not None
    small = device.new_buffer("small", MIB)
    small.allocate()
    assert device.free_bytes() == before - MIB
    large = device.new_buffer("large", BUDGET)
    with pytest.raises(DeviceMemoryError, match="large.*64.0 MiB wanted"):
        large.allocate()
    assert not large.allocated
    small.free()
    small.free()
    assert device.free_bytes() == before


def test_the_pressure_handler_can_make_room(device: Device) -> None:
    hog = device.new_buffer("hog", BUDGET // 2)
    hog.allocate()
    asked: list[int] = []

    def relieve(missing: int) -> None:
        asked.append(missing)
        hog.free()

    device.set_pressure_handler(relieve)
    wanted = device.new_buffer("wanted", BUDGET // 4 * 3)
    wanted.allocate()
    assert asked and asked[0] > 0
    assert wanted.allocated and not hog.allocated
    wanted.free()
    assert device.peak_bytes() <= BUDGET


@pytest.mark.parametrize("numel", [1, 17, 4097, 300_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip_keeps_every_bit(device: Device, numel: int, dtype: torch.dtype) -> None:
    source = torch.randn(numel).to(dtype)
    buffer = device.new_buffer("b", numel * dtype.itemsize)
    buffer.allocate()
    there = buffer.view(dtype, 0, (numel,), (1,))
    up = device.start_h2d(there, source, "b")
    device.wait_compute(up)
    doubled = there * 2
    back = torch.empty_like(source)
    down = device.start_d2h([(back, doubled)], "b")
    down.wait()
    assert torch.equal(back, source * 2)
    assert up.nbytes == down.nbytes == numel * dtype.itemsize
    assert 0 < down.event.start_ns <= down.event.end_ns
    up.wait()
    assert up.event.end_ns <= down.event.end_ns


def test_views_stay_valid_when_a_buffer_is_freed_and_filled_again(device: Device) -> None:
    before = device.used_bytes()
    buffer = device.new_buffer("b", 4 * 64)
    buffer.allocate()
    flat = buffer.view(torch.float32, 0, (64,), (1,))
    matrix = buffer.view(torch.float32, 4, (3, 5), (5, 1))
    for value in (1.0, 2.0):
        buffer.allocate()
        device.wait_compute(device.start_h2d(flat, torch.full((64,), value), "b"))
        assert matrix.cpu().eq(value).all()
        assert device.used_bytes() >= before + 4 * 64
        buffer.free()
        assert device.used_bytes() == before


def test_a_copy_comes_after_the_events_it_names(device: Device) -> None:
    backend = kernels.load("auto")
    gate = backend.Event.manual()
    source = torch.zeros(1000)
    buffer = device.new_buffer("b", 4000)
    buffer.allocate()
    there = buffer.view(torch.float32, 0, (1000,), (1,))
    transfer = device.start_h2d(there, source, "b", [gate])
    assert not transfer.event.wait(0.05)
    source.fill_(3.0)
    gate.signal(1, 2)
    device.wait_compute(transfer)
    assert there.cpu().eq(3.0).all()


def test_a_copy_after_a_failed_event_fails_and_says_so(device: Device) -> None:
    gate = kernels.load("auto").Event.manual()
    buffer = device.new_buffer("b", 4)
    buffer.allocate()
    transfer = device.start_h2d(buffer.view(torch.float32, 0, (1,), (1,)), torch.zeros(1), "b", [gate])
    gate.fail("the update broke")
    with pytest.raises(KernelError, match="the update broke"):
        transfer.wait()
    with pytest.raises(KernelError):
        device.wait_compute(transfer)


def test_copies_of_one_lane_run_in_order(device: Device) -> None:
    target = torch.empty(1000)
    there = [torch.full((1000,), float(i), device=device.torch_device) for i in range(20)]
    transfers = [device.start_d2h([(target, each)], str(i)) for i, each in enumerate(there)]
    for transfer in transfers:
        transfer.wait()
    assert target.eq(19.0).all()
    ends = [transfer.event.end_ns for transfer in transfers]
    assert ends == sorted(ends)


def test_marks_follow_the_order_of_compute(device: Device) -> None:
    first = device.mark()
    (
        torch.randn(256, 256, device=device.torch_device) @ torch.randn(256, 256, device=device.torch_device)
    ).sum()
    second = device.mark()
    device.synchronize()
    start_ns, end_ns = first.time_ns(), second.time_ns()
    assert start_ns is not None and end_ns is not None and 0 < start_ns <= end_ns


def test_inputs_arrive_with_gradient_and_value(device: Device) -> None:
    x = torch.randn(5, requires_grad=True)
    moved = device.to_device(x)
    assert moved.device.type == device.torch_device.type
    (moved * 3).sum().backward()
    assert x.grad is not None and x.grad.eq(3).all()


def test_close_is_idempotent(device: Device) -> None:
    device.close()
    device.close()


# What only the emulated device promises.


@pytest.fixture
def emulated() -> Iterator[EmulatedDevice]:
    device = EmulatedDevice(kernels.load("auto"), budget_bytes=BUDGET)
    yield device
    device.close()


def test_the_ledger_counts_outputs_and_what_autograd_saves(emulated: EmulatedDevice) -> None:
    weight = torch.nn.Parameter(torch.randn(512, 512))
    x = torch.randn(256, 512)
    emulated.enter_compute()
    hidden = x @ weight  # 0.5 MiB
    assert emulated.used_bytes() == MIB // 2
    out = hidden.exp()  # saves its output: 0.5 MiB more
    del hidden
    assert emulated.used_bytes() == MIB // 2
    loss = (out * out).sum()
    del out
    assert emulated.used_bytes() == MIB // 2 + 4, "exp's output is saved for backward, the product is gone"
    emulated.exit_compute()
    loss.backward()
    del loss
    assert weight.grad is not None
    assert emulated.used_bytes() == MIB, "the gradient is all that is left"
    weight.grad = None
    assert emulated.used_bytes() == 0
    assert emulated.peak_bytes() <= BUDGET


def test_host_work_between_steps_is_not_counted_but_its_use_of_device_values_is(
    emulated: EmulatedDevice,
) -> None:
    batch = torch.randn(1000)
    batch = batch * 2 + torch.zeros(1000)
    assert emulated.used_bytes() == 0
    moved = emulated.to_device(batch)
    assert emulated.used_bytes() == 4000
    doubled = moved * 2
    assert emulated.used_bytes() == 8000
    view = doubled.view(10, 100)[2:4]
    assert emulated.used_bytes() == 8000
    del moved, doubled
    assert emulated.used_bytes() == 4000, "a view keeps the whole storage"
    del view
    assert emulated.used_bytes() == 0


def test_growing_and_shrinking_a_storage_is_followed(emulated: EmulatedDevice) -> None:
    moved = emulated.to_device(torch.randn(100))
    moved.resize_(1000)
    assert emulated.used_bytes() == 4000
    del moved
    assert emulated.used_bytes() == 0


def test_an_operator_that_does_not_fit_raises_and_leaves_the_count_right(emulated: EmulatedDevice) -> None:
    moved = emulated.to_device(torch.randn(MIB))  # 4 MiB
    with pytest.raises(DeviceMemoryError, match="raise device_memory to at least"):
        moved.repeat(20)
    assert isinstance(DeviceMemoryError("x"), torch.OutOfMemoryError)
    assert emulated.used_bytes() == 4 * MIB
    assert (moved + 1).shape == (MIB,)


def test_links_are_throttled() -> None:
    device = EmulatedDevice(kernels.load("auto"), h2d_gbps=0.5, d2h_gbps=0.1)
    buffer = device.new_buffer("b", 20_000_000)
    buffer.allocate()
    there = buffer.view(torch.float32, 0, (5_000_000,), (1,))
    up = device.start_h2d(there, torch.zeros(5_000_000), "b")
    up.wait()
    down = device.start_d2h([(torch.empty(5_000_000), there)], "b")
    down.wait()
    up_s = (up.event.end_ns - up.event.start_ns) / 1e9
    down_s = (down.event.end_ns - down.event.start_ns) / 1e9
    assert 0.035 < up_s < 0.5
    assert 0.18 < down_s < 1.0
    device.close()


def test_modes_of_the_user_stay_in_their_places() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

    class Users(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    with Users() as mode:
        device = EmulatedDevice(kernels.load("auto"), budget_bytes=BUDGET)
        assert _get_current_dispatch_mode_stack()[-1] is mode
        assert len(_get_current_dispatch_mode_stack()) == 2
    assert len(_get_current_dispatch_mode_stack()) == 1, "the ledger outlives the block it was made in"
    with Users():
        device.close()
        assert len(_get_current_dispatch_mode_stack()) == 1
    assert _get_current_dispatch_mode_stack() == []
