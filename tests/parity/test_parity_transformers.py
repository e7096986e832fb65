"""Small models of transformers, as they come: tied heads, encoder and decoder, experts, caches, checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.parity.harness import (
    Case,
    Net,
    Recipe,
    assert_same_bits,
    open_engine,
    run,
    smallest_budget,
    tokens,
)

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed (make setup-hf)")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SMALL_LLAMA = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(checkpointing: bool = False, **config: Any) -> nn.Module:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL_LLAMA, **config))
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=101, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    sizes = {"vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


def bert() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=101, **sizes))


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SMALL_LLAMA, num_local_experts=4, output_router_logits=True)
    return transformers.MixtralForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "llama checkpointed": lambda: llama(checkpointing=True),
    "gpt2": gpt2,
    "t5": t5,
    "bert": bert,
    "mixtral": mixtral,
}


def language_loss(net: Net, step: int, micro: int) -> torch.Tensor:
    t = tokens(step, micro, 101, 2, 9)
    return net(input_ids=t, labels=t).loss


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, precision: str) -> None:
    case, recipe = Case(name, MODELS[name], language_loss), Recipe(steps=3, record_gradients=False)
    plain = run(case, recipe, precision=precision)
    for ledger in (True, False):
        budget = smallest_budget(case, recipe, precision, ledger)
        ours = run(case, recipe, precision=precision, memory_ledger=ledger, device_memory=budget)
        assert_same_bits(ours, plain, "losses", "parameters", "states", "working")
        assert ours.facts["evictions"] > 3 * ours.facts["buckets"]


@pytest.mark.parametrize("memory_ledger", [True, False])
def test_generation_with_a_cache(memory_ledger: bool) -> None:
    torch.manual_seed(0)
    model = llama().eval()
    prompt = torch.arange(5)[None]
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False)
    with open_engine(model, memory_ledger=memory_ledger, device_memory="96KiB"):
        assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), expected)


def test_saving_in_their_format(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = llama()
    with open_engine(model, bucket_bytes="1MiB"):
        model.save_pretrained(tmp_path)
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        assert all(map(torch.equal, model.parameters(), loaded.parameters()))
