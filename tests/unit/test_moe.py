"""The mixture of experts in one process, against a plain loop over tokens and experts, and against transformers."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import offload_engine as oe
from offload_engine.parallel.expert import (
    ExpertRanks,
    RoutingRule,
    grouped_linear,
    keep_within_capacity,
    route,
    router_losses,
)
from offload_engine.training.config import DecoderConfig
from offload_engine.training.models.moe import MoEBlock, MoEConfig, MoEDecoder, MoEFeedForward

BOUND = 2e-6


def config_of(**changes: Any) -> MoEConfig:
    decoder = DecoderConfig(dim=16, layers=2, heads=4, kv_heads=2, ffn=24, vocab=37, seq=16)
    return MoEConfig(**({"decoder": decoder, "experts": 6, "expert_ffn": 12} | changes))


def feed_forward(config: MoEConfig) -> MoEFeedForward:
    """Return a layer whose weights are wide enough for uneven routing."""
    torch.manual_seed(3)
    layer = MoEFeedForward(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def error(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference relative to the largest value."""
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


def plain_loop(layer: MoEFeedForward, config: MoEConfig, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the layer should: output, load-balancing loss and z-loss, token by token."""
    logits = x_ND @ layer.router.weight.T
    scores = logits.softmax(-1) if config.score == "softmax" else logits.sigmoid()
    probs = scores / scores.sum(-1, keepdim=True)
    chosen = [sorted(range(config.experts), key=lambda x: -row[x])[: config.top_k] for row in scores.tolist()]
    capacity = math.inf
    if config.capacity_factor is not None:
        capacity = math.ceil(config.capacity_factor * config.top_k * len(x_ND) / config.experts)
    taken, kept = [0] * config.experts, set()
    for place in range(config.top_k):
        for token, experts in enumerate(chosen):
            if taken[experts[place]] < capacity:
                taken[experts[place]] += 1
                kept.add((token, place))
    rows = []
    for token, experts in enumerate(chosen):
        gates = torch.stack([scores[token, x] for x in experts])
        if config.renormalise:
            gates = gates / gates.sum()
        y = torch.zeros(x_ND.shape[1])
        for place, x in enumerate(experts):
            if (token, place) in kept:
                inner = F.silu(layer.experts.gate[x] @ x_ND[token]) * (layer.experts.up[x] @ x_ND[token])
                y = y + config.gate_scale * gates[place] * (layer.experts.down[x] @ inner)
        if layer.shared is not None:
            y = y + layer.shared(x_ND[token])
        rows.append(y)
    share = [
        sum(x in experts for experts in chosen) / len(x_ND) / config.top_k for x in range(config.experts)
    ]
    balance = config.experts * sum(f * p for f, p in zip(share, probs.mean(0), strict=True))
    return torch.stack(rows), torch.as_tensor(balance), logits.logsumexp(-1).square().mean()


CASES = {
    "mixtral": {},
    "one_expert_of_a_token": {"top_k": 1, "renormalise": False},
    "raw_softmax_gates": {"renormalise": False, "top_k": 3},
    "deepseek": {"score": "sigmoid", "gate_scale": 2.5, "shared_ffn": 20, "top_k": 3},
    "all_experts": {"top_k": 6},
    "one_expert_in_all": {"experts": 1, "top_k": 1},
    "capacity": {"capacity_factor": 0.7},
    "tight_capacity": {"capacity_factor": 0.2, "top_k": 3, "shared_ffn": 8},
    "wide_capacity": {"capacity_factor": 6.0},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_the_layer_is_the_plain_loop(changes: dict[str, Any]) -> None:
    config = config_of(**changes)
    layer = feed_forward(config)
    x_BTD = torch.randn(3, 7, 16, requires_grad=True)
    weight_BTD = torch.randn(3, 7, 16)
    y_BTD, losses = layer(x_BTD)
    ((y_BTD * weight_BTD).sum() + 3 * losses.share_2[0] + 2 * losses.share_2[1]).backward()

    loop = copy.deepcopy(layer)
    loop.zero_grad()
    x_ND = x_BTD.detach().view(21, 16).clone().requires_grad_()
    y_ND, balance, z = plain_loop(loop, config, x_ND)
    ((y_ND * weight_BTD.view(21, 16)).sum() + 3 * balance + 2 * z).backward()

    assert error(y_BTD.view(21, 16), y_ND) < BOUND
    assert error(losses.share_2, torch.stack((balance, z))) < BOUND
    assert error(losses.whole_2, torch.stack((balance, z))) < BOUND
    assert x_BTD.grad is not None and x_ND.grad is not None
    assert error(x_BTD.grad.view(21, 16), x_ND.grad) < BOUND
    pairs = dict(loop.named_parameters())
    assert len(pairs) == 4 + 3 * bool(config.shared_ffn)
    for name, parameter in layer.named_parameters():
        wanted = pairs[name].grad
        assert parameter.grad is not None and wanted is not None, name
        assert error(parameter.grad, wanted) < BOUND, name


def test_an_expert_without_tokens_has_zero_gradients() -> None:
    config = config_of(top_k=1, renormalise=False)
    layer = feed_forward(config)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[4] = 1.0
    y_ND, losses = layer(torch.rand(5, 16))
    (y_ND.sum() + losses.share_2.sum()).backward()
    for weight in (layer.experts.gate, layer.experts.up, layer.experts.down):
        assert weight.grad is not None
        assert [bool(grad.any()) for grad in weight.grad] == [False, False, False, False, True, False]


def test_no_tokens_at_all() -> None:
    for changes in ({}, {"capacity_factor": 1.0, "shared_ffn": 8}):
        layer = feed_forward(config_of(**changes))
        y_BTD, losses = layer(torch.zeros(0, 7, 16))
        (y_BTD.sum() + losses.share_2.sum()).backward()
        assert y_BTD.shape == (0, 7, 16)
        assert losses.share_2.tolist() == [0, 0]
        assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


def test_even_routing_has_a_balance_loss_of_one_and_uneven_more() -> None:
    ranks = ExpertRanks(4)
    even = route(torch.eye(4) * 9, RoutingRule(top_k=1))
    assert float(router_losses(even, ranks).whole_2[0]) == pytest.approx(1.0, abs=1e-6)
    uneven = route(torch.tensor([[9.0, 0, 0, 0]] * 4), RoutingRule(top_k=1))
    assert float(router_losses(uneven, ranks).whole_2[0]) == pytest.approx(4.0, abs=0.01)


def test_first_choices_come_before_second_ones_and_early_tokens_before_late_ones() -> None:
    # Capacity 2 = ceil(0.75 * 2 * 4 / 3). Expert 0 is the first choice of tokens 1 and 3, so token 0's second choice
    # is dropped; expert 1 is the first choice of tokens 0 and 2, and token 1's second choice comes too late.
    experts_NK = torch.tensor([[1, 0], [0, 1], [1, 2], [0, 2]])
    rule = RoutingRule(top_k=2, capacity_factor=0.75)
    kept_NK = keep_within_capacity(experts_NK, rule, ExpertRanks(3))
    assert kept_NK is not None
    assert kept_NK.tolist() == [[True, False], [True, False], [True, True], [True, True]]


def test_a_dropped_token_passes_through_on_the_residual_stream() -> None:
    config = config_of(top_k=1, renormalise=False, capacity_factor=1.5)  # two rows of 8 for each of 6 experts
    torch.manual_seed(5)
    block = MoEBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        block.ffn_norm.weight.fill_(1.0)
        block.ffn.router.weight.zero_()  # all scores equal: every token takes the same expert
    x_BTD = torch.randn(1, 8, 16)
    cos_TE, sin_TE = torch.ones(8, 4), torch.zeros(8, 4)
    with torch.no_grad():
        out_BTD = block(x_BTD, cos_TE, sin_TE)[0]
        attended_BTD = x_BTD + block.attention(block.attention_norm(x_BTD), cos_TE, sin_TE)
    passed = (out_BTD == attended_BTD).all(-1)[0]
    assert passed.tolist() == [False, False] + [True] * 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_grouped_product_is_the_loop(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    counts = [5, 0, 3, 0]
    found = []
    for how in ("loop", "grouped"):
        torch.manual_seed(1)
        rows_MI = torch.randn(8, 16, dtype=dtype, requires_grad=True)
        weight_LOI = torch.randn(4, 24, 16, dtype=dtype, requires_grad=True)
        out_MO = grouped_linear(rows_MI, weight_LOI, counts, how=how)  # type: ignore[arg-type]
        (out_MO * torch.arange(24, dtype=dtype)).sum().backward()
        assert rows_MI.grad is not None and weight_LOI.grad is not None
        found.append((out_MO, rows_MI.grad, weight_LOI.grad))
    for loop, grouped in zip(*found, strict=True):
        assert error(grouped.float(), loop.float()) < (BOUND if dtype == torch.float32 else 1e-2)
    assert not found[1][2][1].any() and not found[1][2][3].any()


@pytest.mark.parametrize("kind", ["block", "block_reentrant"])
@pytest.mark.parametrize("factor", [None, 0.6])
def test_recomputation_changes_nothing(kind: Any, factor: float | None) -> None:
    config = config_of(dense_blocks=1, shared_ffn=8, capacity_factor=factor)
    tokens_BT = torch.arange(24).view(2, 12) % 37
    grads = []
    for each in ("none", kind):
        torch.manual_seed(0)
        decoder = dataclasses.replace(config.decoder, activation_checkpointing=each)
        model = MoEDecoder(dataclasses.replace(config, decoder=decoder))
        output = model(tokens_BT)
        (output.logits_BTV.square().mean() + model.router_loss(output)).backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for plain, again in zip(*grads, strict=True):
        assert plain is not None and again is not None
        assert torch.equal(plain, again)


def test_bf16_weights_route_in_fp32() -> None:
    torch.manual_seed(0)
    model = MoEDecoder(config_of(shared_ffn=8)).to(torch.bfloat16)
    output = model(torch.arange(12).view(1, 12))
    assert (output.logits_BTV.dtype, output.share_2.dtype) == (torch.bfloat16, torch.float32)
    (output.logits_BTV.float().square().mean() + model.router_loss(output)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_decoder_learns() -> None:
    torch.manual_seed(0)
    model = MoEDecoder(config_of(shared_ffn=8, dense_blocks=1, score="sigmoid"))
    tokens_BT = torch.randint(0, 37, (4, 13))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        output = model(tokens_BT[:, :-1])
        loss = F.cross_entropy(output.logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())
        (loss + model.router_loss(output)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_transformers_mixtral_has_the_same_logits_and_balance_loss() -> None:
    mixtral = pytest.importorskip("transformers.models.mixtral")
    torch.manual_seed(0)
    config = config_of()
    theirs = mixtral.MixtralForCausalLM(
        mixtral.MixtralConfig(
            vocab_size=37,
            hidden_size=16,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=6,
            num_experts_per_tok=2,
            max_position_embeddings=16,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            initializer_range=0.3,
            attn_implementation="eager",
            experts_implementation="eager",
        )
    )
    ours = MoEDecoder(config)
    weights = dict(theirs.state_dict())
    renamed = {
        "embedding.weight": weights["model.embed_tokens.weight"],
        "norm.weight": weights["model.norm.weight"],
        "head.weight": weights["lm_head.weight"],
    }
    for layer in range(2):
        get = f"model.layers.{layer}."
        put = f"blocks.{layer}."
        for mine, its in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "o")):
            renamed[f"{put}attention.{mine}.weight"] = weights[f"{get}self_attn.{its}_proj.weight"]
        renamed[f"{put}attention_norm.weight"] = weights[f"{get}input_layernorm.weight"]
        renamed[f"{put}ffn_norm.weight"] = weights[f"{get}post_attention_layernorm.weight"]
        renamed[f"{put}ffn.router.weight"] = weights[f"{get}mlp.gate.weight"]
        both = weights[f"{get}mlp.experts.gate_up_proj"]
        renamed[f"{put}ffn.experts.gate"], renamed[f"{put}ffn.experts.up"] = both.chunk(2, dim=1)
        renamed[f"{put}ffn.experts.down"] = weights[f"{get}mlp.experts.down_proj"]
    ours.load_state_dict(renamed)
    tokens_BT = torch.randint(0, 37, (2, 11))
    with torch.no_grad():
        wanted = theirs(tokens_BT, output_router_logits=True)
        found = ours(tokens_BT)
    assert error(found.logits_BTV, wanted.logits) < BOUND
    # Ours is summed over blocks, and theirs counts a token once for each of its experts.
    balance = mixtral.modeling_mixtral.load_balancing_loss_func
    theirs_summed = sum(float(balance((logits.view(22, 6),), 6, 2)) / 2 for logits in wanted.router_logits)
    assert float(found.whole_2[0]) == pytest.approx(theirs_summed, rel=BOUND)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k": 7}, "top_k is 7, but there are 6 experts"),
        ({"top_k": 0}, "model.top_k is 0"),
        ({"expert_ffn": 0}, "model.expert_ffn is 0"),
        ({"balance_weight": -1.0}, "model.balance_weight is -1.0"),
        ({"dense_blocks": 3}, "the model has 2 blocks"),
        ({"score": "tanh"}, "Valid: softmax, sigmoid"),
        ({"capacity_factor": 0.0}, "capacity_factor is 0.0"),
    ],
    ids=str,
)
def test_values_out_of_range(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(oe.ConfigError, match=words):
        config_of(**changes)


def test_a_rule_with_too_many_choices_is_refused() -> None:
    with pytest.raises(oe.ConfigError, match="top_k is 3, but there are 2 experts"):
        route(torch.zeros(4, 2), RoutingRule(top_k=3))
