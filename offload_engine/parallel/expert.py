"""Routed experts that are shared out over ranks: routing, dispatch, the experts' products, and the router's losses.

Tokens stay where they are; the rows of a token go to the ranks of its experts, and come back (expert parallelism).
With one rank nothing is sent, and everything else is the same code.
Shapes: N tokens of this rank, D model width, X experts in all, L = X / R experts of each of R ranks, K experts of a
token, S rows that leave this rank, M rows that its experts get, F inner width of an expert.

Gradients: each rank's loss is its share of the loss of all ranks, which is the *sum* of the shares. So the gradients of
what is replicated (the router) have to be summed over all ranks that have tokens; an expert's gradient has come
together on its rank already and is summed over the ranks that hold the same expert. Whoever averages gradients over
ranks instead multiplies the losses here by their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from offload_engine.errors import ConfigError, UnsupportedError
from offload_engine.parallel.collectives import gather_rows, group_rank, group_size
from offload_engine.parallel.expert_exchange import exchange_counts, exchange_rows

__all__ = [
    "ExpertRanks",
    "ExpertWeights",
    "RouterLosses",
    "Routing",
    "RoutingRule",
    "grouped_linear",
    "keep_within_capacity",
    "route",
    "router_losses",
    "run_experts",
    "share_experts",
]


@dataclass(frozen=True, kw_only=True)
class RoutingRule:
    """How a token chooses its experts.

    Args:
        top_k: experts of a token.
        score: "softmax" over all experts (Mixtral), or "sigmoid" of each (DeepSeek-V3, arXiv 2412.19437).
        renormalise: divide the gates of a token by their sum.
        gate_scale: factor of the gates, after that.
        capacity_factor: an expert takes at most ceil(factor * K * tokens / X) rows; None: all of them (dropless).

    Raises:
        ConfigError: a value is out of its range.
    """

    top_k: int = 2
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    gate_scale: float = 1.0
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ConfigError(f"top_k is {self.top_k}; a token needs 1 expert or more.")
        if self.score not in ("softmax", "sigmoid"):
            raise ConfigError(f"score is {self.score!r}. Valid: softmax, sigmoid.")
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ConfigError(
                f"capacity_factor is {self.capacity_factor}; it must be above zero, or None for no limit."
            )

    def capacity(self, tokens: int, experts: int) -> int | None:
        """Return how many rows an expert takes of that many tokens, of all ranks together; None: no limit."""
        if self.capacity_factor is None:
            return None
        return math.ceil(self.capacity_factor * self.top_k * tokens / experts)


class Routing(NamedTuple):
    """What the router decided for each token."""

    experts_NK: Tensor
    """int64, the likeliest expert first."""
    gates_NK: Tensor
    """fp32, with gradient."""
    probs_NX: Tensor
    """fp32, with gradient: scores that sum to 1 over the experts."""
    logits_NX: Tensor
    """fp32, with gradient."""


class ExpertWeights(NamedTuple):
    """The SwiGLU weights of the experts of this rank, stacked as (experts, out, in)."""

    gate_LFD: Tensor
    up_LFD: Tensor
    down_LDF: Tensor


class RouterLosses(NamedTuple):
    """Losses over the tokens of all ranks, unweighted."""

    share_2: Tensor
    """fp32, with gradient: this rank's share of (load-balancing loss, z-loss). The shares of all ranks sum to it."""
    whole_2: Tensor
    """fp32, without gradient: the two losses, the same on all ranks."""


