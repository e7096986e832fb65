"""Which combinations a test runs: a cover of all pairs of values, and sequences that hold every pattern."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

__all__ = ["de_bruijn", "pairs_of", "pairwise"]

Axes = Mapping[str, Sequence[str]]
Choice = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs_of(choice: Mapping[str, str]) -> set[Pair]:
    """Return all pairs of (axis, value) in one choice, each in alphabetical order."""
    return set(itertools.combinations(sorted(choice.items()), 2))


def all_pairs(axes: Axes) -> set[Pair]:
    """Return every pair of values of two different axes."""
    return {
        ((a, x), (b, y)) for a, b in itertools.combinations(sorted(axes), 2) for x in axes[a] for y in axes[b]
    }


def pairwise(axes: Axes) -> list[Choice]:
    """Return choices, one value of each axis, that hold every pair of values of two axes at least once.

    Greedy: each choice starts from the first pair that is not covered yet; then, axis by axis, it takes the value that
    covers the most new pairs with the values it has, and of equals the one used least. Deterministic.
    """
    left = all_pairs(axes)
    order = sorted(axes, key=lambda axis: (-len(axes[axis]), axis))
    used = {(axis, value): 0 for axis in axes for value in axes[axis]}
    chosen: list[Choice] = []
    while left:
        choice: Choice = dict(min(left))
        for axis in order:
            if axis not in choice:
                choice[axis] = max(
                    axes[axis],
                    key=lambda value: (_gain(left, choice, (axis, value)), -used[axis, value]),
                )
        for item in choice.items():
            used[item] += 1
        left -= pairs_of(choice)
        chosen.append({axis: choice[axis] for axis in axes})
    return chosen


def _gain(left: set[Pair], choice: Choice, new: tuple[str, str]) -> int:
    return sum((min(item, new), max(item, new)) in left for item in choice.items())


def de_bruijn(symbols: Sequence[str], length: int) -> list[str]:
    """Return a sequence in which every pattern of `length` symbols stands exactly once: len(symbols)**length windows.

    Greedy: go on with the last symbol whose window has not been seen (Martin's construction).
    """
    sequence = [symbols[0]] * length
    seen = {tuple(sequence)}
    while True:
        for symbol in reversed(symbols):
            window = (*sequence[len(sequence) - length + 1 :], symbol)
            if window not in seen:
                seen.add(window)
                sequence.append(symbol)
                break
        else:
            return sequence
