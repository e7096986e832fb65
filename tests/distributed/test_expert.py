"""Experts on several ranks against one process with all tokens: outputs, losses and every gradient."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import offload_engine as oe
from offload_engine.parallel.expert import ExpertRanks, keep_within_capacity, share_experts
from offload_engine.parallel.expert_exchange import exchange_rows
from offload_engine.training.config import DecoderConfig
from offload_engine.training.models.moe import MoEConfig, MoEDecoder, MoEFeedForward
from tests.distributed.ranks import on_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(110)]

BOUND = 2e-6
EXPERTS = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer and how many tokens each rank has."""

    tokens: tuple[int, ...] = (5, 9, 7, 3)
    """Of up to 4 ranks; the first `world` numbers count."""
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of `MoEConfig`."""
    favour: tuple[int, ...] = ()
    """Experts that all tokens go to."""
    strength: float = 40.0
    """Their logits. Softmax gates beside a large one are small, and as inexact as the large logit is."""
    ep: int = 0
    """Ranks that share out the experts; 0: all. The others hold the same ones."""


CASES = {
    "mixtral": Case(),
    "deepseek": Case(changes={"score": "sigmoid", "gate_scale": 2.5, "shared_ffn": 12, "top_k": 3}),
    "one_expert_of_a_token": Case(changes={"top_k": 1, "renormalise": False}),
    "all_experts": Case(changes={"top_k": EXPERTS}),
    "all_tokens_to_one_expert": Case(favour=(6,), changes={"top_k": 1, "renormalise": False}),
    "all_tokens_to_two_experts": Case(favour=(1, 0)),
    "a_rank_without_tokens": Case(tokens=(6, 0, 4, 0)),
    "first_rank_without_tokens": Case(tokens=(0, 3, 0, 1), changes={"shared_ffn": 12}),
    "no_tokens": Case(tokens=(0, 0, 0, 0), changes={"capacity_factor": 1.0}),
    "capacity": Case(changes={"capacity_factor": 0.6}),
    "tight_capacity": Case(changes={"capacity_factor": 0.15, "top_k": 3, "shared_ffn": 12}),
    "capacity_one_expert": Case(favour=(5,), changes={"capacity_factor": 2.0, "top_k": 1}),
    "capacity_without_tokens": Case(tokens=(0, 6, 0, 5), changes={"capacity_factor": 0.5}),
    "data_ranks": Case(ep=2),
    "data_ranks_with_capacity": Case(ep=2, changes={"capacity_factor": 0.6}),
    "only_data_ranks": Case(ep=1, changes={"capacity_factor": 0.8}),
}


def config_of(case: Case) -> MoEConfig:
    decoder = DecoderConfig(dim=16, layers=2, heads=4, kv_heads=2, ffn=24, vocab=37, seq=16)
    return MoEConfig(**({"decoder": decoder, "experts": EXPERTS, "expert_ffn": 12} | case.changes))


def error(found: Tensor, wanted: Tensor, own: slice | None = None) -> float:
    """Return the largest difference to the own part of what is wanted, relative to the largest value of all of it.

    Where all values are zero, it is the largest one found.
    """
    if not found.numel():
        return 0.0
    found, wanted = found.detach(), wanted.detach()
    largest = float(wanted.abs().max())
    mine = wanted if own is None else wanted[own]
    return float((found - mine).abs().max()) / (largest or 1.0)


@functools.cache
def groups_of(ep: int) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return this rank's group of ranks that share out the experts, and the one that holds the same ones."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sharing = [list(range(start, start + ep)) for start in range(0, world, ep)]
    holding = [list(range(first, world, ep)) for first in range(ep)]
    own: list[dist.ProcessGroup | None] = []
    for lists in (sharing, holding):
        made = [dist.new_group(ranks) for ranks in lists]  # every rank makes every group
        own.append(next(group for group, ranks in zip(made, lists, strict=True) if rank in ranks))
    return own[0], own[1]


def gradients(module: nn.Module) -> dict[str, Tensor]:
    named = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert all(grad is not None for grad in named.values()), named
    return {name: grad for name, grad in named.items() if grad is not None}


def compare_gradients(
    found: nn.Module, wanted: nn.Module, ranks: ExpertRanks, holders: dist.ProcessGroup | None
) -> dict[str, float]:
    """Sum up what the ranks have, as a finaliser would, and return the error of each parameter's gradient."""
    errors = {}
    reference = gradients(wanted)
    for name, grad in gradients(found).items():
        whole = reference[name]
        if ".experts." in f".{name}":
            dist.all_reduce(grad, group=holders)
            errors[name] = error(grad, whole, ranks.own)
        else:
            dist.all_reduce(grad)
            errors[name] = error(grad, whole)
    assert len(errors) == len(reference)
    return errors


