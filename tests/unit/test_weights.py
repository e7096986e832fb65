"""A model built on the meta device gets its values from files or a mapping, and is then as if it had been loaded."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import offload_engine as oe
from offload_engine.checkpoint.weights import open_weights


def make() -> nn.Sequential:
    """Tied weights, buffers that are saved, and one in bf16."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(20, 16), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 20, bias=False)
    )
    model[3].weight = model[0].weight
    model[1].bias = nn.Parameter(model[1].bias.detach().bfloat16())
    model[0].weight.tag = "kept"  # type: ignore[union-attr]
    return model


def on_meta() -> nn.Sequential:
    with oe.parameters_on_meta():
        return make()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    del state["3.weight"]  # tied: files hold it once
    return state


def train(model: nn.Sequential, weights: Any = None, **config: Any) -> tuple[list[float], dict[str, Any]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = [id(param) for param in model.parameters()]
    with oe.OffloadEngine(
        model, optimizer, oe.EngineConfig(device="emulated", **config), weights=weights
    ) as engine:
        assert [id(param) for param in model.parameters()] == before
        assert model[0].weight.tag == "kept"  # type: ignore[comparison-overlap]
        losses = []
        for step in range(5):
            ids = torch.arange(8) + step
            loss = nn.functional.cross_entropy(engine(ids).float(), ids * 3 % 20)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
            engine.zero_grad()
    return losses, values(model)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two files and an index, as save_pretrained writes them."""
    state = values(make())
    names = sorted(state)
    parts = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, mine in parts.items():
        save_file({name: state[name] for name in mine}, tmp_path / file)
    weight_map = {name: file for file, mine in parts.items() for name in mine}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def _folder(shards: Path) -> Any:
    return shards


def _one_file(shards: Path) -> Any:
    save_file(values(make()), shards / "one.safetensors")
    return str(shards / "one.safetensors")


def _mapping(shards: Path) -> Any:
    return values(make())


@pytest.mark.parametrize("source", [_folder, _one_file, _mapping])
@pytest.mark.parametrize("master", ["fp32", "split"])
def test_trains_as_a_model_that_was_loaded(shards: Path, source: Callable[[Path], Any], master: str) -> None:
    config: dict[str, Any] = {} if master == "fp32" else {"precision": "bf16", "master_layout": master}
    model = make()
    model.load_state_dict(values(make()), strict=False)
    losses, state = train(model, **config)
    for build in (on_meta, _all_on_meta):
        again, their_state = train(build(), source(shards), **config)
        assert again == losses
        assert all(torch.equal(state[name], their_state[name]) for name in state)


def _all_on_meta() -> nn.Sequential:
    with torch.device("meta"):
        return make()


def test_ties_made_by_one_object_hold_and_freed_ids_make_none() -> None:
    with oe.parameters_on_meta():
        layers = [nn.Linear(3, 3) for _ in range(50)]
        shared = nn.Parameter(torch.zeros(2))
        holders = [nn.Module(), nn.Module()]
        for holder in holders:
            holder.weight = shared
    weights = [layer.weight for layer in layers]
    assert len({id(weight) for weight in weights}) == 50
    assert all(weight.is_meta for weight in weights)
    assert holders[0].weight is holders[1].weight
    assert not nn.Linear(2, 2).weight.is_meta


class OneAtATime(Mapping[str, torch.Tensor]):
    """Counts how many of its tensors are alive when another is asked for."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state
        self.alive: list[Any] = []
        self.most = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        import weakref

        self.alive = [ref for ref in self.alive if ref() is not None]
        value = self.state[name].clone()
        self.alive.append(weakref.ref(value))
        self.most = max(self.most, len(self.alive))
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


def test_one_tensor_is_held_at_a_time() -> None:
    weights = OneAtATime(values(make()))
    train(_all_on_meta(), weights)
    assert weights.most <= 2  # the next may be made before the last one is let go of


def _without(name: str) -> dict[str, torch.Tensor]:
    state = values(make())
    del state[name]
    return state


def _damaged(tmp: Path) -> Path:
    file = tmp / "cut.safetensors"
    save_file(values(make()), file)
    file.write_bytes(file.read_bytes()[:-40])
    return file


BAD: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "no weights": (lambda tmp: None, oe.UnsupportedError, r"'0.weight' is on the meta device.*weights="),
    "missing": (lambda tmp: _without("1.weight"), oe.StateError, r"lack '1.weight', which the model has"),
    "missing buffer": (
        lambda tmp: _without("2.running_mean"),
        oe.StateError,
        r"no values for the buffers '2.running_mean'.*parameters_on_meta",
    ),
    "shape": (
        lambda tmp: values(make()) | {"1.weight": torch.zeros(3)},
        oe.CheckpointError,
        r"'1.weight' with shape \(3,\), the model with \(16, 16\)",
    ),
    "no source": (lambda tmp: 5, oe.ConfigError, r"weights is a int"),
    "no tensors": (
        lambda tmp: values(make()) | {"1.weight": [1.0]},
        oe.CheckpointError,
        r"'1.weight' as a list; a tensor is needed",
    ),
    "no files": (lambda tmp: tmp, oe.CheckpointError, r"has no \*\.safetensors file"),
    "cut": (_damaged, oe.CheckpointError, r"cut\.safetensors' is damaged"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_weights_change_nothing(tmp_path: Path, case: str) -> None:
    source, kind, words = BAD[case]
    model = _all_on_meta()
    held = {name: id(each) for name, each in [*model.named_parameters(), *model.named_buffers()]}
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(kind, match=words):
        oe.OffloadEngine(model, optimizer, oe.EngineConfig(device="emulated"), weights=source(tmp_path))
    assert {name: id(each) for name, each in [*model.named_parameters(), *model.named_buffers()]} == held
    assert all(param.is_meta for param in model.parameters())
    train(model, values(make()))  # and it can be wrapped with the right ones


def test_a_missing_shard_is_named(shards: Path) -> None:
    (shards / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(oe.CheckpointError, match="not there: 'model-00002-of-00002.safetensors'"):
        open_weights(shards)


def test_weights_without_a_place_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="offload_engine")
    train(on_meta(), values(make()) | {"head.weight": torch.zeros(2)})
    assert "no place for these weights, which are not read: 'head.weight'" in caplog.text


def test_hooks_on_parameters_without_values_are_refused() -> None:
    model = on_meta()
    model[1].weight.register_hook(lambda grad: grad)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(oe.UnsupportedError, match="'1.weight' is on the meta device and has hooks"):
        oe.OffloadEngine(model, optimizer, oe.EngineConfig(device="emulated"), weights=values(make()))


def test_saved_buffers_are_read_where_the_model_has_its_own() -> None:
    """As load_state_dict does: running statistics of a trained model are part of it."""
    state = values(make()) | {"2.running_mean": torch.full((16,), 3.0)}
    model = on_meta()
    assert not model[2].running_mean.is_meta
    train(model, state)
    with pytest.raises(oe.CheckpointError, match="cut"):
        oe.OffloadEngine(
            fresh := on_meta(),
            torch.optim.AdamW(fresh.parameters()),
            oe.EngineConfig(device="emulated"),
            weights=Torn(state),
        )
    assert torch.equal(fresh[2].running_mean, torch.zeros(16))  # as it was
    reference = make()
    reference.load_state_dict(state, strict=False)
    assert train(on_meta(), state)[0] == train(reference)[0]


class Torn(dict[str, torch.Tensor]):
    """Weights of which the last parameter cannot be read."""

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == "1.weight":
            raise oe.CheckpointError("cut")
        return super().__getitem__(name)


def test_weights_of_parameters_that_have_values_are_not_read_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("WARNING", logger="offload_engine")
    model = on_meta()
    model[1] = nn.Linear(16, 16)  # a head of one's own, say
    bias = model[1].bias.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters())
    with oe.OffloadEngine(model, optimizer, oe.EngineConfig(device="emulated"), weights=values(make())):
        assert torch.equal(model[1].bias, bias)
    assert "left as they are, though the weights have them: '1.weight', '1.bias'" in caplog.text


def test_a_parameter_that_is_held_beside_its_module_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="offload_engine")

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight = nn.Parameter(torch.zeros(3, 4))
            self.also = [weight]

    with oe.parameters_on_meta():
        kept = Holder()
    assert not kept.also[0].is_meta
    assert (
        "1 parameters made under parameters_on_meta() (shapes (3, 4)) are held by something beside"
        in caplog.text
    )
    caplog.clear()
    on_meta()
    assert caplog.text == ""


PEAK = """
    import gc, json, re, sys, torch
    from torch import nn
    import offload_engine as oe

    def memory(key):
        return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

    with oe.parameters_on_meta():
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(40)))
    optimizer = torch.optim.AdamW(model.parameters())
    config = oe.EngineConfig(device="emulated", bucket_bytes="8MiB")
    open("/proc/self/clear_refs", "w").write("5")  # the peak so far is forgotten
    engine = oe.OffloadEngine(model, optimizer, config, weights=sys.argv[1])
    gc.collect()
    peak, final = memory("VmHWM"), memory("VmRSS")
    print(json.dumps({"peak": peak, "final": final, "states": engine.model_state_bytes}))
"""


@pytest.mark.timeout(120)
def test_the_peak_while_loading_is_one_bucket_above_the_end(tmp_path: Path) -> None:
    """160 MiB of weights: their file is read through a mapping whose pages count until they are let go of."""
    save_file({f"{i}.weight": torch.randn(1024, 1024) for i in range(40)}, tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PEAK), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["final"] > 40 * 2**22
    assert facts["peak"] - facts["final"] <= 8 * 2**20, facts
