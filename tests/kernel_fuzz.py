"""Random calls of `Lane.update`: right ones give the same values on every instruction set, wrong ones a KernelError.

`python -m tests.kernel_fuzz --minutes 10` goes on until the time is up; `make fuzz` does so under sanitizers. A case is
its seed alone, so what it prints on a failure can be run again with `--seed`.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence

import torch

from offload_engine import kernels
from offload_engine.errors import KernelError
from offload_engine.kernels import UpdateSegment
from offload_engine.kernels.codecs import (
    ROOT_KEYS,
    STATE_KEYS,
    master_numel,
    read_master,
    read_state,
    state_numel,
)

__all__ = ["Fuzz"]

_LAYOUTS: list[tuple[torch.dtype, torch.dtype | None]] = [
    (torch.float32, None),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, None),
    (torch.int16, torch.bfloat16),
    (torch.int8, torch.bfloat16),
]
_STATES = (torch.float32, torch.bfloat16, torch.uint8)
_GRADS = (torch.float32, torch.bfloat16, torch.float16)
_NUMBERS = (0.0, 1e-45, 1e-30, 1e-8, 0.1, 0.5, 0.9, 0.999, 1 - 2**-53)


class Fuzz:
    """Owns: a lane per instruction set, and one that shares its jobs among threads."""

    def __init__(self) -> None:
        backends = [kernels.load("native", isa) for isa in kernels.available_isas()]
        self._pool = backends[0].WorkerPool(2)
        self._lanes = [one.Lane(one.isa) for one in backends]
        self._lanes.append(backends[0].Lane("threads", pool=self._pool))

    def close(self) -> None:
        """End the threads."""
        for lane in self._lanes:
            lane.close()
        self._pool.close()

    def run(self, seed: int) -> bool:
        """Make the case of this seed; return whether it was a right one."""
        case = _Case(seed)
        wrong = case.make_wrong()
        results = []
        for lane in self._lanes:
            arrays = case.copies()
            try:
                event = lane.update(**case.call(arrays))
            except KernelError:
                assert wrong, f"seed {seed}: a right call was refused"
                assert all(_same_memory(a, b) for a, b in zip(arrays, case.arrays, strict=True)), seed
                continue
            assert event.wait(60) and not wrong, f"seed {seed}: {wrong} was not refused"
            results.append(case.values(arrays))
        for other in results[1:]:
            for name, value in results[0].items():
                same = (value == other[name]) | (value.isnan() & other[name].isnan())
                assert same.all(), (
                    f"seed {seed}: {name} differs at {(~same).nonzero()[:8].flatten().tolist()}"
                )
        return not wrong


class _Case:
    """One call: arrays in the order master, states, grad, working (if any), then the outputs."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.rule = chance.choice([rule for rule in STATE_KEYS if rule != "muon"])
        master, working = chance.choice(_LAYOUTS)
        self.state = chance.choice(_STATES)
        near = chance.choice([0, 1, 16, 256, 300, 512, 4096, 16384, 33000])
        numel = self.numel = max(0, near + chance.randint(-3, 3))
        self.momentum = self.rule not in ("sgd", "sign") or chance.random() < 0.7
        self.keys = STATE_KEYS[self.rule] if self.momentum else ()
        self.has_working = working is not None
        sizes = [(master_numel(master, numel), master)]
        sizes += [(state_numel(self.state, numel), self.state) for _ in self.keys]
        written = [*sizes, *([(numel, working)] if working is not None else [])]
        sizes += [(numel, chance.choice(_GRADS)), *written[len(sizes) :]]
        self.apart = chance.random() < 0.4
        self.shift = chance.choice([0, 0, 1, 2, 3, 7, 16])
        kind = chance.choice(["numbers", "numbers", "bits", "zeros"])
        self.arrays = [self._array(*size, kind) for size in [*sizes, *(written if self.apart else [])]]
        self.multiple = 256 if self.keys and self.state == torch.uint8 else 16 if master == torch.int16 else 1
        self.segments = self._segments()
        self.grad_scale = chance.choice([1.0, 0.37, 0.0, -2.0, 1e30, math.inf, math.nan])

    def _array(self, numel: int, dtype: torch.dtype | None, kind: str) -> torch.Tensor:
        assert dtype is not None
        memory = torch.zeros(numel + self.shift, dtype=dtype)
        array = memory[self.shift :]
        if kind == "bits":  # NaN, infinities and subnormals among them
            raw = torch.randint(0, 256, (array.nbytes,), dtype=torch.uint8, generator=self.generator)
            array.view(torch.uint8).copy_(raw) if numel else None
        elif kind == "numbers" and dtype.is_floating_point:
            array.copy_(torch.randn(numel, generator=self.generator).abs() * 10 ** self.chance.uniform(-6, 2))
        elif kind == "numbers" and dtype == torch.uint8:
            array.fill_(60)  # codes, and scales of 2**-7
        return array

    def _segments(self) -> list[UpdateSegment]:
        chance, segments, at = self.chance, [], 0
        while at < self.numel and len(segments) < 6:
            at += chance.choice([0, 0, self.multiple * chance.randint(0, 40)])
            if at >= self.numel:
                break
            numel = chance.choice([0, 1, 255, 256, self.numel, chance.randint(0, self.numel)])
            segments.append(self._segment(at, min(numel, self.numel - at)))
            at += -(-segments[-1].numel // self.multiple) * self.multiple
        chance.shuffle(segments)
        return segments

    def _segment(self, offset: int, numel: int) -> UpdateSegment:
        chance = self.chance
        return UpdateSegment(
            offset,
            numel,
            chance.choice([*_NUMBERS, -1.0, 1e38]),
            chance.choice(_NUMBERS) if self.momentum else 0.0,
            chance.choice(_NUMBERS),
            chance.choice([*_NUMBERS, 1e30]),
            chance.choice([*_NUMBERS, -1.0]),
            chance.choice([1, 2, 1000, 2**40]),
            chance.random() < 0.5,
            chance.random() < 0.5,
            chance.choice(_NUMBERS),
            chance.random() < 0.5,
            chance.choice([0, 1, chance.randrange(2**32)]),
        )

    def make_wrong(self) -> str:
        """Break one thing, in one case of three; return what."""
        chance = self.chance
        if chance.random() > 0.34:
            return ""
        index = chance.randrange(len(self.arrays))
        array = self.arrays[index]
        what = chance.choice(["size", "dtype", "stride", "meta", "overlap", "segment", "setting", "rule"])
        if what == "size":
            self.arrays[index] = torch.zeros(array.numel() + chance.choice([1, 16, 300]), dtype=array.dtype)
        elif what == "dtype":
            self.arrays[index] = array.to(chance.choice([torch.float64, torch.int32, torch.bool]))
        elif what == "stride" and array.numel() > 1:
            self.arrays[index] = torch.zeros(1, dtype=array.dtype).expand(array.numel())
        elif what == "meta":
            self.arrays[index] = array.to("meta")
        elif what == "overlap" and self.numel and len(self.keys) == 2 and not self.apart:
            self.arrays[2] = self.arrays[1]
        elif what == "segment" and self.numel:
            bad = [(0, self.numel + 1), (-1, 1), (self.numel, 1), (2**62, 2**62)]
            self.segments.append(self._segment(*chance.choice(bad)))
        elif what == "setting" and self.numel:
            field, values = chance.choice(
                [
                    ("beta1", [math.nan, -0.1, math.inf]),
                    ("eps", [math.nan, -1e-8, math.inf]),
                    ("lr", [math.nan, math.inf]),
                    ("weight_decay", [math.nan, -math.inf]),
                    ("step", [0, -5]),
                    ("seed", [-1, 2**32]),
                ]
            )
            self.segments = [self._segment(0, 1)._replace(**{field: chance.choice(values)})]
        else:
            self.rule, what = "rmsprop", "rule"
        return what

    def copies(self) -> list[torch.Tensor]:
        """Return arrays of the same kind to work on; what is one tensor stays one."""
        made: dict[int, torch.Tensor] = {}
        for array in self.arrays:
            if id(array) not in made:
                plain = array.device.type == "cpu" and array.is_contiguous()
                # To the end of its memory, so that a sanitizer sees an element too many.
                memory = torch.empty(array.numel() + self.shift, dtype=array.dtype) if plain else array
                made[id(array)] = memory[self.shift :].copy_(array) if plain else array
        return [made[id(array)] for array in self.arrays]

    def call(self, arrays: Sequence[torch.Tensor]) -> dict[str, object]:
        """Return the call's arguments with these arrays."""
        count = len(self.keys)
        written = 1 + count + self.has_working
        outs = list(arrays[written + 1 :])
        working = arrays[2 + count] if self.has_working else None
        out_working = outs[-1] if self.apart and self.has_working else None
        return {
            "rule": self.rule,
            "master": arrays[0],
            "states": tuple(arrays[1 : 1 + count]),
            "grad": arrays[1 + count],
            "working": working,
            "segments": self.segments,
            "grad_scale": self.grad_scale,
            "out": (outs[0], tuple(outs[1 : 1 + count]), out_working) if self.apart else None,
        }

    def values(self, arrays: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what the written arrays hold, decoded: two NaN may differ in bits."""
        called = self.call(arrays)
        master, states, working = called["master"], called["states"], called["working"]
        if called["out"] is not None:
            master, states, working = called["out"]  # type: ignore[misc]
        assert isinstance(master, torch.Tensor) and isinstance(states, tuple)
        found = {"master": read_master(master, working, 0, self.numel)}  # type: ignore[arg-type]
        for key, array in zip(self.keys, states, strict=True):
            found[key] = read_state(array, self.numel, 0, self.numel, root=key in ROOT_KEYS)
        if isinstance(working, torch.Tensor):
            found["working"] = working.float()
        return found


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.device.type != "cpu" or not a.is_contiguous() or not a.numel():
        return True
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def main() -> None:
    """Run seeds until the time is up."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernel_fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None, help="this one alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fuzz = Fuzz()
    if options.seed is not None:
        print(f"seed {options.seed}: {'right' if fuzz.run(options.seed) else 'refused'}")
    else:
        seed = first = time.time_ns() // 1000
        end = time.monotonic() + 60 * options.minutes
        right = 0
        while time.monotonic() < end:
            right += fuzz.run(seed)
            seed += 1
        print(f"{seed - first} calls from seed {first} on, {right} of them right: nothing found")
    fuzz.close()


if __name__ == "__main__":
    main()
