"""Memory: budgets hold at every moment, levels return after every step, and nothing is left after close."""

from __future__ import annotations

import gc
import io
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload_engine as oe
from offload_engine.host.process import rss_bytes
from tests.parity.cases import BY_NAME, Adapted, mlp
from tests.parity.harness import (
    SMALL,
    Net,
    adamw,
    data,
    one_compute_thread,
    open_engine,
    smallest_budget,
)

__all__ = ["one_compute_thread"]

MIB = 2**20


def native_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def train(engine: oe.OffloadEngine, steps: int, *, rows: int = 5, first: int = 0) -> list[int]:
    levels = []
    for step in range(first, first + steps):
        loss = engine(data(step, 0, rows, 15)).float().square().mean()
        engine.backward(loss)
        engine.step()
        engine.zero_grad()
        del loss
        levels.append(engine.device_bytes)
    return levels


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["mlp", "checkpointed mixed", "adapters", "convolutions", "branches"])
def test_fifty_steps(name: str, precision: str) -> None:
    """Device bytes are back at one level after every step, the peak is within the budget, the host does not grow."""
    case = BY_NAME[name]
    if precision == "bf16" and name == "checkpointed mixed":
        name = "checkpointed"
    budget = smallest_budget(case, None, precision)
    config = oe.EngineConfig(**{**SMALL, "timeline": True}, precision=precision, device_memory=budget)
    torch.manual_seed(3)
    net = Net(case.build(), adamw, config, precision, True)
    levels, host = [], []
    for step in range(50):
        loss = case.loss(net, step, 0)
        net.backward(loss)
        net.step()
        net.optimizer.zero_grad(set_to_none=step % 2 == 0)
        del loss
        levels.append(net.engine.device_bytes)
        host.append(rss_bytes())
        assert net.engine.device_peak_bytes <= budget
    assert set(levels[1:]) == {levels[1]}, levels
    buffers = sum(b.untyped_storage().nbytes() for b in net.model.buffers())
    assert levels[1] == buffers
    assert host[-1] - host[10] < 4 * MIB, (
        f"the host grew by {(host[-1] - host[10]) / MIB:.1f} MiB in 40 steps"
    )
    net.close()


def test_after_evaluation_everything_is_as_before() -> None:
    """U07: three times three training steps, an evaluation of two batches, on one level; nothing is on its way."""
    with open_engine(mlp(), device_memory="64KiB") as engine:
        train(engine, 1)
        before = engine.device_bytes
        for turn in range(3):
            train(engine, 3, first=10 * turn)
            engine.eval()
            with torch.no_grad():
                for micro in range(2):
                    engine(data(turn, micro, 5, 15))
            engine.train()
            assert engine.device_bytes == before == 0
            assert all(b.residency.value == "host" and b.transfer is None for b in engine._buckets)


def test_first_layer_leaves_after_backward() -> None:
    """U13: no input needs a gradient, neither tokens nor floats; the first layer's gradient is on the host."""
    tokens = nn.Sequential(nn.Embedding(101, 15), nn.Linear(15, 33), nn.Linear(33, 1))
    for model, x in ((tokens, torch.arange(7)), (mlp(), data(0, 0, 5, 15))):
        with open_engine(model) as engine:
            levels = []
            for _ in range(5):
                engine.zero_grad()
                engine.backward(engine(x).square().mean())
                assert all(bucket.residency.value == "host" for bucket in engine._buckets)
                first = next(model.parameters())
                assert (
                    first.grad is not None
                    and first.grad.untyped_storage() is engine._buckets[0].grad.untyped_storage()
                )
                levels.append(engine.device_bytes)
                engine.step()
            assert levels[1] == levels[4] == 0


