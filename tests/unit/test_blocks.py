"""Finding a model's blocks: what counts as a sequence, and which one is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from offload_engine.streaming.blocks import find_blocks
from offload_engine.training.config import DecoderConfig
from offload_engine.training.models.decoder import Decoder
from tests.parity.cases import BY_NAME


def names(model: nn.Module) -> list[str]:
    modules = dict(model.named_modules())
    blocks = find_blocks(model)
    assert all(modules[name] is module for name, module in blocks)
    return [name for name, _ in blocks]


def numbered(prefix: str, count: int, start: int = 0) -> list[str]:
    return [f"{prefix}{index}" for index in range(start, start + count)]


def test_the_decoder() -> None:
    sizes = {"dim": 16, "layers": 3, "heads": 2, "kv_heads": 1, "ffn": 24, "vocab": 64, "seq": 8}
    for tied in (False, True):
        assert names(Decoder(DecoderConfig(**sizes, tie_embeddings=tied))) == numbered("blocks.", 3)
    inside = nn.ModuleDict({"wrapped": nn.ModuleDict({"model": Decoder(DecoderConfig(**sizes))})})
    assert names(inside) == numbered("wrapped.model.blocks.", 3)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("dropped layers", numbered("layers.", 5)),
        ("side channels", numbered("routers.", 3)),
        ("attention", numbered("encoder.layers.", 2)),
        ("checkpointed", numbered("blocks.", 3)),
        ("branches", numbered("experts.", 3)),  # called in any order: that, only a run can tell
        ("mlp", []),
        ("tied", []),
        ("convolutions", []),
        ("lists", []),
        ("adapters", []),
    ],
)
def test_models_of_the_parity_cases(case: str, expected: list[str]) -> None:
    assert names(BY_NAME[case].build()) == expected


def linear(count: int, width: int = 8) -> list[nn.Module]:
    return [nn.Linear(width, width) for _ in range(count)]


def test_what_is_no_sequence() -> None:
    assert names(nn.Linear(3, 3)) == []
    assert names(nn.Sequential(*linear(1))) == []
    assert names(nn.Sequential(*linear(2), nn.Tanh())) == []  # of two classes
    assert names(nn.ModuleList(nn.Tanh() for _ in range(3))) == []  # without parameters
    assert names(nn.Sequential(*linear(1) * 3)) == []  # one module three times
    small = nn.ModuleDict({"layers": nn.ModuleList(linear(2)), "big": nn.Linear(99, 99)})
    assert names(small) == []  # not where the parameters are


def test_the_larger_of_two_then_the_longer_then_the_outer_one() -> None:
    lists = {"a": nn.ModuleList(linear(2)), "b": nn.ModuleList(linear(3)), "c": nn.Linear(1, 1)}
    assert names(nn.ModuleDict(lists)) == numbered("b.", 3)
    inner = nn.ModuleList(nn.ModuleList(linear(2)) for _ in range(2))
    assert names(inner) == ["0", "1"]
    shared = nn.Linear(40, 40)
    lists = {
        "a": nn.ModuleList(nn.Sequential(shared, *linear(1)) for _ in range(2)),
        "b": nn.ModuleList(linear(2)),
    }
    assert names(nn.ModuleDict(lists)) == ["a.0", "a.1"]  # a shared parameter counts once


def test_a_vocabulary_larger_than_the_blocks_does_not_hide_them() -> None:
    sizes = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 24, "vocab": 5000, "seq": 8}
    assert names(Decoder(DecoderConfig(**sizes))) == numbered("blocks.", 2)


@pytest.mark.filterwarnings("ignore")
def test_models_of_transformers() -> None:
    transformers: Any = pytest.importorskip(
        "transformers", reason="the extra 'hf' is not installed (make setup-hf)"
    )
    sizes = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    t5 = {"vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3}
    with torch.device("meta"):
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
        gpt2 = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=101, n_positions=32, n_embd=32, n_layer=2, n_head=2)
        )
        bert = transformers.BertForMaskedLM(
            transformers.BertConfig(**{**sizes, "num_attention_heads": 2, "num_hidden_layers": 2})
        )
        encoder_decoder = transformers.T5ForConditionalGeneration(transformers.T5Config(**t5, num_heads=2))
    assert names(llama) == numbered("model.layers.", 3)
    assert names(gpt2) == numbered("transformer.h.", 2)
    assert names(bert) == numbered("bert.encoder.layer.", 2)
    assert names(encoder_decoder) == numbered("decoder.block.", 3)  # the larger of its two


def test_looking_at_a_parametrized_model_changes_nothing() -> None:
    """`module.weight` of a spectral norm in training mode is a step of its power iteration."""
    model = nn.Sequential(*(nn.utils.parametrizations.spectral_norm(nn.Linear(7, 7)) for _ in range(3)))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert before
    find_blocks(model)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
