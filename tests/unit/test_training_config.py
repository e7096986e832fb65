"""The sections of a run's TOML file: what is read, and what each mistake says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_engine.config import EngineConfig, sized
from offload_engine.errors import ConfigError
from offload_engine.training.config import (
    DataConfig,
    DecoderConfig,
    EngineSection,
    HuggingFaceConfig,
    RunConfig,
    TrainConfig,
    from_mapping,
    load,
)
from offload_engine.training.models.decoder import Decoder

CONFIGS = Path(__file__).parents[2] / "configs"


def mapping(**sections: dict[str, Any]) -> dict[str, Any]:
    return {"run": {"name": "t"}, "model": {}, "data": {}, "train": {"steps": 1}, "engine": {}} | sections


@pytest.mark.parametrize("file", ["quickstart.toml", "finetune_smollm2.toml"])
def test_shipped_configs_are_valid(file: str) -> None:
    job = load(CONFIGS / file)
    assert job.engine.enabled
    assert job.engine.device_memory is not None


def test_overrides_reach_every_section() -> None:
    job = load(CONFIGS / "quickstart.toml", ["engine.enabled=false", "train.steps=7", "run.name=other"])
    assert (job.engine.enabled, job.train.steps, job.run.name) == (False, 7, "other")


def test_engine_section_has_every_engine_field() -> None:
    names = [field.name for field in dataclasses.fields(EngineSection)]
    assert names == [
        *(field.name for field in dataclasses.fields(EngineConfig)),
        "enabled",
        "reference_update",
    ]


@pytest.mark.parametrize(
    "cls", [RunConfig, DecoderConfig, HuggingFaceConfig, DataConfig, TrainConfig, EngineSection]
)
def test_every_field_is_documented(cls: type) -> None:
    import ast
    import inspect
    import textwrap

    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    for statement, following in zip(body, body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign):
            documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            assert documented, f"{cls.__name__}.{ast.unparse(statement.target)} has no docstring"


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"train": {"steps": 1, "stepz": 2}}, ["train.stepz", "steps"]),
        ({"train": {}}, ["train.steps", "missing"]),
        ({"run": {}}, ["run.name", "missing"]),
        ({"run": {"name": "a/b"}}, ["run.name", "a/b"]),
        ({"trian": {"steps": 1}}, ["[trian]", "[train]"]),
        ({"model": {"kind": "decodr"}}, ["model.kind", "decodr", "decoder"]),
        ({"model": {"dim": 33}}, ["model.dim", "33", "multiple of 8"]),
        ({"model": {"kv_heads": 3}}, ["model.kv_heads", "3"]),
        ({"model": {"activation_checkpointing": "blocks"}}, ["activation_checkpointing", "'block'"]),
        ({"model": {"kind": "huggingface"}}, ["model.package", "model.path"]),
        ({"model": {"seq": 64}}, ["train.seq_len", "256", "64"]),
        ({"model": {"vocab": 100}}, ["model.vocab", "100", "256"]),
        ({"data": {"kind": "file"}}, ["data.path"]),
        ({"data": {"tokenizer": "model"}}, ["data.tokenizer", "huggingface"]),
        ({"data": {"heldout_share": 1.0}}, ["data.heldout_share", "1.0"]),
        ({"train": {"steps": 0}}, ["train.steps", "0", "1"]),
        ({"train": {"steps": 1, "lr": "fast"}}, ["train.lr", "fast"]),
        ({"train": {"steps": 1, "lr": -1.0}}, ["train.lr", "-1.0"]),
        ({"train": {"steps": 1, "betas": [0.9, 1.0]}}, ["train.betas", "1.0"]),
        ({"engine": {"enable": True}}, ["engine.enable", "enabled", "reference_update"]),
        ({"engine": {"device_memory": "12MiBs"}}, ["engine.device_memory", "MiBs"]),
        ({"engine": {"max_grad_norm": 1.0}}, ["engine.max_grad_norm", "train.clip"]),
    ],
)
def test_each_mistake_names_the_key_and_the_remedy(sections: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        from_mapping(mapping(**sections))
    for word in words:
        assert word in str(error.value)


def test_the_accelerator_tables_count_only_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quickstart = CONFIGS / "quickstart.toml"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert load(quickstart).model.dim == 256  # type: ignore[union-attr]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    there = load(quickstart)
    assert there.model.dim == 768  # type: ignore[union-attr]
    parameters = sum(p.numel() for p in Decoder(there.model).parameters())  # type: ignore[arg-type]
    assert 16 * parameters >= 5 * sized(there.engine.device_memory)  # type: ignore[operator]
    assert load(quickstart, ["engine.device_memory=300MiB"]).engine.device_memory == 300 * 2**20
    assert load(quickstart, ["model.layers=6"]).model.layers == 6  # type: ignore[union-attr]
    job = tmp_path / "job.toml"
    job.write_text(quickstart.read_text().replace('device = "auto"', 'device = "emulated"'))
    assert load(job).model.dim == 256  # type: ignore[union-attr]
    job.write_text("on_accelerator = 3\n")
    with pytest.raises(ConfigError, match="on_accelerator must hold sections"):
        load(job)
