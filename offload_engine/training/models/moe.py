"""A small decoder with a mixture of experts, in the manner of Mixtral and DeepSeek: shared and routed experts.

Attention, norms and rotary positions are the dense decoder's; only the feed-forward differs. Its experts may live on
other ranks (`offload_engine.parallel.expert.share_experts`); in one process they are all here.
Shapes: B sequences, T tokens, D model width, V vocabulary, N = B T tokens in a row, X experts, K of them for a token,
F inner width of an expert.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload_engine.errors import ConfigError
from offload_engine.parallel.expert import (
    ExpertRanks,
    ExpertWeights,
    RouterLosses,
    Routing,
    RoutingRule,
    keep_within_capacity,
    route,
    router_losses,
    run_experts,
)
from offload_engine.training.config import DecoderConfig
from offload_engine.training.models.decoder import Attention, Block, FeedForward, rotary_table, run_block

__all__ = ["MoEBlock", "MoEConfig", "MoEDecoder", "MoEFeedForward", "MoEOutput"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A decoder whose feed-forwards, but for those of the first blocks, are mixtures of experts."""

    decoder: DecoderConfig = dataclasses.field(default_factory=DecoderConfig)
    """Everything but the experts. Its `ffn` is the width of the dense blocks."""
    experts: int = 8
    """Routed experts of a block."""
    top_k: int = 2
    """Routed experts of a token."""
    expert_ffn: int = 256
    """Inner width of a routed expert."""
    shared_ffn: int = 0
    """Inner width of the shared experts, together: every token goes through them. 0: none."""
    dense_blocks: int = 0
    """First blocks that have a plain feed-forward."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """"softmax" over the experts, as Mixtral, or "sigmoid" of each, as DeepSeek-V3."""
    renormalise: bool = True
    """Divide the gates of a token by their sum."""
    gate_scale: float = 1.0
    """Factor of the gates of the routed experts."""
    capacity_factor: float | None = None
    """Rows that an expert takes at most, as a multiple of an even share; later ones are dropped. None: no limit."""
    balance_weight: float = 0.01
    """Weight of the load-balancing loss. 0: without."""
    z_weight: float = 0.001
    """Weight of the router's z-loss. 0: without."""

    def __post_init__(self) -> None:
        for name, limit in {
            "experts": 1,
            "top_k": 1,
            "expert_ffn": 1,
            "shared_ffn": 0,
            "dense_blocks": 0,
        }.items():
            if getattr(self, name) < limit:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; it must be {limit} or more.")
        for name in ("balance_weight", "z_weight"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; it must be 0 or more.")
        if self.top_k > self.experts:
            raise ConfigError(
                f"model.top_k is {self.top_k}, but there are {self.experts} experts; it may be that many at most."
            )
        if self.dense_blocks > self.decoder.layers:
            raise ConfigError(
                f"model.dense_blocks is {self.dense_blocks}, but the model has {self.decoder.layers} blocks."
            )
        self.rule.capacity(1, 1)  # the rule checks its own values

    @property
    def rule(self) -> RoutingRule:
        """How a token chooses its experts."""
        return RoutingRule(
            top_k=self.top_k,
            score=self.score,
            renormalise=self.renormalise,
            gate_scale=self.gate_scale,
            capacity_factor=self.capacity_factor,
        )


class MoEOutput(NamedTuple):
    """What `MoEDecoder` returns."""

    logits_BTV: Tensor
    """In the dtype of the weights."""
    share_2: Tensor
    """fp32: this rank's share of the load-balancing loss and of the z-loss, summed over blocks, unweighted."""
    whole_2: Tensor
    """fp32, without gradient: the same over all ranks, for reports."""


class Router(nn.Module):
    """Logits of the experts, in fp32 whatever the dtype of the weights is."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.experts, config.decoder.dim))
        self.rule = config.rule

    def forward(self, x_ND: Tensor) -> Routing:
        return route(F.linear(x_ND.float(), self.weight.float()), self.rule)


class RoutedExperts(nn.Module):
    """The routed experts: each is a SwiGLU, and their weights are stacked as (experts, out, in)."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        experts, dim, ffn = config.experts, config.decoder.dim, config.expert_ffn
        self.gate = nn.Parameter(torch.empty(experts, ffn, dim))
        self.up = nn.Parameter(torch.empty(experts, ffn, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, ffn))
        self.rule = config.rule
        self.expert_ranks = ExpertRanks(experts)

    def forward(self, x_ND: Tensor, routing: Routing) -> Tensor:
        kept_NK = keep_within_capacity(routing.experts_NK, self.rule, self.expert_ranks)
        weights = ExpertWeights(self.gate, self.up, self.down)
        return run_experts(x_ND, routing, kept_NK, weights, self.expert_ranks)


class MoEFeedForward(nn.Module):
    """Shared experts plus the gated sum of the routed ones, and the losses of the router."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = RoutedExperts(config)
        self.shared: FeedForward | None = None
        if config.shared_ffn:
            # Several shared experts that every token goes through are one of their common width.
            self.shared = FeedForward(dataclasses.replace(config.decoder, ffn=config.shared_ffn))

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, RouterLosses]:
        """Return (B, T, D) in the dtype of `x_BTD`, and the losses."""
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        routing = self.router(x_ND)
        y_ND = self.experts(x_ND, routing)
        if self.shared is not None:
            y_ND = y_ND + self.shared(x_ND)
        return y_ND.view_as(x_BTD), router_losses(routing, self.experts.expert_ranks)


class MoEBlock(nn.Module):
    """One layer: attention and a mixture of experts, each behind a norm and added to the residual stream."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.decoder.dim, eps=1e-5)
        self.attention = Attention(config.decoder)
        self.ffn_norm = nn.RMSNorm(config.decoder.dim, eps=1e-5)
        self.ffn = MoEFeedForward(config)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x_BTD, share_2 and whole_2: plain tensors, which recomputation and pipeline stages can pass on."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TE, sin_TE)
        ffn_BTD, losses = self.ffn(self.ffn_norm(x_BTD))
        return x_BTD + ffn_BTD, losses.share_2, losses.whole_2


class MoEDecoder(nn.Module):
    """Token ids to next-token logits and the router's losses."""

    cos_TE: Tensor
    sin_TE: Tensor

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        decoder = config.decoder
        self.embedding = nn.Embedding(decoder.vocab, decoder.dim)
        self.blocks = nn.ModuleList(
            Block(decoder) if number < config.dense_blocks else MoEBlock(config)
            for number in range(decoder.layers)
        )
        self.norm = nn.RMSNorm(decoder.dim, eps=1e-5)
        self.head = nn.Linear(decoder.dim, decoder.vocab, bias=False)
        if decoder.tie_embeddings:
            self.head.weight = self.embedding.weight
        # Not in the state dict: they follow from the config.
        cos_TE, sin_TE = rotary_table(decoder.seq, decoder.dim // decoder.heads)
        self.register_buffer("cos_TE", cos_TE, persistent=False)
        self.register_buffer("sin_TE", sin_TE, persistent=False)
        self.initialise()

    def initialise(self) -> None:
        """Draw the weights: normal, 0.02 wide; what adds to the residual stream narrower by sqrt(2 layers)."""
        residual_std = 0.02 / (2 * self.config.decoder.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                narrow = name.endswith(("attention.out.weight", "down", "down.weight"))
                nn.init.normal_(parameter, std=residual_std if narrow else 0.02)

    def forward(self, tokens_BT: Tensor) -> MoEOutput:
        """Return logits (B, T, V) and the router's losses. Every rank has to call it, with B of 1 or more."""
        length = tokens_BT.shape[1]
        x_BTD = self.embedding(tokens_BT)
        cos_TE = self.cos_TE[:length].to(x_BTD.dtype)
        sin_TE = self.sin_TE[:length].to(x_BTD.dtype)
        share_2 = torch.zeros(2, device=x_BTD.device)
        whole_2 = torch.zeros(2, device=x_BTD.device)
        for block in self.blocks:
            out = run_block(block, x_BTD, cos_TE, sin_TE, self.config.decoder.activation_checkpointing)
            if isinstance(out, Tensor):
                x_BTD = out
            else:
                x_BTD = out[0]
                share_2, whole_2 = share_2 + out[1], whole_2 + out[2]
        return MoEOutput(self.head(self.norm(x_BTD)), share_2, whole_2)

    def router_loss(self, output: MoEOutput) -> Tensor:
        """Return what this rank adds to its loss for the router: the weighted shares. The ranks' losses are summed."""
        weights_2 = output.share_2.new_tensor([self.config.balance_weight, self.config.z_weight])
        return (weights_2 * output.share_2).sum()
