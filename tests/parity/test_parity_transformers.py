"""Small models of transformers, as they come: tied heads, two stacks, experts, images, caches, checkpointing."""

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
    data,
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


def decoder(family: str, checkpointing: bool | None = None, **config: Any) -> nn.Module:
    """Return a small model of a family of decoders; `checkpointing` says whether it is reentrant."""
    kind = getattr(transformers, f"{family}Config")
    model = getattr(transformers, f"{family}ForCausalLM")(kind(**{**SMALL_LLAMA, **config}))
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    return model


def llama(checkpointing: bool | None = None, **config: Any) -> nn.Module:
    return decoder("Llama", checkpointing, **config)


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
    return decoder("Mixtral", num_local_experts=4, output_router_logits=True)


def qwen2_moe() -> nn.Module:
    """Routed experts beside a shared one."""
    sizes = {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
    return decoder(
        "Qwen2Moe", num_experts_per_tok=2, decoder_sparse_step=1, output_router_logits=True, **sizes
    )


def vit() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=12, patch_size=4, num_labels=5, **sizes)
    )


class UNet(nn.Module):
    """The convolutional part of a diffusion model: down, middle and up with skips, GroupNorm and a time embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 24), nn.SiLU(), nn.Linear(24, 24))
        self.first = nn.Conv2d(3, 24, 3, padding=1)
        self.down = nn.Conv2d(24, 48, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(6, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
            for width in (24, 48, 48, 24)
        )
        self.up = nn.ConvTranspose2d(48, 24, 4, stride=2, padding=1)
        self.last = nn.Conv2d(48, 3, 1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        one = self.first(x) + self.time(t)[:, :, None, None]
        one = one + self.blocks[0](one)
        two = self.down(one)
        for block in self.blocks[1:3]:
            two = two + block(two)
        up = self.up(two)
        return self.last(torch.cat([up + self.blocks[3](up), one], 1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "llama checkpointed": lambda: llama(checkpointing=False),
    "llama checkpointed, reentrant": lambda: llama(checkpointing=True),
    "qwen2": lambda: decoder("Qwen2", tie_word_embeddings=True),
    "qwen3": lambda: decoder("Qwen3", head_dim=8),
    "mistral": lambda: decoder("Mistral", sliding_window=4),
    "gpt2": gpt2,
    "t5": t5,
    "bert": bert,
    "mixtral": mixtral,
    "qwen2 moe": qwen2_moe,
    "vit": vit,
    "unet": UNet,
    "unet, channels last": lambda: UNet().to(memory_format=torch.channels_last),
}


def language_loss(net: Net, step: int, micro: int) -> torch.Tensor:
    t = tokens(step, micro, 101, 2, 9)
    return net(input_ids=t, labels=t).loss


def image_loss(net: Net, step: int, micro: int) -> torch.Tensor:
    return net(pixel_values=data(step, micro, 2, 3, 12, 12), labels=tokens(step, micro, 5, 2)).loss


def denoising_loss(net: Net, step: int, micro: int) -> torch.Tensor:
    x = data(step, micro, 2, 3, 12, 12)
    if net.model.first.weight.is_contiguous(memory_format=torch.channels_last):
        x = x.to(memory_format=torch.channels_last)
    return net(x, data(step, micro, 2, 8)).float().square().mean()


LOSSES = {"vit": image_loss, "unet": denoising_loss, "unet, channels last": denoising_loss}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, precision: str) -> None:
    case, recipe = (
        Case(name, MODELS[name], LOSSES.get(name, language_loss)),
        Recipe(steps=3, record_gradients=False),
    )
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
