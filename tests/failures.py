"""Things that fail when they are told to: a module, and one job of a lane."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offload_engine import kernels

__all__ = ["FailsOnce", "Trips"]


class Trips(nn.Module):
    """Raises in forward or backward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.trip = nn.Linear(33, 33), ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.trip == "forward":
            raise ZeroDivisionError("in forward")
        y = self.layer(x)
        if self.trip == "backward" and y.requires_grad:
            y.register_hook(self.raises)
        return y

    @staticmethod
    def raises(grad: torch.Tensor) -> None:
        raise ZeroDivisionError("in backward")


class FailsOnce:
    """A lane of which one job fails."""

    def __init__(self, lane: Any, job: str) -> None:
        self.lane, self.job = lane, job

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.lane, name)
        if name != self.job:
            return real

        def failing(*args: Any, **kwargs: Any) -> Any:
            self.job = ""
            bad = kernels.load().Event.manual()
            bad.fail("the cable was pulled")
            takes = 7 if name == "update" else 2
            return real(*args[:takes], **{**kwargs, "after": [bad]})

        return failing
