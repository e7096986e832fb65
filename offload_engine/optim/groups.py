"""What the engine takes from an optimizer: which update rule, and the settings of each param group."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from offload_engine.errors import ConfigError, UnsupportedError
from offload_engine.kernels import Rule
from offload_engine.kernels.codecs import ROOT_KEYS, STATE_KEYS
from offload_engine.optim.lion import Lion
from offload_engine.optim.muon import Muon
from offload_engine.optim.sign_sgd import SignSGD

__all__ = [
    "STATE_KEYS",
    "SUPPORTED",
    "GroupRule",
    "GroupSettings",
    "check_groups",
    "check_optimizer",
    "check_settings",
    "counts_steps",
    "settings_of",
    "state_keys",
    "updates_matrices",
]

GroupRule = Rule | Literal["muon"]


@dataclasses.dataclass(frozen=True, slots=True)
class GroupSettings:
    """A snapshot of one param group at the moment of `step()`."""

    rule: GroupRule
    lr: float
    beta1: float = 0.0
    """Adam's and Lion's; of the others, the momentum."""
    beta2: float = 0.0
    eps: float = 0.0
    weight_decay: float = 0.0
    decoupled: bool = False
    maximize: bool = False
    dampening: float = 0.0
    nesterov: bool = False
    lr_decay: float = 0.0
    ns_coefficients: tuple[float, float, float] = (0.0, 0.0, 0.0)
    ns_steps: int = 0
    adjust_lr_fn: str | None = None

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a parameter's step, 1 for the first; it falls with Adagrad's lr_decay."""
        return self.lr / (1 + (step - 1) * self.lr_decay)

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Names of the states that a parameter of the group keeps: none for a momentum of zero."""
        momentum = self.beta1 != 0 or self.rule not in ("sgd", "sign")
        return STATE_KEYS[self.rule] if momentum else ()


def _common(group: dict[str, Any]) -> dict[str, Any]:
    return {
        "lr": float(group["lr"]),
        "weight_decay": float(group["weight_decay"]),
        "maximize": bool(group.get("maximize", False)),
    }


def _adam(group: dict[str, Any]) -> GroupSettings:
    beta1, beta2 = map(float, group["betas"])
    decoupled = bool(group.get("decoupled_weight_decay", False))
    return GroupSettings(
        "adam", **_common(group), beta1=beta1, beta2=beta2, eps=float(group["eps"]), decoupled=decoupled
    )


def _adamw(group: dict[str, Any]) -> GroupSettings:
    return _adam({"decoupled_weight_decay": True, **group})


def _sgd(group: dict[str, Any]) -> GroupSettings:
    return GroupSettings(
        "sgd",
        **_common(group),
        beta1=float(group["momentum"]),
        dampening=float(group["dampening"]),
        nesterov=bool(group["nesterov"]),
    )


def _adagrad(group: dict[str, Any]) -> GroupSettings:
    return GroupSettings(
        "adagrad", **_common(group), eps=float(group["eps"]), lr_decay=float(group["lr_decay"])
    )


def _lion(group: dict[str, Any]) -> GroupSettings:
    beta1, beta2 = map(float, group["betas"])
    return GroupSettings("lion", **_common(group), beta1=beta1, beta2=beta2)


def _sign(group: dict[str, Any]) -> GroupSettings:
    return GroupSettings("sign", **_common(group), beta1=float(group["momentum"]))


def _muon(group: dict[str, Any]) -> GroupSettings:
    if not group.get("use_muon", True):
        return _adamw({**group, "eps": group["adamw_eps"]})
    a, b, c = map(float, group["ns_coefficients"])
    return GroupSettings(
        "muon",
        **_common(group),
        beta1=float(group["momentum"]),
        eps=float(group["eps"]),
        nesterov=bool(group["nesterov"]),
        ns_coefficients=(a, b, c),
        ns_steps=int(group["ns_steps"]),
        adjust_lr_fn=group["adjust_lr_fn"],
    )


SUPPORTED: dict[type[torch.optim.Optimizer], Callable[[dict[str, Any]], GroupSettings]] = {
    torch.optim.AdamW: _adamw,
    torch.optim.Adam: _adam,
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
    torch.optim.Muon: _muon,
    Lion: _lion,
    SignSGD: _sign,
    Muon: _muon,
}
"""Optimizer classes that are adopted -> how their param groups are read."""


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what the engine cannot update exactly as the optimizer would.

    Raises:
        UnsupportedError: another class (subclasses may change the rule), or a setting that the update does not have.
    """
    kind = type(optimizer)
    if kind not in SUPPORTED:
        names = ", ".join(
            f"{'torch.optim' if each.__module__.startswith('torch.') else 'offload_engine'}.{each.__name__}"
            for each in SUPPORTED
        )
        raise UnsupportedError(
            f"the optimizer is {kind.__module__}.{kind.__name__}; supported are {names} (by exact type, since a "
            f"subclass may change the update). Build one of these and wrap again."
        )
    check_groups(optimizer.param_groups)


def check_groups(groups: Sequence[dict[str, Any]]) -> None:
    """Refuse settings of param groups that the engine cannot follow exactly.

    Raises:
        UnsupportedError: amsgrad, differentiable, or a momentum of 1 or more.
    """
    for number, group in enumerate(groups):
        for option in ("amsgrad", "differentiable"):
            if group.get(option):
                raise UnsupportedError(
                    f"param group {number} has {option}=True, which the CPU update does not have. Set {option}=False."
                )
        momentum = group.get("momentum", 0.0)
        if not 0 <= momentum < 1:
            raise UnsupportedError(
                f"param group {number} has momentum={momentum}; the update has it in [0, 1). Set it in there."
            )


def check_settings(number: int, settings: GroupSettings) -> None:
    """Refuse numbers that the kernels would refuse, before the update of any other group has started.

    Raises:
        ConfigError: names the param group, what was found, and the limit.
    """
    limits = {
        "lr": (settings.lr, math.isfinite(settings.lr), "a finite number"),
        "weight_decay": (settings.weight_decay, math.isfinite(settings.weight_decay), "a finite number"),
        "dampening": (settings.dampening, math.isfinite(settings.dampening), "a finite number"),
        "beta1 or momentum": (settings.beta1, 0 <= settings.beta1 < 1, "in [0, 1)"),
        "beta2": (settings.beta2, 0 <= settings.beta2 < 1, "in [0, 1)"),
        "eps": (settings.eps, 0 <= settings.eps < math.inf, "a number from 0 up"),
    }
    for name, (value, right, limit) in limits.items():
        if not right:
            raise ConfigError(
                f"param group {number} has {name} = {value}; it must be {limit}. Nothing has been updated: set it and "
                f"call step() again."
            )


def settings_of(group: dict[str, Any], kind: type[torch.optim.Optimizer]) -> GroupSettings:
    """Return the settings of a param group as they are now; tensors (a scheduler's lr) are read."""
    return SUPPORTED[kind](group)


def state_keys(group: dict[str, Any], kind: type[torch.optim.Optimizer]) -> tuple[str, ...]:
    """Return the names of the states that the parameters of a group keep, as its settings are now."""
    return settings_of(group, kind).state_keys


def updates_matrices(group: dict[str, Any], kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether the group's rule multiplies matrices, which belongs on the device."""
    return settings_of(group, kind).rule == "muon"


def counts_steps(keys: Sequence[str]) -> bool:
    """Return whether the optimizers that keep these states count a parameter's steps in its state, as torch's do."""
    return not ROOT_KEYS.isdisjoint(keys)
