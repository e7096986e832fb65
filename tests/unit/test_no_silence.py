"""What would have gone wrong without a word: it works, or it raises with the name and the remedy."""

from __future__ import annotations

import copy
import gc
import json
import os
import signal
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload_engine as oe


def wrapped(**config: Any) -> tuple[nn.Sequential, torch.optim.AdamW, oe.OffloadEngine]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, oe.OffloadEngine(model, optimizer, oe.EngineConfig(device="emulated", **config))


def backward(engine: oe.OffloadEngine, seed: int = 0) -> None:
    data = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
    engine.backward(engine(data).float().square().sum())


# torch's own clipping.


@pytest.mark.parametrize("config", [{"precision": "fp16"}, {"gradients": "release"}], ids=str)
@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"])
def test_torch_clipping_that_would_do_nothing_is_refused(config: dict[str, Any], name: str) -> None:
    from torch.nn.utils import clip_grad_norm_ as imported_before

    model, _, engine = wrapped(**config)
    other = nn.Linear(2, 2)
    with engine:
        backward(engine)
        clip: Any = imported_before if name == "clip_grad_norm_" else getattr(torch.nn.utils, name)
        extra = (torch.tensor(3.0),) if name == "clip_grads_with_norm_" else ()
        with pytest.raises(
            oe.UnsupportedError, match=r"parameter '0.weight' of an engine: (in fp16|with grad)"
        ):
            clip(model.parameters(), 1.0, *extra)
        other(torch.ones(1, 2)).sum().backward()
        clip(other.parameters(), 0.1, *extra)  # another model's go on as ever
        assert other.weight.grad is not None and other.weight.grad.abs().max() <= 0.1
    again = copy.deepcopy(model).float()
    model.float()
    again(torch.ones(2, 8)).sum().backward()
    clip(again.parameters(), 1.0, *extra)
    model.load_state_dict(again.state_dict())
    model(torch.ones(2, 8)).sum().backward()
    clip(model.parameters(), 1.0, *extra)  # a closed engine has no say
    assert torch.nn.utils.clip_grad._clip_grads_with_norm_.__module__ == "torch.nn.utils.clip_grad"
    assert "asked" not in torch.nn.utils.clip_grad._clip_grads_with_norm_.__code__.co_name


def test_a_function_that_was_imported_before_is_refused_too() -> None:
    from torch.nn.utils import clip_grad_value_, get_total_norm

    model, _, engine = wrapped(precision="fp16")
    with engine:
        backward(engine)
        with pytest.raises(oe.UnsupportedError, match="in fp16 the gradients"):
            clip_grad_value_(model.parameters(), 1.0)
        with pytest.raises(oe.UnsupportedError, match="in fp16 the gradients"):
            get_total_norm([param.grad for param in model.parameters() if param.grad is not None])


def test_a_dropped_engine_leaves_torch_its_functions() -> None:
    before = torch.nn.utils.clip_grad._clip_grads_with_norm_
    model, optimizer, engine = wrapped(precision="fp16")
    assert torch.nn.utils.clip_grad._clip_grads_with_norm_ is not before
    del model, optimizer, engine
    gc.collect()
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    nn.utils.clip_grad_norm_(other.parameters(), 0.1)  # whoever comes next puts them back
    assert torch.nn.utils.clip_grad._clip_grads_with_norm_ is before


# Copies and changes.


def test_an_optimizer_that_acts_on_an_engine_is_not_copied() -> None:
    _, optimizer, engine = wrapped()
    with engine:
        for each in (optimizer, engine.optimizer):
            with pytest.raises(oe.StateError, match="cannot be copied. Copy optimizer.state_dict"):
                copy.deepcopy(each)
    assert copy.deepcopy(optimizer).param_groups[0]["lr"] == 1e-2  # closed: a plain one again


@pytest.mark.parametrize("key", ["moments_layout", "master_layout"])
def test_a_layout_set_after_wrapping_is_refused(key: str) -> None:
    _, optimizer, engine = wrapped()
    with engine:
        backward(engine)
        optimizer.param_groups[0][key] = "int8" if key == "moments_layout" else "split"
        with pytest.raises(
            oe.UnsupportedError, match=rf"param group 0 has {key} = .* at wrapping it was 'not set'"
        ):
            engine.step()
        assert engine.steps == 0
        del optimizer.param_groups[0][key]
        engine.step()
        assert engine.steps == 1


