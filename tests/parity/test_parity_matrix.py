"""Every plan gives the bits of the serial one on the host: a cover of all pairs, and all patterns of clipping.

`make parity` runs the full product.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import pytest
import torch

from offload_engine.kernels import UpdateSegment, in_torch
from offload_engine.optim.update import UpdatePipeline
from tests.parity import matrix
from tests.parity.covering import de_bruijn, pairwise
from tests.parity.matrix import AXES, LIMIT, MAIN, Counts, DifferenceError, Model, Script, make_optimizer
from tests.parity.table import main, selected

COVER = pairwise(AXES)
PLAIN = {axis: values[0] for axis, values in AXES.items()}
"""Streamed, serial, all on the host, one micro-batch, no clipping, fp32."""


# The matrix.


@pytest.mark.parametrize("number", range(len(COVER)))
def test_every_pair_of_choices(number: int) -> None:
    counts = matrix.check(COVER[number])
    assert counts.tensors > 1000


def test_the_cover_holds_every_pair() -> None:
    for (a, xs), (b, ys) in itertools.combinations(AXES.items(), 2):
        seen = {(choice[a], choice[b]) for choice in COVER}
        assert seen == set(itertools.product(xs, ys)), f"{a} with {b}"
    assert len(COVER) < 1.5 * max(len(xs) * len(ys) for xs, ys in itertools.combinations(AXES.values(), 2))


def test_the_full_product_is_full() -> None:
    product = list(matrix.full_product())
    assert len({tuple(choice[axis] for axis in MAIN) for choice in product}) == len(product)
    assert len(product) == 2 * 3 * 3 * 11 * len(MAIN["accumulation"]) * 3 * 3
    for axis in AXES.keys() - MAIN.keys():
        counts = [sum(choice[axis] == value for choice in product) for value in AXES[axis]]
        assert min(counts) > 0.8 * len(product) / len(counts), f"{axis} takes turns"


QUICK = [("1", "off"), ("2", "always"), ("4", "rare")]
REFERENCES = [
    pytest.param(*both, marks=[] if both in QUICK else pytest.mark.slow)
    for both in itertools.product(("1", "2", "4"), MAIN["clip"])
]


@pytest.mark.parametrize(("accumulation", "clip"), REFERENCES)
def test_the_reference_is_torch(accumulation: str, clip: str) -> None:
    """On the gradients that the serial plan recorded: masters within 1e-6 of max(largest |p| so far, lr) each step."""
    script = matrix.script_of({**PLAIN, "accumulation": accumulation, "clip": clip})
    torch.manual_seed(3)
    model = Model()
    optimizer = make_optimizer(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    largest = {}
    for group in optimizer.param_groups:
        ids = {id(p) for p in group["params"]}
        largest |= {
            n: p.detach().flatten().abs().clamp(min=group["lr"])
            for n, p in model.named_parameters()
            if id(p) in ids
        }
    gradients: list[dict[str, Any]] = []
    compared = clipped = 0

    def see(step: int, what: Any) -> None:
        nonlocal compared, clipped
        if isinstance(what, tuple) and what[0] == "gradients":
            gradients.append({name: None if g is None else g.clone() for name, g in what[1]()})
        if not isinstance(what, matrix.State) or step == 0:
            return
        for name, param in model.named_parameters():
            param.grad = gradients[step - 1][name]
        if script.max_grad_norm is not None:
            # In float64: the last bits of torch's own fp32 norm depend on the processor, and twenty steps add them up.
            owned = [param for param in model.parameters() if param.grad is not None]
            norm = torch.nn.utils.get_total_norm([param.grad.double() for param in owned])
            torch.nn.utils.clip_grads_with_norm_(owned, script.max_grad_norm, norm)
            clipped += bool(norm > script.max_grad_norm)
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * 0.97**step
        parts = dict(
            zip([n for n, _ in what.names], what.values.split([n for _, n in what.names]), strict=True)
        )
        for name, param in model.named_parameters():
            if param.requires_grad:
                ours = parts[f"master of {name}"].view(torch.float32)
                theirs = param.detach().flatten()
                largest[name] = torch.maximum(largest[name], theirs.abs())
                assert bool(((ours - theirs).abs() <= 1e-6 * largest[name]).all()), (
                    f"{name} after {step} steps"
                )
                assert what.counters[name] == float(optimizer.state[param]["step"])
                compared += 1

    matrix.train(script, see, update_timing="serial")
    assert compared == 20 * 13
    assert clipped == {"off": 0, "rare": 2, "always": 20}[clip]


# Patterns of clipped and overflowing steps.


def pattern(symbols: tuple[str, ...], length: int, precision: str, micro_batches: int = 1) -> Script:
    """Return a script that holds every pattern of `length` steps of these kinds; its loss scale hardly moves."""
    kinds = tuple(de_bruijn(symbols, length))
    scale = (("init", 256.0), ("backoff_factor", 0.99), ("growth_factor", 1.0))
    return Script(precision, micro_batches, LIMIT if "clip" in symbols else None, kinds, scale)


PATTERNS = {
    "clip or not, fp32": pattern(("ok", "clip"), 6, "fp32"),
    "overflow or not": pattern(("ok", "overflow"), 6, "fp16"),
    "all three": pattern(("ok", "clip", "overflow"), 4, "fp16"),
}


@pytest.mark.parametrize("clip_mode", ["speculate", "auto"])
@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_of_six_steps(name: str, clip_mode: str) -> None:
    counts = matrix.follow(
        PATTERNS[name], False, update_timing="during_backward", clip_mode=clip_mode, device_memory="3KiB"
    )
    steps = len(PATTERNS[name].kinds)
    assert counts.clipped + counts.skipped + PATTERNS[name].kinds.count("ok") == steps
    if clip_mode == "speculate":
        assert counts.in_vain > 0


LONG_PATTERNS = {
    "clip or not, bf16, two micro-batches": pattern(("ok", "clip"), 6, "bf16", 2),
    "overflow or clip": pattern(("clip", "overflow"), 6, "fp16"),
    "all three": pattern(("ok", "clip", "overflow"), 6, "fp16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize("clip_mode", ["speculate", "auto"])
@pytest.mark.parametrize("name", LONG_PATTERNS)
def test_every_pattern_of_six_steps_and_more(name: str, share: float, clip_mode: str) -> None:
    script = LONG_PATTERNS[name]
    counts = matrix.follow(
        script, False, update_timing="during_backward", clip_mode=clip_mode, device_share=share
    )
    assert counts.clipped == script.kinds.count("clip") and counts.skipped == script.kinds.count("overflow")


def test_sequences_hold_every_pattern() -> None:
    for symbols, length in (("ab", 6), ("abc", 4), ("a", 3)):
        sequence = de_bruijn(symbols, length)
        windows = [tuple(sequence[i : i + length]) for i in range(len(sequence) - length + 1)]
        assert sorted(windows) == sorted(itertools.product(symbols, repeat=length))


# The comparison can fail.


def test_one_bit_is_seen() -> None:
    expected = [s for s in matrix.reference(Script())[3] if isinstance(s, matrix.State)][0]
    assert matrix.compare(3, copy.deepcopy(expected), expected) > 50
    place = 0
    for name, numel in expected.names:
        found = copy.deepcopy(expected)
        found.values[place + numel - 1] ^= 1
        with pytest.raises(DifferenceError, match=f"after 3 steps: {name} differs in 1 of {numel}"):
            matrix.compare(3, found, expected)
        place += numel
    found = copy.deepcopy(expected)
    found.working[0] ^= 1
    with pytest.raises(DifferenceError, match="working copy"):
        matrix.compare(3, found, expected)
    for what, key in (("counters", "norm.weight"), ("scalars", "skipped steps")):
        found = copy.deepcopy(expected)
        getattr(found, what)[key] += 1
        with pytest.raises(DifferenceError, match=what):
            matrix.compare(3, found, expected)
    with pytest.raises(DifferenceError, match="loss"):
        matrix.compare(3, ("loss", 0, 1.0), ("loss", 0, 1.0000001))


def test_a_fused_operation_on_the_device_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rounding less in one line of the device's rule: found, with the choice to run it again."""
    real = in_torch._adam

    def fused(segment: Any) -> Any:
        apply = real(segment)

        def update(p: Any, states: Any, g: Any) -> None:
            before, grad = states[1].clone(), g.clone()
            apply(p, states, g)
            states[1].copy_(torch.addcmul(before * segment.beta2, grad, grad, value=1 - segment.beta2))

        return update

    monkeypatch.setitem(in_torch._RULES, "adam", fused)
    with pytest.raises(DifferenceError, match=r"after 2 steps: exp_avg_sq of .* differs.*\n  in .*share=1.0"):
        matrix.check({**PLAIN, "share": "1.0"})


