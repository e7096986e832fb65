"""Saving and loading: a run goes on bit for bit, in any layout; what does not fit is refused and changes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload_engine as oe
from tests.parity.cases import BY_NAME, Adapted
from tests.parity.harness import (
    SMALL,
    Case,
    Net,
    Record,
    adamw,
    assert_same_bits,
    data,
    delay,
    one_compute_thread,
    open_engine,
)

__all__ = ["one_compute_thread"]

PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "bf16"])


class Everything(nn.Module):
    """Tied, frozen, partly frozen and unused parameters, dropout, running statistics, buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.adapted = Adapted(16, 3)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.3)
        self.sometimes = nn.Linear(16, 16)
        self.head = nn.Linear(16, 101, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("table", torch.randn(16), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, t: torch.Tensor, use: bool) -> torch.Tensor:
        self.calls += 1
        x = self.adapted(self.frozen(self.embedding(t)) + self.table.to(self.frozen.weight.dtype))
        x = self.dropout(self.norm(x))
        if use:
            x = x + self.sometimes(x)
        return self.head(x) * self.scale


def everything_loss(net: Net, step: int, micro: int) -> torch.Tensor:
    t = torch.randint(101, (6, 2), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(net(t[:, 0], step % 2 == 0).float(), t[:, 1])


EVERYTHING = Case("everything", Everything, everything_loss)


def make(case: Case, seed: int = 3, **config: Any) -> Net:
    torch.manual_seed(seed)
    precision = config.get("precision", "fp32")
    return Net(case.build(), adamw, oe.EngineConfig(**{**SMALL, **config}), precision, True)


def train(net: Net, case: Case, steps: range, micro_batches: int = 1) -> list[float]:
    losses = []
    for step in steps:
        for micro in range(micro_batches):
            loss = case.loss(net, step, micro)
            net.backward(loss)
            losses.append(loss.item())
        net.step()
        net.optimizer.zero_grad()
    return losses


def look(net: Net) -> Record:
    return Record(
        parameters=net.parameters(),
        working={name: p.detach().clone() for name, p in net.model.named_parameters()},
        states=net.states(),
        buffers={name: b.detach().clone() for name, b in net.model.named_buffers() if name != "table"},
        extras=[
            [{k: v for k, v in g.items() if k != "params"} for g in net.optimizer.param_groups],
            net.engine.steps,
        ],
    )


OTHERWISE: dict[str, dict[str, Any]] = {
    "as before": {},
    "one bucket": {"bucket_bytes": "1MiB"},
    "a bucket a module": {"bucket_bytes": 1},
    "small budget": {"device_memory": "32KiB", "bucket_bytes": 512},
    "no ledger, resident": {"memory_ledger": False, "keep_resident": True},
    "serial": {"update_timing": "serial", "isa": "scalar"},
}


@PRECISIONS
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("name", OTHERWISE)
def test_a_resumed_run_goes_on_bit_for_bit(name: str, at: int, precision: str, tmp_path: Path) -> None:
    """U39, U43, U57: save after `at` steps with an update pending; load into a fresh engine before its first step."""
    whole = make(EVERYTHING, precision=precision)
    torch.manual_seed(11)
    train(whole, EVERYTHING, range(at))
    if at:
        delay(whole.engine, "update", 0.02, 0.02)
        expected_first = train(whole, EVERYTHING, range(at, at + 1))
        delay(whole.engine, "update", 0.0, 0.0)
    whole.engine.save(tmp_path / "c", extra={"at": at, "words": ["a", "b"]})
    saved = look(whole)
    rest = train(whole, EVERYTHING, range(at + 1, at + 4))
    end = look(whole)
    whole.close()

    other = make(EVERYTHING, seed=77, precision=precision, **OTHERWISE[name])
    with torch.no_grad():
        other.model.table.copy_(whole.model.table)  # not persistent: rebuilt by who builds the model
    assert other.engine.load(tmp_path / "c") == {"at": at, "words": ["a", "b"]}
    loaded = look(other)
    assert_same_bits(loaded, saved)
    if at:
        assert any(state["exp_avg"].any() for state in loaded.states.values())
        assert expected_first
    assert train(other, EVERYTHING, range(at + 1, at + 4)) == rest
    assert_same_bits(look(other), end)
    assert other.model.head.weight is other.model.embedding.weight
    other.close()


@PRECISIONS
def test_loading_into_an_engine_that_has_trained(precision: str, tmp_path: Path) -> None:
    """Back to an earlier step in the middle of a run, with an update pending and gradients lying about."""
    net = make(EVERYTHING, precision=precision, keep_resident=True)
    torch.manual_seed(11)
    train(net, EVERYTHING, range(2))
    net.engine.save(tmp_path / "c")
    first = train(net, EVERYTHING, range(2, 5), micro_batches=2)
    delay(net.engine, "update", 0.02, 0.02)
    train(net, EVERYTHING, range(5, 6))
    net.backward(EVERYTHING.loss(net, 9, 0))
    net.engine.load(tmp_path / "c")
    assert all(p.grad is None for p in net.model.parameters())
    delay(net.engine, "update", 0.0, 0.0)
    assert train(net, EVERYTHING, range(2, 5), micro_batches=2) == first
    net.close()


def test_precisions_may_be_changed(tmp_path: Path) -> None:
    """Masters are fp32 in both, so a bf16 run can go on in fp32 and the other way round."""
    nets = {precision: make(BY_NAME["mlp"], precision=precision) for precision in ("fp32", "bf16")}
    for one, other in (("fp32", "bf16"), ("bf16", "fp32")):
        train(nets[one], BY_NAME["mlp"], range(2))
        nets[one].engine.save(tmp_path / one)
        nets[other].engine.load(tmp_path / one)
        assert_same_bits(look(nets[one]), look(nets[other]), "parameters", "states")
    for net in nets.values():
        net.close()


def test_files_hold_one_tensor_under_each_global_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    net = make(EVERYTHING, precision="bf16", bucket_bytes="1MiB")
    train(net, EVERYTHING, range(2))
    net.engine.save(tmp_path / "c")
    model = load_file(tmp_path / "c" / "model.safetensors")
    moments = load_file(tmp_path / "c" / "optimizer.safetensors")
    names = dict(net.model.named_parameters())
    buffers = {n for n, _ in net.model.named_buffers()} - {"table"}
    assert model.keys() == names.keys() | buffers
    assert {n for n in moments if n.endswith(".exp_avg")} == {
        f"{n}.exp_avg" for n, p in names.items() if p.requires_grad
    }
    for name, value in net.parameters().items():
        assert torch.equal(model[name], value)
        if names[name].requires_grad:
            assert model[name].dtype is torch.float32
    described = json.loads((tmp_path / "c" / "engine.json").read_text())
    assert described["parameters"]["sometimes.weight"]["step"] == 1 and described["facts"]["steps"] == 2
    net.close()


def test_scheduled_settings_come_back(tmp_path: Path) -> None:
    """The learning rate of a scheduler, a tensor learning rate, betas as a tuple."""

    def groups(model: nn.Module) -> torch.optim.Optimizer:
        p = list(model.parameters())
        return torch.optim.AdamW(
            [{"params": p[:2], "lr": torch.tensor(1e-3)}, {"params": p[2:], "lr": 1e-2, "betas": (0.5, 0.6)}]
        )

    model = BY_NAME["mlp"].build()
    with open_engine(model, groups(model)) as engine:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5)
        for step in range(2):
            engine.backward(engine(data(step, 0, 5, 15)).square().mean())
            engine.step()
            scheduler.step()
        engine.save(tmp_path / "c")
        expected = [(float(g["lr"]), g["betas"]) for g in engine.optimizer.param_groups]
    with open_engine(model, groups(model)) as engine:
        tensor_lr = engine.optimizer.param_groups[0]["lr"]
        engine.load(tmp_path / "c")
        assert [(float(g["lr"]), g["betas"]) for g in engine.optimizer.param_groups] == [
            (pytest.approx(lr), betas) for lr, betas in expected
        ]
        assert engine.optimizer.param_groups[0]["lr"] is tensor_lr, (
            "a captured tensor learning rate stays the tensor"
        )


# Refusals.


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(15, 17), nn.BatchNorm1d(17), nn.Linear(17, 7))


