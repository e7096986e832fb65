"""Host memory per parameter of each state layout: slabs, and what the process holds above an engine of an empty model.

    python benchmarks/layout_memory.py                       # 100 million parameters, one process at a time
    python benchmarks/layout_memory.py --layouts split-int8-release --bucket-mib 2    # its ring is three buckets

Each layout trains three steps in a process of its own. "peak" is the largest resident memory after wrapping, that is of
the first steps; it may lie one bucket above what is there at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

import psutil
import torch
from torch import nn

import offload_engine as oe

WIDTH = 1024
TABLE = {
    # master, moments, gradients: bytes per parameter
    "fp32": ("fp32", "fp32", "keep", 16.0),
    "split": ("split", "fp32", "keep", 14.0),
    "split-bf16": ("split", "bf16", "keep", 10.0),
    "split-int8": ("split", "int8", "keep", 8.0),
    "split-int8-release": ("split", "int8", "release", 6.0),
    "split24-int8": ("split24", "int8", "keep", 7.0),
    "split24-int8-release": ("split24", "int8", "release", 5.0),
    "none-bf16": ("none", "bf16", "keep", 8.0),
}


class Peak:
    """The largest resident memory of this process while it is open, looked at every millisecond."""

    def __enter__(self) -> Peak:
        self.nbytes, self._open = resident_bytes(), True
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while self._open:
            self.nbytes = max(self.nbytes, resident_bytes())
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._thread.join()


def resident_bytes() -> int:
    """Return the bytes that the process has in memory now."""
    return int(psutil.Process().memory_info().rss)


def measure(layout: str, depth: int, bucket_mib: int) -> dict[str, Any]:
    """Wrap and train a stack of `depth` layers of WIDTH x WIDTH; return bytes."""
    master, moments, gradients, _ = TABLE[layout]
    config = oe.EngineConfig(
        device="emulated",
        device_memory=5 * bucket_mib << 20,  # which is host memory, too: next to nothing
        precision="bf16",
        master_layout=master,  # type: ignore[arg-type]
        moments_layout=moments,  # type: ignore[arg-type]
        gradients=gradients,  # type: ignore[arg-type]
        bucket_bytes=bucket_mib << 20,
        memory_ledger=False,
        timeline=False,
    )
    # The first layer stands for an engine of an empty model: all code is loaded, all pools are there.
    small = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    steps(small, config)
    before = resident_bytes()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))
    numel = sum(p.numel() for p in model.parameters())
    engine = oe.OffloadEngine(model, torch.optim.AdamW(model.parameters(), lr=1e-4), config)
    with Peak() as peak:
        train(engine, 3)
        engine.synchronize()
        end = resident_bytes()
    slabs = engine.summary()["host_slab_bytes"]
    return {
        "layout": layout,
        "parameters": numel,
        "slab_bytes_per_parameter": slabs / numel,
        "resident_bytes_per_parameter": (end - before) / numel,
        "peak_above_end_bytes": peak.nbytes - end,
        "bucket_state_bytes": max(bucket.spare_bytes + bucket.nbytes for bucket in engine._buckets),
    }


def steps(model: nn.Module, config: oe.EngineConfig) -> None:
    """Wrap a model, train, and let all of it go."""
    with oe.OffloadEngine(model, torch.optim.AdamW(model.parameters(), lr=1e-4), config) as engine:
        train(engine, 3)


def train(engine: oe.OffloadEngine, count: int) -> None:
    """Do some steps of one row each."""
    for step in range(count):
        x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x).float().square().mean())
        engine.step()
        engine.zero_grad()


def main() -> None:
    """Measure each layout in a process of its own and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--millions", type=float, default=100)
    parser.add_argument("--layouts", nargs="+", choices=TABLE, default=list(TABLE))
    parser.add_argument(
        "--json", action="store_true", help="print one row for each layout instead of a table"
    )
    parser.add_argument(
        "--bucket-mib", type=int, default=8, help="largest bucket, in MiB of working copy (8)"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    depth = max(8, round(chosen.millions * 1e6 / WIDTH**2))
    if chosen.child:
        print(json.dumps(measure(chosen.child, depth, chosen.bucket_mib)))
        return
    rows = []
    for layout in chosen.layouts:
        command = [sys.executable, __file__, "--child", layout, "--millions", str(chosen.millions)]
        command += ["--bucket-mib", str(chosen.bucket_mib)]
        # What is freed goes back to the system: the model's own weights from before wrapping, for one.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        row = json.loads(done.stdout.splitlines()[-1])
        row["over_table"] = row["resident_bytes_per_parameter"] / TABLE[layout][3]
        rows.append(row)
    if chosen.json:
        print("\n".join(json.dumps(row) for row in rows))
        return
    print(f"{rows[0]['parameters'] / 1e6:.1f} million parameters")
    print("| layout | bytes per parameter | slabs | resident | of the table | first steps above the end |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['layout']} | {TABLE[row['layout']][3]:g} | {row['slab_bytes_per_parameter']:.3f} | "
            f"{row['resident_bytes_per_parameter']:.3f} | {row['over_table']:.3f} | "
            f"{row['peak_above_end_bytes'] / 2**20:.1f} MiB (a bucket: {row['bucket_state_bytes'] / 2**20:.1f}) |"
        )


if __name__ == "__main__":
    main()