def test_a_plan_that_is_not_carried_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    early = {**PLAIN, "timing": "during_backward"}
    assert matrix.check(early).taken > 100
    monkeypatch.setattr(UpdatePipeline, "_update_early", lambda self, bucket: None)
    with pytest.raises(DifferenceError, match="0 updates ahead of step"):
        matrix.check(early)
    monkeypatch.setattr(UpdatePipeline, "follow", lambda self, plan: None)
    with pytest.raises(DifferenceError, match="0 updates on the device"):
        matrix.check({**PLAIN, "share": "0.5"})


def test_a_step_more_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter that runs ahead changes the bias correction."""
    make = UpdateSegment.__new__

    def later(cls: Any, *args: Any, **kwargs: Any) -> Any:
        segment = make(cls, *args, **kwargs)
        return make(cls, *segment[:7], segment.step + 1, *segment[8:])

    matrix.reference(matrix.script_of(PLAIN))  # before
    monkeypatch.setattr(UpdateSegment, "__new__", later)
    with pytest.raises(DifferenceError, match="after 1 steps: master of"):
        matrix.check({**PLAIN, "timing": "under_forward"})


# The command.


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    only = [f"{axis}={PLAIN[axis]}" for axis in ("residency", "timing", "lookahead", "share", "clip")]
    arguments = [word for text in [*only, "accumulation=1"] for word in ("--only", text)]
    assert main([*arguments, "--processes", "1"]) == 0
    said = capsys.readouterr().out
    assert "3 runs equal their reference after every step, 0 do not" in said
    assert main(["--sample", "1", "--processes", "1"]) == 0
    assert "1 runs equal their reference" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="timing=serial,under_forward,during_backward"):
        selected([], ["timing=never"])


def test_counts_add_up() -> None:
    total = Counts(runs=0)
    for _ in range(3):
        total.add(Counts(*range(1, 10)))
    assert dataclasses.astuple(total) == tuple(3 * n for n in range(1, 10))