def saved(path: Path) -> Path:
    with open_engine(build()) as engine:
        engine.backward(engine(data(0, 0, 5, 15)).square().mean())
        engine.step()
        engine.save(path)
    return path


def rewrite_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    described = json.loads((path / "engine.json").read_text())
    change(described)
    (path / "engine.json").write_text(json.dumps(described))


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(15, 17), nn.BatchNorm1d(17), nn.Linear(17, 8))


def longer() -> nn.Module:
    return nn.Sequential(*build(), nn.Linear(7, 7))


def without_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(15, 17), nn.BatchNorm1d(17, track_running_stats=False), nn.Linear(17, 7))


def frozen() -> nn.Module:
    model = build()
    model[0].weight.requires_grad_(False)
    return model


OTHER_MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another shape": (wider, r"'2.weight' has shape \(7, 17\), the model \(8, 17\)"),
    "more parameters": (longer, "it lacks '3.bias', '3.weight'"),
    "fewer buffers": (without_statistics, "no place for '1.num_batches_tracked', '1.running_mean'"),
    "frozen since": (frozen, r"no place for '0.weight.exp_avg', '0.weight.exp_avg_sq'"),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_checkpoints_of_other_models(name: str, tmp_path: Path) -> None:
    other, message = OTHER_MODELS[name]
    refused(other(), saved(tmp_path / "c"), message)


