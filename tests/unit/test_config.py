"""EngineConfig made in Python and read from TOML: the same checks, one message for each mistake."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offload_engine as oe
from offload_engine.config import apply_overrides, build, parse_bytes


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"device_memory": "6 gigs"}, "unknown unit 'gigs'"),
        ({"device_memory": "6"}, "needs a number and a unit"),
        ({"device_memory": 6e9 + 0.5}, "needs a number and a unit"),
        ({"device_memory": 0}, "above zero"),
        ({"device_memory": True}, "size in bytes"),
        ({"precision": "fp8"}, "Did you mean 'bf16'|Valid: bf16, fp16, fp32"),
        ({"device": "emulate"}, "Did you mean 'emulated'"),
        ({"keep_resident": "yes"}, "keep_resident is 'yes' .str.; bool is needed"),
        ({"max_grad_norm": "1"}, "max_grad_norm is '1' .str.; float is needed"),
        ({"max_grad_norm": -1.0}, "must be above zero"),
        ({"timeline_events": "many"}, "int is needed"),
        ({"timeline_events": 10}, "at least 1000"),
        ({"links": 5}, "a section with keys is needed"),
        ({"links": {"h2d_gps": 1}}, "links.h2d_gps'. Did you mean 'h2d_gbps'"),
        ({"links": {"h2d_gbps": -1.0}}, "0 .unlimited. or a positive number"),
        ({"threads": {"update": -2}}, "must be 0 .automatic. or more"),
    ],
)
def test_wrong_values_are_named_with_what_is_valid(values: dict[str, Any], words: str) -> None:
    with pytest.raises(oe.ConfigError, match=words):
        oe.EngineConfig(**values)
    with pytest.raises(oe.ConfigError, match=words):
        build(oe.EngineConfig, values)


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(
        oe.ConfigError, match="unknown key 'engine.device_memroy'. Did you mean 'device_memory'"
    ):
        build(oe.EngineConfig, {"device_memroy": "6GiB"})


def test_sizes_and_sections_are_taken_in_every_form() -> None:
    config = oe.EngineConfig(device_memory="1.5GiB", max_grad_norm=1, links={"h2d_gbps": 2})  # type: ignore[arg-type]
    assert config.device_memory == 3 * 2**29
    assert config.links == oe.LinksConfig(h2d_gbps=2.0)
    assert isinstance(config.max_grad_norm, float)
    assert build(oe.EngineConfig, {"device_memory": "none"}).device_memory is None
    assert parse_bytes("2 KB") == 2000


def test_overrides_are_read_as_toml_and_refused_without_a_value() -> None:
    found = apply_overrides({"a": {"b": 1}}, ["a.b=2", "a.c=[1, 2]", "d.e=bare word"])
    assert found == {"a": {"b": 2, "c": [1, 2]}, "d": {"e": "bare word"}}
    for wrong in ("a.b", "=1", "a..b=1", "a.b.c=1"):
        with pytest.raises(oe.ConfigError, match="override"):
            apply_overrides({"a": {"b": 1}}, [wrong])


def test_the_engine_says_that_a_config_is_needed() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(oe.ConfigError, match="config is a dict; an EngineConfig is needed"):
        oe.OffloadEngine(model, torch.optim.AdamW(model.parameters()), {"device": "emulated"})  # type: ignore[arg-type]
