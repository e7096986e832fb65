"""The end of a run in words."""

from __future__ import annotations

from typing import Any

from offload_engine.config import format_bytes
from offload_engine.timeline import TimelineSummary

__all__ = ["report_lines"]


def report_lines(summary: dict[str, Any], timeline: TimelineSummary) -> list[str]:
    """Return the lines that `offload-engine train` ends with. Of overlaps, only what was missed.

    Args:
        summary: the content of summary.json.
        timeline: what the run's timeline adds up to.
    """
    unit = summary["loss_unit"]
    lines = [f"{summary['outcome']} at step {summary['steps']}"]
    if summary["first_loss"] is not None:
        lines.append(
            f"training loss {summary['first_loss']:.4f} -> {summary['last_loss']:.4f} {unit}, "
            f"{summary['tokens_per_s']:,.0f} tokens/s over {summary['tokens']:,} tokens"
        )
    if summary["heldout_loss_after"] is not None:
        line = f"held-out loss {summary['heldout_loss_before']:.4f} -> {summary['heldout_loss_after']:.4f} {unit}"
        if unit != "nats per byte":
            before, after = summary["heldout_nats_per_byte_before"], summary["heldout_nats_per_byte_after"]
            line += f" ({before:.4f} -> {after:.4f} nats per byte)"
        lines.append(line)
    part = summary["part"]
    if part["number"] > 1:
        lines[1:] = [f"all {part['number']} parts of the run: {line}" for line in lines[1:]]
        last_step = part["first_step"] + part["steps"] - 1
        lines.append(f"part {part['number']} of the run alone, steps {part['first_step']} to {last_step}:")
    lines.append(_memory_line(summary))
    if summary["precision"] == "fp16" and summary["loss_scale"] is not None:
        lines.append(
            f"loss scale {summary['loss_scale']:g}; {summary['skipped_steps']} steps skipped by overflow"
        )
    if timeline.events:
        lines.append(timeline.words())
    lines += [
        f"{kind.replace('_', ' ')}: {'in part' if overlap['active'] else 'off'} ({overlap['reason']})"
        for kind, overlap in summary["overlaps"].items()
        if overlap["missed"]
    ]
    return lines


def _memory_line(summary: dict[str, Any]) -> str:
    state_bytes, budget_bytes = summary["model_state_bytes"], summary["device_budget_bytes"]
    line = f"model states {format_bytes(state_bytes)}"
    if budget_bytes:
        line += (
            f", {state_bytes / budget_bytes:.1f} times the device budget of {format_bytes(budget_bytes)}"
            f"; device peak {format_bytes(summary['device_peak_bytes'])}"
        )
    return f"{line}; host peak {format_bytes(summary['host_peak_bytes'])}"