def refused(model: nn.Module, path: Path, message: str, **config: Any) -> None:
    net = Net(model, adamw, oe.EngineConfig(**SMALL, **config), "fp32", True)
    net.backward(net(data(1, 0, 5, 15)).square().mean())
    net.step()
    before, generator = look(net), torch.get_rng_state()
    grads = net.gradients()
    with pytest.raises(oe.CheckpointError, match=message):
        net.engine.load(path)
    assert_same_bits(look(net), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(g, grads[n]) for n, g in net.gradients().items() if g is not None)
    net.step()
    net.close()


def test_states_of_another_rule(tmp_path: Path) -> None:
    """Lion's exp_avg is no AdamW state, though it has the name of one; SGD's buffer has another name altogether."""
    for kind, message in (
        (oe.Lion, "updated by lion, the optimizer's are by adam"),
        (torch.optim.SGD, "by sgd"),
    ):
        net = Net(
            build(),
            lambda m, kind=kind: kind(m.parameters(), lr=0.01),
            oe.EngineConfig(**SMALL),
            "fp32",
            True,
        )
        net.backward(net(data(0, 0, 5, 15)).square().mean())
        net.step()
        net.engine.save(tmp_path / kind.__name__)
        net.close()
        refused(build(), tmp_path / kind.__name__, message)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "c"),
    "no model": (lambda p: (p / "model.safetensors").unlink(), "model.safetensors"),
    "no moments": (lambda p: (p / "optimizer.safetensors").unlink(), "optimizer.safetensors"),
    "no generators": (lambda p: (p / "generators.safetensors").unlink(), "generators.safetensors"),
    "no description": (lambda p: (p / "engine.json").unlink(), "engine.json"),
    "half a model": (lambda p: cut(p / "model.safetensors"), "model.safetensors"),
    "half of the moments": (lambda p: cut(p / "optimizer.safetensors"), "optimizer.safetensors"),
    "half of the generators": (lambda p: cut(p / "generators.safetensors"), "generators.safetensors"),
    "no JSON": (lambda p: (p / "engine.json").write_text("{"), "engine.json"),
    "no step": (lambda p: rewrite_json(p, lambda d: d["parameters"]["0.bias"].pop("step")), "0.bias"),
    "a list": (lambda p: (p / "engine.json").write_text("[]"), "engine.json"),
    "no groups": (lambda p: rewrite_json(p, lambda d: d.pop("param_groups")), "engine.json"),
    "no facts": (lambda p: rewrite_json(p, lambda d: d.pop("facts")), "engine.json"),
    "a parameter fewer": (lambda p: rewrite_json(p, lambda d: d["parameters"].pop("2.bias")), "2.bias"),
    "another group": (
        lambda p: rewrite_json(p, lambda d: d["param_groups"][0]["params"].pop()),
        "param groups",
    ),
}


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoints(name: str, tmp_path: Path) -> None:
    damage, message = DAMAGES[name]
    damage(saved(tmp_path / "c"))
    refused(build(), tmp_path / "c", message)


def test_extra_values_must_be_json(tmp_path: Path) -> None:
    """A mistake in `extra` is an error, and the checkpoint that was there stays loadable."""
    saved(tmp_path / "c")
    with open_engine(build()) as engine:
        with pytest.raises(oe.CheckpointError, match="extra|JSON"):
            engine.save(tmp_path / "c", extra={"model": engine.module})
        engine.load(tmp_path / "c")
        assert engine.steps == 1


