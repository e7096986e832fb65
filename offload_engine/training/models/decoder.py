"""A small Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

The quickstart trains it and the tests take it as their model. It knows nothing of the engine.
Shapes: B sequences, T tokens, D model width, H query heads, K key/value heads, E = D / H, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload_engine.training.config import DecoderConfig

__all__ = ["Decoder"]


class Attention(nn.Module):
    """Causal self-attention; each key/value head serves H / K query heads."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_dim = config.dim // config.heads
        self.q = nn.Linear(config.dim, self.heads * self.head_dim, bias=False)
        self.k = nn.Linear(config.dim, self.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(config.dim, self.kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(self.heads * self.head_dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        batch, length, _ = x_BTD.shape
        q_BHTE = self.q(x_BTD).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k_BKTE = self.k(x_BTD).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v_BKTE = self.v(x_BTD).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        mixed_BHTE = F.scaled_dot_product_attention(
            rotate(q_BHTE, cos_TE, sin_TE),
            rotate(k_BKTE, cos_TE, sin_TE),
            v_BKTE,
            is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
        )
        out_BTD: Tensor = self.out(
            mixed_BHTE.transpose(1, 2).reshape(batch, length, self.heads * self.head_dim)
        )
        return out_BTD


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn, bias=False)
        self.up = nn.Linear(config.dim, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out_BTD: Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return out_BTD


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.ffn = FeedForward(config)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TE, sin_TE)
        ffn_BTD: Tensor = self.ffn(self.ffn_norm(x_BTD))
        return x_BTD + ffn_BTD


def run_block(block: nn.Module, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor, checkpointing: str) -> Any:
    """Return what a block gives; with activation checkpointing only its input is kept for backward."""
    if checkpointing == "none" or not torch.is_grad_enabled():
        return block(x_BTD, cos_TE, sin_TE)
    return checkpoint(block, x_BTD, cos_TE, sin_TE, use_reentrant=checkpointing == "block_reentrant")


class Decoder(nn.Module):
    """Token ids to next-token logits. With activation checkpointing only each block's input is kept."""

    cos_TE: Tensor
    sin_TE: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        # Not in the state dict: they follow from the config.
        cos_TE, sin_TE = rotary_table(config.seq, config.dim // config.heads)
        self.register_buffer("cos_TE", cos_TE, persistent=False)
        self.register_buffer("sin_TE", sin_TE, persistent=False)
        self.initialise()

    def initialise(self) -> None:
        """Draw the weights: normal, 0.02 wide; what adds to the residual stream narrower by sqrt(2 layers)."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        residual_std = 0.02 / (2 * self.config.layers) ** 0.5
        for module in self.modules():
            if isinstance(module, Block):
                nn.init.normal_(module.attention.out.weight, std=residual_std)
                nn.init.normal_(module.ffn.down.weight, std=residual_std)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return logits (B, T, V) in the dtype of the weights."""
        length = tokens_BT.shape[1]
        x_BTD = self.embedding(tokens_BT)
        cos_TE = self.cos_TE[:length].to(x_BTD.dtype)
        sin_TE = self.sin_TE[:length].to(x_BTD.dtype)
        for block in self.blocks:
            x_BTD = run_block(block, x_BTD, cos_TE, sin_TE, self.config.activation_checkpointing)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


def rotary_table(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (length, head_dim) in fp32; the two halves of head_dim hold the same angles."""
    frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Turn each pair (e, e + E/2) of the last dim by its position's angle."""
    low, high = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos_TE + torch.cat((-high, low), dim=-1) * sin_TE
