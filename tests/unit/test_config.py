"""EngineConfig made in Python and read from TOML: the same checks, one message for each mistake."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import pytest
import torch

import offload_engine as oe
from offload_engine.config import apply_overrides, build, parse_bytes

SIZE_FORMS = "A size is an int of bytes, or text with a number and a unit: '6GiB', '512MiB', '1.5GB'."


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"device_memory": "6 gigs"}, "unknown unit 'gigs'"),
        ({"device_memory": "6"}, f"device_memory is '6', which needs a unit: '6GiB', say. {SIZE_FORMS}"),
        ({"host_memory": "lots"}, f"host_memory is 'lots'. {SIZE_FORMS}"),
        ({"device_memory": 6e9 + 0.5}, f"device_memory is 6000000000.5 .float.. {SIZE_FORMS}$"),
        (
            {"device_memory": 6e9},
            f"6000000000.0 .float.. {SIZE_FORMS} Did you mean 6000000000, or '5.6 GiB'?",
        ),
        ({"device_memory": 0}, f"device_memory is 0; a size must be above zero. {SIZE_FORMS}"),
        ({"bucket_bytes": -4096}, f"bucket_bytes is -4096; a size must be above zero. {SIZE_FORMS}"),
        (
            {"resident_states": "-1GiB"},
            f"resident_states is '-1GiB'; a size must be above zero. {SIZE_FORMS}",
        ),
        ({"device_memory": True}, f"device_memory is True .bool.. {SIZE_FORMS}"),
        ({"device_memory": 6}, f"device_memory is 6: 6 bytes, too few .* Did you mean '6GiB'.? {SIZE_FORMS}"),
        ({"host_memory": 512}, "host_memory is 512: 512 bytes, .* Did you mean '512MiB' or '512GiB'"),
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


@pytest.mark.parametrize(
    ("cls", "keyword", "nearest"),
    [
        (oe.EngineConfig, "device_memmory", "device_memory"),
        (oe.LinksConfig, "h2d_gps", "h2d_gbps"),
        (oe.ThreadsConfig, "updates", "update"),
        (oe.LossScaleConfig, "initial", "init"),
    ],
)
def test_an_unknown_keyword_names_the_nearest(cls: type, keyword: str, nearest: str) -> None:
    words = f"unknown keyword '{keyword}' of {cls.__name__}. Did you mean '{nearest}'.? Valid: .*{nearest}"
    with pytest.raises(oe.ConfigError, match=words):
        cls(**{keyword: 1})
    with pytest.raises(oe.ConfigError, match=words):
        dataclasses.replace(cls(), **{keyword: 1})
    with pytest.raises(oe.ConfigError, match="given '6GiB' without a keyword"):
        cls("6GiB")


def test_configs_stay_plain_frozen_dataclasses() -> None:
    config = oe.EngineConfig(device_memory=4096, lookahead_bytes=1)
    assert (
        copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == dataclasses.replace(config) == config
    )
    assert list(inspect.signature(oe.EngineConfig).parameters)[:2] == ["device", "device_memory"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.device_memory = 1  # type: ignore[misc]


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