# torch.optim's own format.


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_state_dict_both_ways(kind: type[torch.optim.Optimizer]) -> None:
    """U69: five steps in torch, five in the engine; five in the engine, five in torch: as ten in one of them."""

    def build_net(wrapped: bool) -> Net:
        torch.manual_seed(3)
        config = oe.EngineConfig(**SMALL) if wrapped else None
        return Net(BY_NAME["skipped"].build(), lambda m: kind(m.parameters(), lr=1e-3), config, "fp32", True)

    case = BY_NAME["skipped"]
    ten = build_net(False)
    train(ten, case, range(10))
    for first, second in ((False, True), (True, False), (True, True)):
        one, two = build_net(first), build_net(second)
        train(one, case, range(5))
        two.model.load_state_dict(one.model.state_dict())
        two.optimizer.load_state_dict(one.optimizer.state_dict())
        train(two, case, range(5, 10))
        for name, value in two.parameters().items():
            assert torch.equal(value, ten.masters[name]), name
        expected = ten.states()
        for name, state in two.states().items():
            assert all(torch.equal(state[key], expected[name][key]) for key in state), name
        one.close()
        two.close()


def test_wrapping_a_used_optimizer_takes_its_state() -> None:
    case = BY_NAME["mlp"]
    ten = Net(case.build(), adamw, None, "fp32", True)
    torch.manual_seed(3)
    model = case.build()
    ten.model.load_state_dict(model.state_dict())
    train(ten, case, range(6))
    plain = Net(model, adamw, None, "fp32", True)
    train(plain, case, range(3))
    with open_engine(model, plain.optimizer) as engine:
        for step in range(3, 6):
            engine.backward(case.loss(engine, step, 0))
            engine.step()
            engine.zero_grad()
        for a, b in zip(model.parameters(), ten.model.parameters(), strict=True):
            assert torch.equal(a, b)


def test_loaded_counters_count() -> None:
    """U25: from step 2 to step 5 by loading: the correction is that of the loaded counter."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with open_engine(model, optimizer) as engine:
        state = engine.optimizer.state_dict()
        state["state"] = {
            0: {
                "step": torch.tensor(2.0),
                "exp_avg": torch.full((1, 1), 0.19),
                "exp_avg_sq": torch.full((1, 1), 0.001999),
            }
        }
        engine.optimizer.load_state_dict(state)
        model.weight.grad = torch.ones(1, 1)
        engine.step()
        # Step 3 with corrections 0.271 and 0.002997001, both moments those of a constant gradient of 1.
        assert engine.optimizer.state[model.weight]["step"] == 3
        assert model.weight.item() == pytest.approx(0.99, abs=1e-6)
        state["state"][0]["step"] = torch.tensor(5.0)
        engine.optimizer.load_state_dict(state)
        model.weight.grad = torch.zeros(1, 1)
        engine.step()
        moved = 0.01 * (0.9 * 0.19 / (1 - 0.9**6)) / ((0.999 * 0.001999 / (1 - 0.999**6)) ** 0.5 + 1e-8)
        assert model.weight.item() == pytest.approx(0.99 - moved, abs=1e-6)


def test_states_that_do_not_fit_are_refused() -> None:
    model = build()
    with open_engine(model) as engine:
        engine.backward(engine(data(0, 0, 5, 15)).square().mean())
        engine.step()
        good = engine.optimizer.state_dict()

        def changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
            other = {
                "state": {k: dict(v) for k, v in good["state"].items()},
                "param_groups": [dict(g) for g in good["param_groups"]],
            }
            change(other)
            return other

        for change, message in (
            (lambda d: d["state"][0].pop("exp_avg"), "'0.weight' has"),
            (lambda d: d["state"][0].update(max_exp_avg_sq=torch.zeros(17, 15)), "without amsgrad"),
            (
                lambda d: d["state"][0].update(exp_avg=torch.zeros(3)),
                r"exp_avg of '0.weight' has shape \(3,\)",
            ),
            (lambda d: d["param_groups"][0].update(params=[0, 1]), "param groups of"),
            (lambda d: d["param_groups"][0].update(amsgrad=True), "amsgrad"),
            (lambda d: d["state"].update({99: d["state"][0]}), "99"),
        ):
            with pytest.raises((oe.CheckpointError, oe.UnsupportedError), match=message):
                engine.optimizer.load_state_dict(changed(change))
            now = engine.optimizer.state_dict()
            assert now["param_groups"] == good["param_groups"]
            assert all(torch.equal(now["state"][k][n], v[n]) for k, v in good["state"].items() for n in v)
        engine.optimizer.load_state_dict(changed(lambda d: d["state"].clear()))
        assert len(engine.optimizer.state) == 0
