"""Attention over several ranks against scaled_dot_product_attention of one process: outputs and gradients."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from offload_engine.errors import ConfigError, OffloadEngineError, RankError, UnsupportedError
from offload_engine.parallel.attention_kernels import KERNELS
from offload_engine.parallel.context import (
    pad_sequence,
    sequence_multiple,
    zigzag_merge,
    zigzag_positions,
    zigzag_split,
)
from offload_engine.parallel.context_exchange import RingShift, context_groups, swap_even
from offload_engine.parallel.ring import _Job, merge_attention, ring_attention
from offload_engine.parallel.ulysses import repeats_of_key_heads, ulysses_attention
from tests.distributed.ranks import RankFailedError, on_ranks

multiproc = pytest.mark.multiproc
pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(110)]

BOUND = 2e-6
BOUNDS = {torch.float32: BOUND, torch.float64: 4e-15, torch.bfloat16: 2e-2}
E = 24


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of attention. Lengths of sequences are made to fit by padding at the end, with key lengths."""

    causal: bool = True
    heads: int = 4
    key_heads: int = 4
    length: int = 48
    rows: int = 2
    ulysses: int = 1
    """Ranks that exchange heads."""
    lengths: tuple[int, ...] = ()
    """Keys that count, of each row."""
    documents: tuple[int, ...] = ()
    """Tokens of each document; the second row has them in reverse."""
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    apart: bool = False
    """Tokens before heads in memory, as projections leave them."""


RING = {
    "causal": Case(),
    "full": Case(causal=False),
    "grouped": Case(key_heads=2),
    "grouped_full": Case(key_heads=1, causal=False),
    "odd_heads": Case(heads=3, key_heads=3),
    "odd_heads_grouped": Case(heads=15, key_heads=5, causal=False),
    "one_chunk_one_token": Case(length=8, rows=1),
    "scaled": Case(scale=0.4),
    "heads_after_tokens": Case(apart=True, key_heads=2),
    "padded": Case(lengths=(48, 29)),
    "padded_full": Case(causal=False, lengths=(31, 5), key_heads=2),
    "padded_to_fit": Case(length=41),
    "padded_to_fit_full": Case(length=41, causal=False),
    "rows_without_keys": Case(causal=False, lengths=(0, 13)),
    "documents": Case(documents=(20, 3, 25), key_heads=2),
    "documents_full": Case(causal=False, documents=(20, 3, 25)),
    "many_documents": Case(documents=(1,) * 9 + (7, 6, 5, 21)),
    "documents_and_padding": Case(documents=(11, 30, 7), lengths=(44, 17)),
    "double": Case(dtype=torch.float64, key_heads=2),
    "bf16": Case(dtype=torch.bfloat16),
}
ULYSSES = {
    "heads": Case(ulysses=0),
    "heads_full": Case(ulysses=0, causal=False),
    "heads_grouped": Case(ulysses=0, heads=8, key_heads=4),
    "heads_repeated": Case(ulysses=0, heads=12, key_heads=3),
    "heads_one_key_head": Case(ulysses=0, key_heads=1, causal=False),
    "heads_apart": Case(ulysses=0, apart=True),
    "heads_to_fit": Case(ulysses=0, length=37, causal=False),
    "heads_documents": Case(ulysses=0, documents=(20, 3, 25), lengths=(48, 40)),
}
BOTH = {
    "both": Case(ulysses=2),
    "both_full": Case(ulysses=2, causal=False),
    "both_grouped": Case(ulysses=2, heads=6, key_heads=3),
    "both_padded": Case(ulysses=2, lengths=(40, 7), causal=False),
    "both_documents": Case(ulysses=2, documents=(20, 3, 25), lengths=(44, 48), key_heads=2),
    "both_to_fit": Case(ulysses=2, length=45),
}
USUAL = [(2, RING | ULYSSES), (4, RING | ULYSSES | BOTH)]