def test_activations_count() -> None:
    """What autograd saves is device memory until it is freed; what checkpointing does not save is not."""
    wide = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Tanh(), nn.Tanh()) for _ in range(4)]

    class Deep(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            self.blocks, self.checkpointed = nn.ModuleList(wide), checkpointed

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            return x

    levels = {}
    for checkpointed in (False, True):
        with open_engine(Deep(checkpointed), keep_resident=True) as engine:
            x = torch.randn(100, 64)
            loss = engine(x).sum()
            weights = sum(bucket.nbytes for bucket in engine._buckets)
            levels[checkpointed] = (engine.device_bytes - weights) / x.nbytes
            engine.backward(loss)
            del loss
            assert engine.device_bytes == weights
    # Each block saves three outputs of tanh, of which the last is the next one's input; checkpointed, its input alone.
    assert levels == {False: pytest.approx(13, abs=0.01), True: pytest.approx(4, abs=0.01)}


def test_a_budget_is_kept_while_copies_lag() -> None:
    """With slow links the gradients on their way count, and compute waits for them rather than exceed the budget."""
    case = BY_NAME["mlp"]
    budget = smallest_budget(case)
    for links in ({"d2h_gbps": 0.01}, {"h2d_gbps": 0.01}):
        torch.manual_seed(3)
        config = oe.EngineConfig(**{**SMALL, "timeline": True}, device_memory=budget, links=links)
        net = Net(case.build(), adamw, config, "fp32", True)
        for step in range(3):
            net.backward(case.loss(net, step, 0))
            net.step()
            net.optimizer.zero_grad()
        assert 0 < net.engine.device_peak_bytes <= budget
        net.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_host_bytes_are_those_of_the_states(precision: str) -> None:
    """U65: 16 bytes a parameter (working copy, gradient, master if it is another, moments), padding within 1%."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    with open_engine(model, precision=precision, bucket_bytes="64KiB") as engine:
        train_rows = torch.randn(3, 256)
        engine.backward(engine(train_rows).float().square().mean())
        engine.step()
        engine.synchronize()
        numel = sum(p.numel() for p in model.parameters())
        assert 16 * numel <= engine.summary()["host_slab_bytes"] <= 1.01 * 16 * numel
        assert engine.model_state_bytes == engine.summary()["host_slab_bytes"]


def test_frozen_parameters_cost_their_working_copy_alone() -> None:
    model = nn.Sequential(*(Adapted(64) for _ in range(3)))
    with open_engine(model) as engine:
        frozen = [bucket for bucket in engine._buckets if not bucket.layout.trainable]
        assert frozen and all(b.grad is b.master is b.exp_avg is b.exp_avg_sq is None for b in frozen)
        assert sum(slab.numel() for b in frozen for slab in b.slabs.values()) == 3 * 4 * (64 * 64 + 64)


def test_slabs_are_exact_and_given_back() -> None:
    """U47: what is asked for is what is taken; it goes with the model and the optimizer that view it."""
    model = nn.Linear(1000, 1001, bias=False)
    with open_engine(model, bucket_bytes="64MiB") as engine:
        padded = -(-1_001_000 // 32) * 32
        budget = engine.host_budget
        assert budget.used_bytes == 16 * padded
    del engine, model
    gc.collect()
    assert budget.used_bytes == 0


def test_close_copies_nothing() -> None:
    """The optimizer goes on with the slabs' memory: a second copy of all states would not fit where they hardly do."""
    model = mlp()
    optimizer = adamw(model)
    with open_engine(model, optimizer) as engine:
        train(engine, 2)
        addresses = {p: engine.optimizer.state[p]["exp_avg"].data_ptr() for p in model.parameters()}
    assert {p: optimizer.state[p]["exp_avg"].data_ptr() for p in model.parameters()} == addresses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_saved_state_dicts_have_the_size_of_the_values(precision: str) -> None:
    """A saved view saves its whole storage: that holds values alone, hardly more than a plain model's."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    with open_engine(model, precision=precision, bucket_bytes="1MiB") as engine:
        engine.backward(engine(torch.randn(3, 64)).float().sum())
        engine.step()
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        values = sum(p.nbytes for p in model.parameters())
        assert values <= len(file.getvalue()) <= 1.05 * values + 4096
        tensors = io.BytesIO(safetensors.torch.save(dict(model.state_dict())))
        assert values <= len(tensors.getvalue()) <= values + 4096


# The end.


def test_nothing_is_left_after_close() -> None:
    def once() -> tuple[Any, ...]:
        model = mlp()
        optimizer = adamw(model)
        engine = oe.OffloadEngine(model, optimizer, oe.EngineConfig(**{**SMALL, "timeline": True}))
        train(engine, 2)
        engine.close()
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
        return tuple(
            weakref.ref(each) for each in (engine, engine.device, engine._buckets[0], model, optimizer)
        )

    once()
    gc.collect()
    threads = native_threads(), threading.active_count()
    references = once()
    gc.collect()
    assert [ref() for ref in references] == [None] * 5
    assert (native_threads(), threading.active_count()) == threads
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0


def test_a_hundred_engines() -> None:
    """Opened and closed in a loop, over one model and over new ones: no thread, slab, hook or mode piles up."""
    model = mlp()
    for turn in range(10):
        with open_engine(model) as engine:
            train(engine, 1, first=turn)
    gc.collect()
    before = native_threads(), rss_bytes()
    for turn in range(45):
        with open_engine(model) as engine:
            train(engine, 1, first=turn)
        with open_engine(mlp(), precision="bf16") as engine:
            train(engine, 1, first=turn)
    gc.collect()
    assert native_threads() <= before[0]
    assert rss_bytes() - before[1] < 8 * MIB
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0


def test_engines_closed_in_any_order_inside_other_modes() -> None:
    """The engine's modes lie below the user's and leave from between them."""
    from torch.overrides import TorchFunctionMode

    class Users(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    first = oe.OffloadEngine(m := mlp(), adamw(m), oe.EngineConfig(**SMALL))
    with Users():
        second = oe.OffloadEngine(m := mlp(), adamw(m), oe.EngineConfig(**SMALL))
        train(first, 1)
        train(second, 1)
        first.close()
        train(second, 1)
    train(second, 1)
    second.close()
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0


def test_summary_has_what_the_run_prints() -> None:
    with open_engine(mlp(), timeline=True, device_memory="64KiB") as engine:
        train(engine, 3)
        facts = engine.summary()
    for key in (
        "steps device_budget_bytes device_peak_bytes model_state_bytes host_peak_bytes bytes_by_lane "
        "busy_share_by_lane exposed_wait_s_by_cause kernel_isa device_kind"
    ).split():
        assert facts[key] is not None, key
    assert facts["steps"] == 3 and 0 < facts["device_peak_bytes"] <= facts["device_budget_bytes"] == 65536
    assert facts["bytes_by_lane"]["h2d"] >= 3 * sum(p.nbytes for p in mlp().parameters())
    assert facts["bytes_by_lane"]["d2h"] >= 3 * sum(p.nbytes for p in mlp().parameters())


def test_bytes_moved_are_counted_once() -> None:
    """Roomy: each bucket is fetched once a step and its gradients leave once."""
    with open_engine(model := mlp(), timeline=True, device_memory="1MiB") as engine:
        train(engine, 5)
        facts = engine.summary()
        assert facts["fetches"] == 5 * facts["buckets"] == facts["evictions"]
        assert facts["bytes_by_lane"]["d2h"] == 5 * sum(p.nbytes for p in model.parameters())
        assert facts["bytes_by_lane"]["h2d"] == 5 * sum(bucket.nbytes for bucket in engine._buckets)


def test_resident_buckets_are_fetched_once_a_step() -> None:
    """Kept after backward, fetched anew after each update and never in between."""
    with open_engine(mlp(), keep_resident=True) as engine:
        for step in range(3):
            for micro in range(4):
                engine.backward(engine(data(step, micro, 5, 15)).square().mean())
            engine.step()
        assert engine.summary()["fetches"] == 3 * len(engine._buckets)
