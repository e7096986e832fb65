"""Held-out loss of the quickstart model by state layout and seed, against the spread of fp32's seeds.

    python benchmarks/layout_convergence.py --steps 2000 --seeds 1 2 3        # what the documents cite
    python benchmarks/layout_convergence.py --steps 300 --layouts split24-int8

Each run is `offload-engine train configs/quickstart.toml` with working copies in bf16, in a process of its own. A
layout is inside when its mean is at most the greatest loss of fp32 and 0.5 % of it. Results go to the file of --out, a
line for each run, and runs that are there already are not done again.

Products of bf16 matrices and attention are computed in fp32 and rounded, as accelerators do: a processor without bf16
instructions takes up to 25 times as long for them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from offload_engine.__main__ import main as train

ROOT = Path(__file__).parents[1]
MARGIN = 0.005
LAYOUTS = {
    "fp32": ("fp32", "fp32"),
    "split": ("split", "fp32"),
    "split-bf16": ("split", "bf16"),
    "split-bf16_stochastic": ("split", "bf16_stochastic"),
    "split-int8": ("split", "int8"),
    "split24-int8": ("split24", "int8"),
    "none-bf16_stochastic": ("none", "bf16_stochastic"),
}


def heldout_loss(layout: str, seed: int, steps: int, threads: int) -> float:
    """Train once; return the held-out loss at the end."""
    master, moments = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "run.out": f"'{folder}'",
            "run.seed": seed,
            "train.steps": steps,
            "train.sample_bytes": 0,
            "engine.device": "'emulated'",
            "engine.device_memory": "'none'",
            "engine.memory_ledger": "false",
            "engine.threads.compute": threads,
            "engine.precision": "'bf16'",
            "engine.master_layout": f"'{master}'",
            "engine.moments_layout": f"'{moments}'",
        }
        command = [sys.executable, __file__, "--child", str(ROOT / "configs" / "quickstart.toml")]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        summary = json.loads((Path(folder) / "quickstart" / "summary.json").read_text("utf-8"))
    return float(summary["heldout_loss_after"])


def wide_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `linear` of bf16 tensors, summed in fp32 and rounded once."""
    product = x.float() @ weight.float().t()
    return (product if bias is None else product + bias.float()).to(x.dtype)


ATTENTION = torch.nn.functional.scaled_dot_product_attention


def wide_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the attention of bf16 tensors, computed in fp32 and rounded once."""
    return ATTENTION(q.float(), k.float(), v.float(), **options).to(q.dtype)


def table(rows: list[dict[str, Any]], steps: int) -> str:
    """Return the runs of one number of steps as a Markdown table."""
    losses: dict[str, list[float]] = {}
    for row in rows:
        if row["steps"] == steps:
            losses.setdefault(row["layout"], []).append(row["heldout_loss"])
    limit = max(losses["fp32"]) * (1 + MARGIN) if "fp32" in losses else float("nan")
    lines = [
        f"| layout, {steps} steps | seeds | held-out loss | mean | limit | |",
        "|---|---|---|---|---|---|",
    ]
    for layout, values in losses.items():
        mean = statistics.mean(values)
        shown = ", ".join(f"{value:.4f}" for value in values)
        inside = "inside" if mean <= limit else "outside"
        lines.append(f"| {layout} | {len(values)} | {shown} | {mean:.4f} | {limit:.4f} | {inside} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing and print the table."""
    if sys.argv[1:2] == ["--child"]:
        torch.nn.functional.linear = wide_linear
        torch.nn.functional.scaled_dot_product_attention = wide_attention
        sys.exit(train(["train", *sys.argv[2:]]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--threads", type=int, default=0, help="compute threads of a run; 0: torch's own")
    parser.add_argument("--out", type=Path, default=Path("layout_convergence.jsonl"))
    chosen = parser.parse_args()
    text = chosen.out.read_text("utf-8") if chosen.out.exists() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    done = {(row["layout"], row["seed"], row["steps"]) for row in rows}
    for seed in chosen.seeds:
        for layout in chosen.layouts:
            if (layout, seed, chosen.steps) not in done:
                loss = heldout_loss(layout, seed, chosen.steps, chosen.threads)
                rows.append({"layout": layout, "seed": seed, "steps": chosen.steps, "heldout_loss": loss})
                with chosen.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(f"{layout} seed {seed}: {loss:.4f}", flush=True)
    print(table(rows, chosen.steps))


if __name__ == "__main__":
    main()