def test_a_module_in_the_place_of_another_is_told() -> None:
    model, _, engine = wrapped()
    model[0] = nn.Linear(8, 16)
    with (
        engine,
        pytest.raises(oe.StateError, match=r"'0.weight' \(shape \(16, 8\)\) took the place of another"),
    ):
        backward(engine)


@pytest.mark.parametrize("bad", [{"lookahead_bytes": -5}, {"speculation_bytes": -1}], ids=str)
def test_a_plan_with_negative_bytes_is_refused(bad: dict[str, int]) -> None:
    _, _, engine = wrapped()
    (name, value), before = *bad.items(), engine.plan
    with engine:
        with pytest.raises(oe.ConfigError, match=f"{name} is {value}"):
            engine.change_plan(oe.StepPlan(**bad))  # type: ignore[arg-type]
        assert engine.plan is before


def test_sums_on_the_device_of_gradients_that_are_released_are_refused() -> None:
    with pytest.raises(oe.ConfigError, match="accumulation = 'device', but gradients = 'release'"):
        wrapped(gradients="release", accumulation="device")


# Hooks.


def test_a_hook_registered_after_wrapping_finds_the_gradient() -> None:
    model, _, engine = wrapped()
    seen = []

    def hook(param: torch.Tensor) -> None:
        assert param.grad is not None
        seen.append(param.grad.norm().item())
        param.grad.mul_(0.5)

    with engine:
        for _ in range(2):  # the second time between two backwards
            model[0].weight.register_post_accumulate_grad_hook(hook)
            engine.zero_grad()
            backward(engine)
        assert model[0].weight.grad is not None
        assert len(seen) == 3
        assert seen[2] == pytest.approx(seen[1] / 2)
        assert model[0].weight.grad.norm().item() == pytest.approx(seen[1] / 4)


def test_a_hook_that_would_find_a_part_of_the_sum_is_refused() -> None:
    model, _, engine = wrapped()
    with engine:
        backward(engine)
        model[0].weight.register_post_accumulate_grad_hook(lambda param: None)
        with pytest.raises(
            oe.UnsupportedError, match=r"'0.weight' has a post-accumulate hook of yours and a gradient"
        ):
            backward(engine)
        engine.zero_grad()
        backward(engine)
        engine.step()
        assert engine.steps == 1


# The budget.


def test_a_backward_that_reads_no_device_memory_costs_none() -> None:
    _, _, engine = wrapped(device_memory="64KiB")
    with engine:
        backward(engine)
        engine.step()
        peak = engine.device_peak_bytes
        other = nn.Linear(512, 512)  # 1 MiB
        other(torch.randn(9, 512)).square().sum().backward()
        assert engine.device_peak_bytes == peak


# Checkpoints.


def _scale(facts: dict[str, Any]) -> None:
    facts["loss_scale"]["scale"] = "much"


def _steps(facts: dict[str, Any]) -> None:
    facts["steps"] = "three"


@pytest.mark.parametrize(
    ("damage", "words"), [(_scale, "loss scale .* damaged"), (_steps, "'three' for the number")]
)
def test_damaged_facts_change_nothing(damage: Any, words: str, tmp_path: Path) -> None:
    model, _, engine = wrapped(precision="fp16")
    with engine:
        engine.save(tmp_path / "c")
        backward(engine)
        engine.step()
        scale = engine.loss_scale
        path = tmp_path / "c" / "engine.json"
        described = json.loads(path.read_text())
        damage(described["facts"])
        path.write_text(json.dumps(described))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(oe.CheckpointError, match=words):
            engine.load(tmp_path / "c")
        assert engine.loss_scale == scale
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_damaged_generator_changes_nothing(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model, _, engine = wrapped()
    with engine:
        engine.save(tmp_path / "c")
        backward(engine)
        engine.step()
        (file,) = [f for f in (tmp_path / "c").glob("*.safetensors") if "gener" in f.name or "rng" in f.name]
        save_file({"cpu": torch.zeros(7, dtype=torch.uint8)}, file)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(oe.CheckpointError, match="state of the random generator 'cpu' is torch.uint8"):
            engine.load(tmp_path / "c")
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_bit_that_has_flipped_changes_nothing(name: str, tmp_path: Path) -> None:
    model, _, engine = wrapped()
    with engine:
        backward(engine)
        engine.step()
        engine.save(tmp_path / "c")
        engine.step()
        content = bytearray((tmp_path / "c" / name).read_bytes())
        content[-10] ^= 1
        (tmp_path / "c" / name).write_bytes(content)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(oe.CheckpointError, match=r"the bytes of '.*' are not those that were written"):
            engine.load(tmp_path / "c")
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "damage",
    [{"facts": []}, {"param_groups": [3]}, {"parameters": {"0.weight": 1}}, {"checksums": [1]}],
    ids=str,
)
def test_json_of_another_shape_is_told_as_damage(damage: dict[str, Any], tmp_path: Path) -> None:
    _, _, engine = wrapped()
    with engine:
        engine.save(tmp_path / "c")
        path = tmp_path / "c" / "engine.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | damage))
        with pytest.raises(oe.CheckpointError, match="damaged"):
            engine.load(tmp_path / "c")


