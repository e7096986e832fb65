"""A folder of transformers opened without values and filled by the engine holds what from_pretrained gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offload_engine as oe

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed (make setup-hf)")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def case(name: str) -> tuple[Any, Any]:
    """Return (model class, its tiny config)."""
    of: dict[str, tuple[str, dict[str, Any]]] = {
        "Llama": ("ForCausalLM", SIZES | {"num_key_value_heads": 2}),
        # Layer 10 comes after layer 9, and expert 10 after expert 9.
        "Mixtral": (
            "ForCausalLM",
            SIZES | {"num_hidden_layers": 11, "num_key_value_heads": 2, "num_local_experts": 11},
        ),
        "Qwen3Moe": (
            "ForCausalLM",
            SIZES | {"num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
        ),
        "GPT2": ("LMHeadModel", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
        "Bert": ("ForMaskedLM", SIZES),
        "T5": (
            "ForConditionalGeneration",
            {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        ),
        "ResNet": (  # running statistics are buffers that are saved
            "ForImageClassification",
            {
                "embedding_size": 8,
                "hidden_sizes": [8, 16],
                "depths": [1, 1],
                "num_channels": 3,
                "num_labels": 3,
            },
        ),
        "ViT": ("ForImageClassification", SIZES | {"image_size": 16, "patch_size": 8}),
    }
    suffix, config = of[name.removesuffix(" tied")]
    if name.endswith(" tied"):
        config = config | {"tie_word_embeddings": True}
    name = name.removesuffix(" tied")
    return getattr(transformers, name + suffix), getattr(transformers, name + "Config")(**config)


@pytest.mark.parametrize(
    "name", ["Llama", "Llama tied", "Mixtral", "Qwen3Moe", "GPT2", "Bert", "T5", "ResNet", "ViT"]
)
def test_values_are_those_of_from_pretrained(name: str, tmp_path: Path) -> None:
    from offload_engine.integrations.pretrained import open_pretrained

    kind, config = case(name)
    torch.manual_seed(0)
    made = kind(config)
    for name_, buffer in made.named_buffers():
        if "running" in name_:
            buffer.add_(torch.rand_like(buffer))
    made.save_pretrained(tmp_path / "a", max_shard_size="4KB")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    expected = kind.from_pretrained(tmp_path / "a", dtype=torch.float32)
    model, weights = open_pretrained(tmp_path / "a", kind)
    assert all(param.is_meta for param in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    with oe.OffloadEngine(model, optimizer, oe.EngineConfig(device="emulated"), weights=weights):
        check(expected, model)
    assert model.training == expected.training is False
    model.save_pretrained(tmp_path / "b")  # names and experts go back to what files have
    check(expected, kind.from_pretrained(tmp_path / "b", dtype=torch.float32))


def check(expected: Any, model: Any) -> None:
    theirs, ours = expected.state_dict(), model.state_dict()
    assert theirs.keys() == ours.keys()
    for label, value in theirs.items():
        assert torch.equal(value, ours[label]), label
    for (label, value), (_, mine) in zip(expected.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(value, mine), label


def test_rounded_to_the_dtype_that_was_asked_for(tmp_path: Path) -> None:
    from offload_engine.integrations.pretrained import open_pretrained

    kind, config = case("Llama")
    kind(config).save_pretrained(tmp_path)
    expected = kind.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model, weights = open_pretrained(tmp_path, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    config = oe.EngineConfig(device="emulated", precision="bf16")
    with oe.OffloadEngine(model, optimizer, config, weights=weights) as engine:
        check(expected, model)
        with engine.full_parameters() as masters:
            for label, param in expected.named_parameters():
                assert torch.equal(masters[label], param.float()), label


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    from offload_engine.integrations.pretrained import open_pretrained

    with pytest.raises(oe.CheckpointError, match=r"there is no '.*config\.json'"):
        open_pretrained(tmp_path)


def test_converted_weights_can_be_read_again(tmp_path: Path) -> None:
    """After an error in the middle of wrapping, say."""
    from offload_engine.integrations.pretrained import open_pretrained

    kind, config = case("Mixtral")
    kind(config).save_pretrained(tmp_path)
    _, weights = open_pretrained(tmp_path)
    name = "model.layers.10.mlp.experts.gate_up_proj"
    assert torch.equal(weights[name], weights[name])
    assert set(weights) == set(kind.from_pretrained(tmp_path).state_dict())