def layer_errors(case: Case) -> dict[str, float]:
    """Run a layer on this rank's tokens and on all of them here alone; return the differences."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = config_of(case)
    torch.manual_seed(3)
    reference = MoEFeedForward(config)
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.5)
    counts = case.tokens[:world]
    x_ND, weight_ND = torch.randn(sum(counts), 16), torch.randn(sum(counts), 16)
    if case.favour:
        with torch.no_grad():
            x_ND[:, 0] = 1.0
            for place, expert in enumerate(case.favour):
                reference.router.weight[expert, 0] = case.strength * (1 - place / 4)
    layer = copy.deepcopy(reference)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))

    def run(module: MoEFeedForward, x_ND: Tensor, weight_ND: Tensor) -> tuple[Tensor, Any]:
        y_ND, losses = module(x_ND)
        ((y_ND * weight_ND).sum() + 3 * losses.share_2[0] + 2 * losses.share_2[1]).backward()
        return y_ND, losses

    every_ND = x_ND.clone().requires_grad_()
    wanted_ND, wanted = run(reference, every_ND, weight_ND)
    group, holders = groups_of(case.ep or world)
    ranks = ExpertRanks(config.experts, group, dist.group.WORLD)
    assert share_experts(layer, ranks) == 1
    mine_ND = x_ND[own].clone().requires_grad_()
    found_ND, found = run(layer, mine_ND, weight_ND[own])

    assert mine_ND.grad is not None and every_ND.grad is not None
    shares_2 = found.share_2.detach().clone()
    dist.all_reduce(shares_2)
    errors = {
        "out": error(found_ND, wanted_ND, own),
        "input": error(mine_ND.grad, every_ND.grad, own),
        "sum of shares": error(shares_2, wanted.share_2),
        "whole losses": error(found.whole_2, wanted.whole_2),
    }
    experts_NK = reference.router(x_ND).experts_NK
    kept_NK = keep_within_capacity(experts_NK, config.rule, ExpertRanks(config.experts))
    if kept_NK is not None:
        mine_NK = keep_within_capacity(experts_NK[own], config.rule, ranks)
        assert mine_NK is not None
        errors["choices dropped elsewhere"] = float((mine_NK != kept_NK[own]).sum())
        errors["dropped"] = float((~kept_NK).sum())
    errors["experts without tokens"] = config.experts - float(len(experts_NK.unique()))
    return errors | compare_gradients(layer, reference, ranks, holders)


def decoder_errors(kind: Any, factor: float | None) -> dict[str, float]:
    """A whole decoder, each rank with sequences of its own, the last one with fewer."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    config = config_of(Case(changes={"dense_blocks": 1, "shared_ffn": 12, "capacity_factor": factor}))
    decoder = dataclasses.replace(config.decoder, layers=3, activation_checkpointing=kind)
    reference = MoEDecoder(dataclasses.replace(config, decoder=decoder, balance_weight=0.1, z_weight=0.1))
    for name, parameter in reference.named_parameters():
        if "norm" not in name:
            nn.init.normal_(parameter, std=0.3)
    model = copy.deepcopy(reference)
    tokens_BT = torch.randint(0, 37, (2 * world - 1, 11))

    def run(module: MoEDecoder, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        output = module(tokens_BT[:, :-1])
        each = F.cross_entropy(output.logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten(), reduction="sum")
        loss = each / (10 * (2 * world - 1)) + module.router_loss(output)
        loss.backward()
        return output.logits_BTV, loss.detach()

    wanted_BTV, wanted = run(reference, tokens_BT)
    group, holders = groups_of(world)
    ranks = ExpertRanks(EXPERTS, group)
    assert share_experts(model, ranks) == 2
    own = slice(2 * rank, 2 * rank + 2)
    found_BTV, found = run(model, tokens_BT[own])
    dist.all_reduce(found)
    errors = {"logits": error(found_BTV, wanted_BTV, own), "loss": error(found, wanted)}
    return errors | compare_gradients(model, reference, ranks, holders)


def refusals() -> list[str]:
    """What is refused alike on all ranks, with more than one of them."""
    messages = []
    ranks = ExpertRanks(EXPERTS, dist.group.WORLD)
    shared = MoEFeedForward(config_of(Case()))
    share_experts(shared, ranks)
    others = MoEFeedForward(config_of(Case(changes={"experts": 4})))
    whole = MoEFeedForward(config_of(Case()))
    whole.experts.expert_ranks = ranks
    for attempt in (
        lambda: share_experts(shared, ranks),
        lambda: share_experts(others, ranks),
        lambda: share_experts(nn.Linear(3, 3), ranks),
        lambda: whole(torch.zeros(2, 16)),
        lambda: ExpertRanks(9, dist.group.WORLD),
    ):
        try:
            attempt()
        except oe.OffloadEngineError as fault:
            messages.append(f"{type(fault).__name__}: {fault}")
    return messages


def exchanged() -> list[float]:
    """Rows with gradients through an uneven exchange, with zeros in it; the gradient is a transposed view."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sends = [(rank + 2 * to) % 3 for to in range(world)]
    receives = [(source + 2 * rank) % 3 for source in range(world)]
    rows_SD = torch.arange(sum(sends) * 2.0).view(-1, 2).add(100.0 * rank).requires_grad_()
    got_MD = exchange_rows(rows_SD, sends, receives, dist.group.WORLD)
    (got_MD.T.contiguous().T * 2).sum().backward()
    assert rows_SD.grad is not None and bool((rows_SD.grad == 2).all())
    return [float(value) for value in got_MD.detach()[:, 0]]


def everything() -> dict[str, Any]:
    layers = {name: layer_errors(case) for name, case in CASES.items()}
    decoders = {
        (kind, factor): decoder_errors(kind, factor)
        for kind in ("none", "block", "block_reentrant")
        for factor in (None, 0.5)
    }
    return {"layers": layers, "decoders": decoders, "refusals": refusals(), "rows": exchanged()}


@functools.cache
def launched(world: int) -> list[dict[str, Any]] | AssertionError:
    """One launch for all cases: starting processes is what costs here, most of all those that hang."""
    try:
        return on_ranks(world, everything)
    except AssertionError as fault:
        return fault


def results(world: int) -> list[dict[str, Any]]:
    found = launched(world)
    if isinstance(found, AssertionError):
        raise found
    return found


WORLDS = pytest.mark.parametrize("world", [2, 4])


def largest(per_rank: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(errors[name] for errors in per_rank) for name in per_rank[0]}


@WORLDS
@pytest.mark.parametrize("name", CASES)
def test_the_layer_is_that_of_one_process(world: int, name: str) -> None:
    errors = largest([each["layers"][name] for each in results(world)])
    dropped = errors.pop("dropped", 0.0)
    assert (dropped > 0) == ("capacity" in name and name != "no_tokens" or name == "only_data_ranks")
    empty = errors.pop("experts without tokens")
    if name.startswith("all_tokens_to"):
        assert empty == EXPERTS - len(CASES[name].favour)
    assert {"out", "input", "sum of shares", "whole losses", "router.weight", "experts.down"} < set(errors)
    assert max(errors.values()) <= BOUND, errors


@WORLDS
@pytest.mark.parametrize("factor", [None, 0.5])
@pytest.mark.parametrize("kind", ["none", "block", "block_reentrant"])
def test_the_decoder_is_that_of_one_process(world: int, kind: str, factor: float | None) -> None:
    errors = largest([each["decoders"][kind, factor] for each in results(world)])
    assert len(errors) == 38 + 2
    assert max(errors.values()) <= BOUND, errors


@WORLDS
def test_rows_come_in_the_order_of_ranks(world: int) -> None:
    for rank, result in enumerate(results(world)):
        wanted = []
        for source in range(world):
            sends = [(source + 2 * to) % 3 for to in range(world)]
            wanted += [100.0 * source + 2.0 * (sum(sends[:rank]) + row) for row in range(sends[rank])]
        assert result["rows"] == wanted


@WORLDS
def test_refusals_say_what_would_do(world: int) -> None:
    for result in results(world):
        again, other, none, whole, uneven = result["refusals"]
        assert f"shared out over {world} ranks already" in again
        assert "a module has 4 experts, the ranks are to share out 8" in other
        assert none.startswith("UnsupportedError") and "no module with stacked experts" in none
        assert whole.startswith("UnsupportedError") and f"{8 // world} of 8 experts" in whole
        nearest = "8 or 10 experts over 2 ranks, or 9 experts over 1 or 3" if world == 2 else (
            "8 or 12 experts over 4 ranks, or 9 experts over 3 or 9"
        )  # fmt: skip
        assert (
            uneven
            == f"ConfigError: 9 experts cannot be shared out over {world} ranks. Nearest: {nearest} ranks."
        )


def ends_before_the_exchange(backward: bool) -> None:
    rank = dist.get_rank()
    layer = MoEFeedForward(config_of(Case()))
    share_experts(layer, ExpertRanks(EXPERTS, dist.group.WORLD))
    if rank == 1 and not backward:
        os._exit(0)
    y_ND, _ = layer(torch.randn(5, 16))
    if rank == 1:
        os._exit(0)
    y_ND.sum().backward()


@pytest.mark.parametrize("backward", [False, True])
def test_a_rank_that_is_gone_is_an_error_of_the_others(backward: bool) -> None:
    with pytest.raises(AssertionError, match="RankError: the exchange of .* between ranks .0, 1. failed: "):
        on_ranks(2, ends_before_the_exchange, backward)


def random_layers(seeds: range) -> dict[int, dict[str, float]]:
    found = {}
    for seed in seeds:
        draw = random.Random(seed)
        experts = 4 * dist.get_world_size()
        changes = {
            "experts": experts,
            "top_k": draw.randint(1, 6),
            "score": draw.choice(["softmax", "sigmoid"]),
            "renormalise": draw.random() < 0.5,
            "shared_ffn": draw.choice([0, 8]),
            "capacity_factor": draw.choice([None, 0.3, 0.8, 1.5]),
        }
        tokens = tuple(draw.choice([0, 1, 2, 9, 30]) for _ in range(4))
        favour = tuple(draw.sample(range(experts), draw.choice([0, 0, 1, 2])))
        found[seed] = layer_errors(Case(tokens=tokens, changes=changes, favour=favour, strength=8.0))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 4])
def test_random_layers_are_those_of_one_process(world: int) -> None:
    per_rank = on_ranks(world, random_layers, range(40))
    for seed in range(40):
        errors = largest([each[seed] for each in per_rank])
        del errors["experts without tokens"]
        errors.pop("dropped", None)
        assert max(errors.values()) <= BOUND, (seed, errors)