# Forks.


@pytest.mark.timeout(60)
def test_a_forked_child_does_not_wait_for_threads_it_has_not_got() -> None:
    """The lane is busy with a job that waits for an event; the child, which has no such thread, must not."""
    from offload_engine import kernels

    event = kernels.load("native", "auto").Event.manual()
    child = os.fork()
    if child == 0:
        try:
            event.wait()
        except oe.KernelError as error:
            os._exit(0 if "this process was forked" in str(error) else 2)
        os._exit(1)
    end = time.monotonic() + 20
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid or time.monotonic() > end:
            break
        time.sleep(0.05)
    if not pid:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert pid and os.waitstatus_to_exitcode(status) == 0


def test_a_time_that_is_no_number_is_refused() -> None:
    from offload_engine import kernels

    with pytest.raises(ValueError, match="not a number"):
        kernels.load("native", "auto").Event.manual().wait(float("nan"))


# Ends.


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"activations": "offload", "activation_modules": ("1",)},
        {"memory_ledger": False},
        {"update_timing": "during_backward"},
    ],
    ids=str,
)
def test_an_engine_that_nobody_names_any_more_goes_with_its_memory(config: dict[str, Any]) -> None:
    """As a notebook's cell that is run again drops the last one, without close()."""
    modes = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    model, optimizer, engine = wrapped(**config)
    backward(engine)
    engine.step()
    slabs = [
        weakref.ref(slab.untyped_storage()) for bucket in engine._buckets for slab in bucket.slabs.values()
    ]
    alive = weakref.ref(engine)
    del engine
    gc.collect()
    assert alive() is not None  # its model and optimizer still act on it
    del model, optimizer
    gc.collect()
    assert alive() is None
    assert all(slab() is None for slab in slabs)
    assert torch.ones(2).sum() == 2
    with wrapped(memory_ledger=False)[2]:
        pass  # a new one takes what the old one left in the stacks away
    assert (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()) == modes


# Compiled blocks.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        y = torch.tanh(self.up(x))
        if fail:
            raise ValueError("as asked")
        return x + self.down(y)


@pytest.mark.parametrize("how", ["torch.compile", "compile()"])
def test_a_block_compiled_before_wrapping_stays_one_graph(how: str) -> None:
    graphs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    block: Any = Block()
    if how == "torch.compile":
        block = torch.compile(block, backend=backend)
    else:
        block.compile(backend=backend)
    model = nn.Sequential(nn.Linear(8, 8), block, nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = oe.EngineConfig(device="emulated", memory_ledger=False, bucket_bytes=1)
    with oe.OffloadEngine(model, optimizer, config) as engine:
        modes = torch._C._len_torch_function_stack()
        for seed in range(3):
            backward(engine, seed)
            engine.step()
            engine.zero_grad()
        assert len(graphs) == 1
        with pytest.raises(ValueError, match="as asked"):
            block(torch.ones(2, 8), True)
        assert torch._C._len_torch_function_stack() == modes
        assert engine.steps == 3


def test_compiling_that_the_ledger_prevents_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="offload_engine")
    model = nn.Sequential(nn.Linear(8, 8), torch.compile(Block(), backend="eager"))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters())
    with oe.OffloadEngine(model, optimizer, oe.EngineConfig(device="emulated")) as engine:
        backward(engine)
    assert "torch.compile: off (the emulated device's memory ledger" in caplog.text
