"""What the engine takes from a torch optimizer: which update rule, and the settings of each param group."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from offload_engine.errors import UnsupportedError

__all__ = ["SUPPORTED", "GroupSettings", "check_groups", "check_optimizer", "settings_of"]

SUPPORTED: tuple[type[torch.optim.Optimizer], ...] = (torch.optim.AdamW, torch.optim.Adam)


@dataclasses.dataclass(frozen=True, slots=True)
class GroupSettings:
    """A snapshot of one param group at the moment of `step()`."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what the engine cannot update exactly as torch would.

    Raises:
        UnsupportedError: another class (subclasses may change the rule), amsgrad, or differentiable.
    """
    kind = type(optimizer)
    if kind not in SUPPORTED:
        names = ", ".join(f"torch.optim.{each.__name__}" for each in SUPPORTED)
        raise UnsupportedError(
            f"the optimizer is {kind.__module__}.{kind.__name__}; supported are {names} (by exact type, since a "
            f"subclass may change the update). Build one of these and wrap again."
        )
    check_groups(optimizer.param_groups)


def check_groups(groups: Sequence[dict[str, Any]]) -> None:
    """Refuse settings of param groups that the engine cannot follow exactly.

    Raises:
        UnsupportedError: amsgrad, or differentiable.
    """
    for number, group in enumerate(groups):
        for option in ("amsgrad", "differentiable"):
            if group.get(option):
                raise UnsupportedError(
                    f"param group {number} has {option}=True, which the CPU update does not have. Set {option}=False."
                )


def settings_of(group: dict[str, Any], kind: type[torch.optim.Optimizer]) -> GroupSettings:
    """Return the settings of a param group as they are now; tensors (a scheduler's lr) are read."""
    beta1, beta2 = group["betas"]
    return GroupSettings(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=bool(group.get("decoupled_weight_decay", kind is torch.optim.AdamW)),
        maximize=bool(group.get("maximize", False)),
    )