class ExpertRanks:
    """Who holds which expert, and whose tokens count together. Owns nothing; the groups are `torch.distributed`'s.

    Args:
        experts: number of experts in all.
        group: ranks that share out the experts: rank r has the r-th block of `experts / ranks`. None: this one alone.
        data_group: ranks whose tokens make up the batch, for the router's losses and the capacity; contains `group`.
            None: `group`.

    Raises:
        ConfigError: the ranks do not divide the experts; names the nearest numbers that are possible.
    """

    def __init__(
        self,
        experts: int,
        group: dist.ProcessGroup | None = None,
        data_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.experts = experts
        self.group = group
        self.data_group = group if data_group is None else data_group
        self.size, self.rank = group_size(group), group_rank(group)
        _check_divides(experts, self.size)
        self.per_rank = experts // self.size

    @property
    def own(self) -> slice:
        """The experts of this rank."""
        return slice(self.rank * self.per_rank, (self.rank + 1) * self.per_rank)


def _check_divides(experts: int, ranks: int) -> None:
    if experts >= 1 and experts % ranks == 0:
        return
    numbers = sorted({max(1, experts // ranks) * ranks, (max(0, experts) // ranks + 1) * ranks})
    divisors = [number for number in range(1, experts + 1) if experts % number == 0]
    below = [number for number in divisors if number < ranks][-1:]
    fitting = below + [number for number in divisors if number > ranks][:1]
    other = f", or {experts} experts over {' or '.join(map(str, fitting))} ranks" if fitting else ""
    raise ConfigError(
        f"{experts} experts cannot be shared out over {ranks} ranks. Nearest: {' or '.join(map(str, numbers))} experts "
        f"over {ranks} ranks{other}."
    )


def route(logits_NX: Tensor, rule: RoutingRule) -> Routing:
    """Choose the experts of each token and their gates.

    Softmax with renormalised gates is Mixtral's router (arXiv 2401.04088, section 2.1), sigmoid with renormalised gates
    DeepSeek-V3's (arXiv 2412.19437, equations 12 to 15).

    Args:
        logits_NX: any floating dtype; scores are taken in fp32 (the selective precision of arXiv 2101.03961).

    Raises:
        ConfigError: a token is to have more experts than there are.
    """
    if rule.top_k > logits_NX.shape[1]:
        raise ConfigError(
            f"top_k is {rule.top_k}, but there are {logits_NX.shape[1]} experts; it may be that many at most."
        )
    logits_NX = logits_NX.float()
    if rule.score == "softmax":
        scores_NX = probs_NX = logits_NX.softmax(dim=-1)
    else:
        scores_NX = logits_NX.sigmoid()
        probs_NX = scores_NX / scores_NX.sum(dim=-1, keepdim=True)
    gates_NK, experts_NK = scores_NX.topk(rule.top_k, dim=-1)
    if rule.renormalise:
        gates_NK = gates_NK / gates_NK.sum(dim=-1, keepdim=True)
    return Routing(experts_NK, gates_NK * rule.gate_scale, probs_NX, logits_NX)


def router_losses(routing: Routing, ranks: ExpertRanks) -> RouterLosses:
    """Return the load-balancing loss and the z-loss over the tokens of all ranks of `data_group`.

    Balance: X * sum over experts of f * P, where f is the expert's share of all choices, before any is dropped, and P
    its mean probability (arXiv 2101.03961, equations 4 to 6, with f over the K choices of a token). 1 when even.
    z: the mean square of the logits' logsumexp (arXiv 2202.08906, equation 5).

    f has no gradient and P is a mean over tokens, so each rank's own part of P, with f and the number of tokens of all
    ranks, is a share whose gradient needs no exchange. Every rank has to call it, also one without tokens.
    """
    experts = ranks.experts
    tokens, choices = routing.experts_NK.shape
    counts_X = torch.bincount(routing.experts_NK.reshape(-1), minlength=experts)
    probs_X = routing.probs_NX.sum(dim=0)
    squares = routing.logits_NX.logsumexp(dim=-1).square().sum()
    # fp64: numbers of tokens stay exact beside sums of probabilities, so that one exchange does for all of them.
    sums = torch.cat((counts_X.double(), probs_X.detach().double(), squares.detach().double().reshape(1)))
    sums = torch.cat((sums, sums.new_tensor([tokens])))
    whole = _sum_in_order(gather_rows(sums, ranks.data_group, "sums of the router"))
    total = whole[-1].clamp(min=1)
    shares_X = whole[:experts] / (total * choices)
    weights_X = shares_X * (experts / total)
    balance = (weights_X.float() * probs_X).sum()
    balance_whole = (weights_X * whole[experts : 2 * experts]).sum()
    share_2 = torch.stack((balance, squares / total.float()))
    return RouterLosses(share_2, torch.stack((balance_whole, whole[-2] / total)).float())


def _sum_in_order(rows_RA: Tensor) -> Tensor:
    total_A = rows_RA[0].clone()
    for row_A in rows_RA[1:]:
        total_A += row_A
    return total_A


def keep_within_capacity(experts_NK: Tensor, rule: RoutingRule, ranks: ExpertRanks) -> Tensor | None:
    """Return which choices are carried out (bool, N x K); None: all of them.

    The drop rule: an expert takes choices in this order until it has its capacity, and drops those that come later:
    first choices of all tokens before second choices (GShard, arXiv 2006.16668, algorithm 1), within them the tokens in
    the order of the ranks of `data_group`, and on a rank in the order of its rows. Capacity is over the tokens of all
    those ranks, so the same tokens in the same order drop the same choices on any number of ranks. What is dropped adds
    nothing; the other gates of the token stay as they were. A token that loses all its choices gets zeros from the
    routed experts, and so passes through on the residual stream.

    Every rank has to call it, also one without tokens.
    """
    if rule.capacity_factor is None:
        return None
    tokens, choices = experts_NK.shape
    experts = ranks.experts
    # One number for each choice and expert; a stable sort by it numbers the tokens that have it in common.
    pairs = (experts_NK + experts * torch.arange(choices, device=experts_NK.device)).T.reshape(-1)
    counts = torch.bincount(pairs, minlength=choices * experts)
    counts_RKX = gather_rows(counts.view(choices, experts), ranks.data_group, "sums of the router")
    capacity = rule.capacity(int(counts_RKX.sum()) // choices, experts)
    assert capacity is not None
    totals_KX = counts_RKX.sum(dim=0)
    earlier_choices_KX = totals_KX.cumsum(dim=0) - totals_KX
    earlier_ranks_KX = counts_RKX[: group_rank(ranks.data_group)].sum(dim=0)
    first_places = (earlier_choices_KX + earlier_ranks_KX).view(-1) - (counts.cumsum(dim=0) - counts)
    order = pairs.argsort(stable=True)
    sorted_places = first_places[pairs[order]] + torch.arange(len(order), device=order.device)
    places = torch.empty_like(pairs).index_copy(0, order, sorted_places)
    return places.view(choices, tokens).T < capacity


def run_experts(
    x_ND: Tensor, routing: Routing, kept_NK: Tensor | None, weights: ExpertWeights, ranks: ExpertRanks
) -> Tensor:
    """Send each token to its experts and return the sum of what they gave, weighted by the gates.

    Three exchanges forward (numbers, rows there, rows back) and two backward, made by every rank of the group, whatever
    has tokens: ranks and experts without any take part with no rows, and their gradients are zeros, not None.

    Args:
        x_ND: tokens of this rank, N may be 0. `requires_grad` must be the same on all ranks.
        kept_NK: choices that are carried out, of `keep_within_capacity`.
        weights: of this rank's experts, in the dtype of `x_ND`.

    Returns:
        (N, D) in the dtype of `x_ND`. The sum over the K choices of a token is made in fp32, in their order.

    Raises:
        UnsupportedError: the weights are not those of this rank's experts.
    """
    _check_weights(weights, ranks, x_ND)
    tokens, choices = routing.experts_NK.shape
    order_S, counts_X = _rows_by_expert(routing.experts_NK, kept_NK, ranks.experts)
    sent_RL = counts_X.view(ranks.size, ranks.per_rank)
    got_RL = exchange_counts(sent_RL, ranks.group)
    sends: list[int] = sent_RL.sum(dim=1).tolist()
    receives: list[int] = got_RL.sum(dim=1).tolist()

    # A row per choice first: then no row is picked twice, and the backward adds up in a fixed order.
    rows_SD = x_ND.repeat_interleave(choices, dim=0).index_select(0, order_S)
    arrived_MD = exchange_rows(rows_SD, sends, receives, ranks.group)
    if ranks.size > 1:
        # Rows lie by rank and then by expert; the products need all rows of an expert side by side.
        experts_M = torch.arange(ranks.per_rank, device=x_ND.device).repeat(ranks.size)
        experts_M = experts_M.repeat_interleave(got_RL.reshape(-1))
        by_expert_M = experts_M.argsort(stable=True)
        arrived_MD = arrived_MD.index_select(0, by_expert_M)
    out_MD = _swiglu(arrived_MD, weights, got_RL.sum(dim=0).tolist())
    if ranks.size > 1:
        out_MD = out_MD.index_select(0, by_expert_M.argsort())
    returned_SD = exchange_rows(out_MD, receives, sends, ranks.group)

    # Dropped choices keep their zeros.
    width = x_ND.shape[1]
    all_D = returned_SD.new_zeros((tokens * choices, width)).index_copy(0, order_S, returned_SD)
    gated_NKD = all_D.view(tokens, choices, width) * routing.gates_NK.unsqueeze(-1)
    return gated_NKD.sum(dim=1).to(x_ND.dtype)


def _rows_by_expert(experts_NK: Tensor, kept_NK: Tensor | None, experts: int) -> tuple[Tensor, Tensor]:
    """Return the carried-out choices, as numbers n * K + k, ordered by expert, and how many each expert has."""
    flat = experts_NK.reshape(-1)
    if kept_NK is not None:
        flat = torch.where(kept_NK.reshape(-1), flat, experts)  # what is dropped comes last
    counts_X = torch.bincount(flat, minlength=experts + 1)[:experts]
    order = flat.argsort(stable=True)
    return (order if kept_NK is None else order[: int(counts_X.sum())]), counts_X


def _check_weights(weights: ExpertWeights, ranks: ExpertRanks, x_ND: Tensor) -> None:
    width = x_ND.shape[1]
    inner = weights.down_LDF.shape[-1]
    wanted = [(ranks.per_rank, inner, width)] * 2 + [(ranks.per_rank, width, inner)]
    found = [tuple(weight.shape) for weight in weights]
    if found != wanted:
        raise UnsupportedError(
            f"the experts' weights (gate, up, down) are {found}, not (experts, out, in) = {wanted}. Each of "
            f"{ranks.size} ranks has {ranks.per_rank} of {ranks.experts} experts; share_experts() cuts them."
        )


def _swiglu(rows_MD: Tensor, weights: ExpertWeights, counts: Sequence[int]) -> Tensor:
    gate_MF = grouped_linear(rows_MD, weights.gate_LFD, counts)
    up_MF = grouped_linear(rows_MD, weights.up_LFD, counts)
    return grouped_linear(F.silu(gate_MF) * up_MF, weights.down_LDF, counts)


def grouped_linear(
    rows_MI: Tensor,
    weight_LOI: Tensor,
    counts: Sequence[int],
    *,
    how: Literal["auto", "loop", "grouped"] = "auto",
) -> Tensor:
    """Multiply each run of rows by its expert's own matrix: rows @ weight.T.

    Args:
        rows_MI: all rows of expert 0, then of expert 1, and so on.
        counts: rows of each of the L experts; their sum is M. May be 0.
        how: "grouped": one product of torch for all experts; "loop": one product per expert; "auto": the grouped one
            where torch has a kernel for it. On a CPU torch's own grouped product is a loop, too, with conditions on
            sizes, so "auto" takes the loop there.

    Returns:
        (M, O). Gradients of experts without rows are zeros.
    """
    if how == "grouped" or (how == "auto" and _has_grouped_kernel(rows_MI, weight_LOI)):
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        product: Tensor = torch._grouped_mm(rows_MI, weight_LOI.transpose(-2, -1), ends.to(rows_MI.device))
        return product
    # unbind: indexing each expert would give as many gradients of the size of all of them.
    runs = zip(rows_MI.split(list(counts)), weight_LOI.unbind(), strict=True)
    return torch.cat([F.linear(run_I, weight_OI) for run_I, weight_OI in runs])


def _has_grouped_kernel(rows_MI: Tensor, weight_LOI: Tensor) -> bool:
    capable: bool = (
        rows_MI.device.type == "cuda"
        and rows_MI.dtype == weight_LOI.dtype == torch.bfloat16
        and rows_MI.shape[0] > 0
        and hasattr(torch, "_grouped_mm")
        and torch.get_device_module(rows_MI.device).get_device_capability(rows_MI.device) >= (8, 0)
        # Each row must start at a multiple of 16 bytes.
        and all(size * rows_MI.element_size() % 16 == 0 for size in weight_LOI.shape[1:])
    )
    return capable


def share_experts(model: nn.Module, ranks: ExpertRanks) -> int:
    """Keep only this rank's experts, and send tokens to the others from now on.

    Takes every module with an attribute `expert_ranks` (an `ExpertRanks` of one rank), whose direct parameters are
    stacks of whole experts, (X, ...). Each gets a new parameter of the own experts, (L, ...), a copy, and `ranks`.
    Call it before an optimizer or an engine takes the parameters. Every rank has to start from the same values.

    Returns:
        The number of modules.

    Raises:
        UnsupportedError: no module has such experts, or they are shared out already.
        ConfigError: a module has another number of experts than `ranks`.
    """
    modules = [module for module in model.modules() if isinstance(_ranks_of(module), ExpertRanks)]
    if not modules:
        raise UnsupportedError(
            "the model has no module with stacked experts, that is, with an attribute expert_ranks."
        )
    for module in modules:
        before = _ranks_of(module)
        assert before is not None
        if before.size > 1:
            raise UnsupportedError(
                f"the experts are shared out over {before.size} ranks already. Build the model anew to do it otherwise."
            )
        if before.experts != ranks.experts:
            raise ConfigError(
                f"a module has {before.experts} experts, the ranks are to share out {ranks.experts}."
            )
    for module in modules:
        for name, weight in list(module.named_parameters(recurse=False)):
            own = weight.detach()[ranks.own].clone()
            setattr(module, name, nn.Parameter(own, requires_grad=weight.requires_grad))
        setattr(module, "expert_ranks", ranks)  # noqa: B010 - mypy takes plain attributes for submodules
    return len(modules)


def _ranks_of(module: nn.Module) -> ExpertRanks | None:
    ranks: ExpertRanks | None = getattr(module, "expert_ranks", None)
    return ranks