def inputs(case: Case, seed: int = 0) -> dict[str, Tensor]:
    """Return q, k, v and the gradient of the output, over the whole sequence."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name in ("q", "k", "v", "grad"):
        heads = case.key_heads if name in "kv" else case.heads
        shape = (case.rows, case.length, heads, E) if case.apart else (case.rows, heads, case.length, E)
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)
        made[name] = tensor.transpose(1, 2) if case.apart else tensor
    return made


def document_ids(case: Case) -> Tensor | None:
    if not case.documents:
        return None
    assert sum(case.documents) == case.length
    ids = torch.arange(len(case.documents))
    first = torch.repeat_interleave(ids, torch.tensor(case.documents))
    return torch.stack([first, first.flip(0)])[: case.rows]


def reference(case: Case, made: dict[str, Tensor]) -> dict[str, Tensor]:
    """Attend in one process, masked by the definition."""
    length = case.length
    mask = torch.ones(case.rows, 1, length, length, dtype=torch.bool)
    if case.causal:
        mask = mask.tril()
    if case.lengths:
        mask = mask & (torch.arange(length) < torch.tensor(case.lengths)[:, None])[:, None, None, :]
    ids = document_ids(case)
    if ids is not None:
        mask = mask & (ids[:, None, :, None] == ids[:, None, None, :])
    leaves = [made[name].detach().clone().requires_grad_() for name in ("q", "k", "v")]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, scale=case.scale, enable_gqa=True)
    out.backward(made["grad"])
    grads = {f"grad_{name}": leaf.grad for name, leaf in zip("qkv", leaves, strict=True)}
    return {"out": out.detach()} | {name: grad for name, grad in grads.items() if grad is not None}


def error(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    assert found.shape == wanted.shape and bool(found.isfinite().all())
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


def attend(case: Case, made: dict[str, Tensor], world: int, rank: int) -> dict[str, Tensor]:
    """Attend with this rank's part of everything; gradients go through the split to the whole tensors."""
    ulysses = case.ulysses or world
    leaves = {name: made[name].detach().clone().requires_grad_() for name in ("q", "k", "v")}

    def part(tensor: Tensor, dim: int = 2) -> Tensor:
        padded = pad_sequence(tensor, dim, world, ulysses=ulysses)
        own = zigzag_split(padded, dim, rank, world, ulysses=ulysses)
        return own.transpose(1, 2).contiguous().transpose(1, 2) if case.apart else own

    lengths = torch.tensor(case.lengths) if case.lengths else None
    if lengths is None and not case.causal and case.length % sequence_multiple(world, ulysses=ulysses):
        lengths = torch.full((case.rows,), case.length)
    ids = document_ids(case)
    options: dict[str, Any] = {
        "causal": case.causal,
        "scale": case.scale,
        "lengths": lengths,
        "documents": None if ids is None else part(ids, 1),
    }
    q, k, v = (part(leaves[name]) for name in ("q", "k", "v"))
    groups = groups_of(ulysses)
    if ulysses == 1:
        out = ring_attention(q, k, v, groups.ring, **options)
    else:
        out = ulysses_attention(q, k, v, groups.ulysses, ring=groups.ring, **options)
    out.backward(part(made["grad"]))
    grads = {f"grad_{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"out": out.detach()} | grads


@functools.cache
def groups_of(ulysses: int) -> Any:
    return context_groups(dist.group.WORLD, ulysses)


def run_cases(cases: dict[str, Case]) -> dict[str, dict[str, Tensor]]:
    world, rank = dist.get_world_size(), dist.get_rank()
    return {name: attend(case, inputs(case), world, rank) for name, case in cases.items()}


@functools.cache
def results(world: int) -> list[dict[str, dict[str, Tensor]]]:
    """Return what the ranks got, all usual cases in one start of processes."""
    return on_ranks(world, run_cases, dict(USUAL)[world])


def errors_of(case: Case, found: list[dict[str, Tensor]]) -> dict[str, float]:
    wanted = reference(case, inputs(case))
    ulysses = case.ulysses or len(found)
    out = zigzag_merge([each["out"] for each in found], 2, ulysses=ulysses)[:, :, : case.length]
    errors = {"out": error(out, wanted["out"])}
    for name in ("grad_q", "grad_k", "grad_v"):
        # Each rank's gradient is of its own tokens, zeros elsewhere.
        errors[name] = error(torch.stack([each[name] for each in found]).sum(0), wanted[name])
    return errors


@multiproc
@pytest.mark.parametrize(("world", "name"), [(world, name) for world, cases in USUAL for name in cases])
def test_ranks_attend_as_one_process(world: int, name: str) -> None:
    case = dict(USUAL)[world][name]
    errors = errors_of(case, [each[name] for each in results(world)])
    assert len(errors) == 4
    assert max(errors.values()) <= BOUNDS[case.dtype], errors


@multiproc
@pytest.mark.parametrize("world", [2, 4])
def test_results_do_not_depend_on_timing(world: int) -> None:
    again = on_ranks(world, run_cases, {name: RING[name] for name in ("causal", "grouped_full")})
    for before, after in zip(results(world), again, strict=True):
        for name, tensors in after.items():
            assert all(torch.equal(tensors[key], before[name][key]) for key in tensors)


def leave_early() -> list[str]:
    words: list[str] = []
    if dist.get_rank() == 1:
        return words
    calls: list[Callable[[], Any]] = [
        lambda: attend(Case(), inputs(Case()), 2, 0),
        lambda: RingShift(torch.zeros(3), groups_of(1).ring).wait(),
        lambda: swap_even(torch.zeros(2, 3), groups_of(1).ring),
    ]
    for call in calls:
        try:
            call()
        except RankError as failed:
            words.append(str(failed))
    return words


@multiproc
def test_a_rank_that_is_gone_is_an_error() -> None:
    words, gone = on_ranks(2, leave_early)
    assert gone == []
    for what, said in zip(("documents and shapes", "keys and values", "heads"), words, strict=True):
        assert (
            f"the exchange of {what} between ranks [0, 1] failed: " in said
            and "Another rank has ended" in said
        )


def refuse_heads() -> str:
    groups = context_groups(dist.group.WORLD, 2)
    q = torch.zeros(1, 3, 4, 8)
    try:
        ulysses_attention(q, q, q, groups.ulysses, causal=True)
    except UnsupportedError as refused:
        return str(refused)
    return "taken"


@multiproc
def test_heads_that_do_not_divide_are_refused_on_every_rank() -> None:
    for words in on_ranks(2, refuse_heads):
        assert "3 heads cannot be shared out to 2 ranks" in words
        assert "groups of 1 or 3 ranks, 2 or 4 heads" in words


def call_differently() -> list[str]:
    """Let rank 1 call otherwise than rank 0, each time in one thing, by both ways of attention."""
    odd, words = dist.get_rank() == 1, []
    changes: list[dict[str, Any]] = [
        {"tokens": 6},
        {"dtype": torch.bfloat16},
        {"causal": False},
        {"lengths": torch.tensor([5, 7])},
    ]
    for attention, change in itertools.product((ring_attention, ulysses_attention), changes):
        call: dict[str, Any] = {"tokens": 4, "dtype": torch.float32, "causal": True}
        call |= {"lengths": torch.tensor([5, 8])} if "lengths" in change else {}
        call |= change if odd else {}
        q = torch.zeros(2, 2, call.pop("tokens"), 8, dtype=call.pop("dtype"))
        try:
            attention(q, q, q, dist.group.WORLD, **call)
        except ConfigError as refused:
            words.append(str(refused))
    return words


@multiproc
def test_calls_that_differ_are_an_error_on_every_rank() -> None:
    first, second = on_ranks(2, call_differently)
    assert first == second and len(first) == 8
    assert "ranks [0, 1] share a sequence, but call attention differently" in first[0]
    assert "number of tokens is 4 on rank 0 and 6 on rank 1." in first[0]
    assert all(
        name in words for name, words in zip(("tokens", "dtype", "causal", "lengths") * 2, first, strict=True)
    )


@multiproc
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_calls_agree(world: int) -> None:
    generator = torch.Generator().manual_seed(world)

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    cases = {}
    for number in range(60):
        ulysses = pick(*(size for size in (1, 1, 2, 3, 4) if world % size == 0))
        key_heads = pick(1, 2, 3)
        length = pick(12, 24, 37, 96, 131)
        cuts = sorted({0, length, *torch.randint(1, length, (3,), generator=generator).tolist()})
        # Padding at the end is a document of its own only if it is named as one: lengths that fit have documents.
        fits = length % sequence_multiple(world, ulysses=ulysses) == 0
        cases[str(number)] = Case(
            causal=pick(True, False),
            heads=key_heads * ulysses * pick(1, 2),
            key_heads=key_heads,
            length=length,
            ulysses=ulysses,
            lengths=pick((), (length, length // 2), (0, 5)),
            documents=tuple(b - a for a, b in itertools.pairwise(cuts)) if fits and pick(True, False) else (),
        )
    found = on_ranks(world, run_cases, cases)
    for name, case in cases.items():
        errors = errors_of(case, [each[name] for each in found])
        assert max(errors.values()) <= BOUND, (case, errors)


@multiproc
@pytest.mark.slow
def test_failures_of_ranks_are_told() -> None:
    with pytest.raises(RankFailedError, match="ConfigError"):
        on_ranks(2, run_cases, {"uneven": Case(heads=4, key_heads=3)})


# --- without processes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "ulysses"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (4, 2), (6, 2), (6, 3), (4, 4)]
)
def test_split_and_merge_are_inverses(world: int, ulysses: int) -> None:
    length = 2 * sequence_multiple(world, ulysses=ulysses)
    whole = torch.randn(3, length, 2)
    parts = [zigzag_split(whole, 1, rank, world, ulysses=ulysses) for rank in range(world)]
    assert torch.equal(zigzag_merge(parts, 1, ulysses=ulysses), whole)
    assert {part.shape[1] for part in parts} == {length // world}
    for rank, part in enumerate(parts):
        positions = zigzag_positions(length, rank, world, ulysses=ulysses)
        assert torch.equal(part, whole[:, positions])
        assert bool((positions.diff() > 0).all())
        assert torch.equal(zigzag_split(whole, -2, rank, world, ulysses=ulysses), part)


def test_positions_are_zigzag() -> None:
    assert [zigzag_positions(8, rank, 2).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    found = [zigzag_positions(16, rank, 4, ulysses=2).tolist() for rank in range(4)]
    assert found == [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert zigzag_positions(6, 1, 3, ulysses=3).tolist() == [2, 3]


def test_gradients_come_back_through_split_and_merge() -> None:
    whole = torch.randn(12, 3, requires_grad=True)
    parts = [zigzag_split(whole, 0, rank, 3) * (rank + 1) for rank in range(3)]
    (zigzag_merge(parts, 0) * whole.detach()).sum().backward()
    weights = zigzag_merge([torch.full((4, 1), rank + 1.0) for rank in range(3)], 0)
    assert whole.grad is not None and torch.equal(whole.grad, whole.detach() * weights)


def test_sequences_are_padded_at_their_end() -> None:
    tensor = torch.arange(1, 14).reshape(1, 13)
    padded = pad_sequence(tensor, 1, 2, value=-1)
    assert padded.tolist() == [[*range(1, 14), -1, -1, -1]]
    assert pad_sequence(padded, 1, 2) is padded
    assert pad_sequence(torch.ones(2, 5, 3, 4), -3, 4, ulysses=2).shape == (2, 8, 3, 4)


def test_merging_equals_attention_over_all_keys() -> None:
    q, k, v = (torch.randn(2, 3, 9, 8, dtype=torch.float64) for _ in range(3))
    scores = q @ k.transpose(-1, -2)
    wanted, wanted_lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
    for order in ([0, 1, 2], [2, 0, 1]):
        out, lse = torch.zeros_like(q), torch.full(q.shape[:3], float("-inf"), dtype=q.dtype)
        for part in order:
            keys = slice(3 * part, 3 * part + 3)
            block = scores[..., keys]
            out, lse = merge_attention(out, lse, block.softmax(-1) @ v[:, :, keys], block.logsumexp(-1))
        assert error(out, wanted) < 1e-15 and error(lse, wanted_lse) < 1e-15


def test_merging_of_what_has_no_keys_changes_nothing() -> None:
    nothing = torch.tensor([float("-inf")])
    out, lse = merge_attention(torch.ones(1, 2), torch.tensor([3.0]), torch.full((1, 2), 7.0), nothing)
    assert out.tolist() == [[1.0, 1.0]] and lse.tolist() == [3.0]
    out, lse = merge_attention(torch.zeros(1, 2), nothing, torch.zeros(1, 2), nothing)
    assert out.tolist() == [[0.0, 0.0]] and lse.tolist() == [float("-inf")]


def test_merging_is_wide_and_does_not_overflow() -> None:
    halves = torch.ones(1, 2, dtype=torch.bfloat16)
    out, lse = merge_attention(halves, torch.tensor([5000.0]), 3 * halves, torch.tensor([5000.0]))
    assert out.dtype == lse.dtype == torch.float32
    assert out.tolist() == [[2.0, 2.0]]


def job_of(case: Case, rank: int, world: int) -> _Job:
    ids = document_ids(case)
    return _Job(
        group=None,
        rank=rank,
        world=world,
        tokens=case.length // world,
        causal=case.causal,
        scale=1.0,
        kernel=KERNELS[0],
        lengths=torch.tensor(case.lengths) if case.lengths else None,
        documents_RBS=None
        if ids is None
        else torch.stack([zigzag_split(ids, 1, each, world) for each in range(world)]),
    )


@pytest.mark.parametrize("name", [name for name in RING if RING[name].length == 48])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_blocks_are_exactly_what_is_seen(name: str, world: int) -> None:
    """Paint what every rank computes, each pair of tokens once, and compare with the mask of one process."""
    case = dataclasses.replace(RING[name], rows=2)
    seen = torch.zeros(case.rows, case.length, case.length, dtype=torch.int64)
    areas = []
    for rank in range(world):
        area = 0
        for source in range(world):
            rows, columns = (zigzag_positions(case.length, each, world) for each in (rank, source))
            for block in job_of(case, rank, world).blocks(source):
                mine, theirs = rows[block.queries], columns[block.keys]
                mask = torch.ones(case.rows, len(mine), len(theirs), dtype=torch.bool)
                if block.causal:
                    mask = mask.tril()
                if block.mask is not None:
                    assert not block.causal and not bool(block.mask.all())
                    mask = mask & block.mask[:, 0]
                assert bool(mask.any()), "a block that is wholly masked is computed"
                seen[:, mine[:, None], theirs] += mask.long()
                area += len(mine) * len(theirs)
        areas.append(area)
    wanted = torch.ones(case.length, case.length, dtype=torch.bool).expand(case.rows, -1, -1)
    if case.causal:
        wanted = wanted.tril()
    if case.lengths:
        wanted = wanted & (torch.arange(case.length) < torch.tensor(case.lengths)[:, None])[:, None]
    ids = document_ids(case)
    if ids is not None:
        wanted = wanted & (ids[:, :, None] == ids[:, None, :])
    assert torch.equal(seen, wanted.long())
    if not case.lengths and ids is None:
        assert len(set(areas)) == 1, "the ranks have the same work"
        chunk = case.length // (2 * world)
        assert areas[0] == chunk**2 * (4 + 2 * (world - 1) if case.causal else 4 * world)


@pytest.mark.parametrize("name", ["causal", "grouped_full", "padded", "documents_full", "rows_without_keys"])
def test_one_process_needs_no_group(name: str) -> None:
    case = RING[name]
    made = inputs(case)
    leaves = [made[key].clone().requires_grad_() for key in ("q", "k", "v")]
    lengths = torch.tensor(case.lengths) if case.lengths else None
    out = ulysses_attention(*leaves, None, causal=case.causal, lengths=lengths, documents=document_ids(case))
    out.backward(made["grad"])
    wanted = reference(case, made)
    assert error(out.detach(), wanted["out"]) <= BOUND
    for key, leaf in zip("qkv", leaves, strict=True):
        assert leaf.grad is not None and error(leaf.grad, wanted[f"grad_{key}"]) <= BOUND


def test_an_odd_number_of_tokens_is_no_obstacle_to_one_process() -> None:
    q = torch.randn(1, 2, 7, 8)
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2]])
    mask = (documents[:, :, None] == documents[:, None, :]).tril()
    wanted = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    assert error(ring_attention(q, q, q, None, causal=True, documents=documents), wanted) <= BOUND
    one = q[:, :, :1]
    assert error(ring_attention(one, one, one, None, causal=True, lengths=torch.tensor([1])), one) <= BOUND


def tensors(
    heads: int = 4, key_heads: int = 2, tokens: int = 6, dim: int = 8, **options: Any
) -> list[Tensor]:
    return [torch.zeros(2, number, tokens, dim, **options) for number in (heads, key_heads, key_heads)]


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"key_heads": 3}, ConfigError, "multiple of the key heads"),
        ({"q": torch.zeros(2, 4, 6)}, ConfigError, r"takes \(rows, heads, tokens, head dim\)"),
        ({"q": torch.zeros(2, 4, 5, 8)}, ConfigError, "must agree in rows, tokens and head dim"),
        ({"q": torch.zeros(2, 4, 6, 8, dtype=torch.float64)}, ConfigError, "one dtype and device"),
        ({"v": torch.zeros(2, 2, 6, 4)}, UnsupportedError, "Pad the values to 8 by zeros"),
        ({"tokens": 0}, ConfigError, "each rank has tokens"),
        ({"lengths": torch.tensor([1])}, ConfigError, "lengths must be 2 integers"),
        ({"lengths": torch.tensor([1.0, 2.0])}, ConfigError, "lengths must be 2 integers"),
        ({"documents": torch.zeros(2, 12, dtype=torch.int64)}, ConfigError, r"this rank's tokens, \(2, 6\)"),
        ({"device": "meta"}, UnsupportedError, r"no kernel for tensors on meta: the table has \['cpu', 'cuda'\]"),
        ({"dtype": torch.int32}, UnsupportedError, "CPU flash: takes float32, float64, bfloat16, float16 only"),
    ],
)  # fmt: skip
def test_what_is_refused(change: dict[str, Any], kind: type[OffloadEngineError], words: str) -> None:
    options = {name: change[name] for name in ("lengths", "documents") if name in change}
    sizes = {name: change[name] for name in ("key_heads", "tokens", "device", "dtype") if name in change}
    q, k, v = tensors(**sizes)
    q, v = change.get("q", q), change.get("v", v)
    with pytest.raises(kind, match=words):
        ring_attention(q, k, v, None, causal=True, **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: zigzag_split(torch.zeros(13), 0, 0, 2), "multiple of 4. Take 12 or 16, or lengthen it"),
        (lambda: zigzag_split(torch.zeros(3), 0, 0, 4), "multiple of 8. Take 8, or"),
        (lambda: zigzag_positions(0, 0, 2), "multiple of 4. Take 4, or"),
        (lambda: zigzag_positions(8, 2, 2), "rank 2 is not in a group of 2"),
        (lambda: sequence_multiple(6, ulysses=4), r"Possible are \[1, 2, 3, 6\]"),
        (lambda: context_groups(None, 2), r"Possible are \[1\]"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(call: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


@pytest.mark.parametrize(
    ("heads", "key_heads", "ranks", "wanted"),
    [(8, 8, 4, 1), (8, 2, 4, 2), (12, 3, 4, 4), (6, 3, 2, 2), (4, 1, 4, 4), (5, 5, 1, 1), (12, 6, 4, 2)],
)
def test_key_heads_are_repeated_as_often_as_needed(
    heads: int, key_heads: int, ranks: int, wanted: int
) -> None:
    assert repeats_of_key_heads(heads, key_heads, ranks) == wanted


def test_heads_that_do_not_divide_name_the_nearest() -> None:
    with pytest.raises(UnsupportedError, match="groups of 3 or 5 ranks, 12 or 16 heads"):
        repeats_of_key_heads(15, 5, 4)
    with pytest.raises(UnsupportedError, match="groups of 2 ranks, 4 heads"):
        repeats_of_key_heads(2, 1, 4)
