"""States of torch's random generators. Used by checkpoints and layer-major order."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["generator_states", "restore_generators"]


def generator_states(place: torch.device) -> dict[str, torch.Tensor]:
    """Return device type -> state (1-D uint8, on the host) of the CPU's generator and that of `place`."""
    states = {"cpu": torch.get_rng_state()}
    if place.type != "cpu":
        states[place.type] = torch.get_device_module(place).get_rng_state(place)
    return states


def restore_generators(states: Mapping[str, torch.Tensor], place: torch.device) -> None:
    """Set the generators to what `generator_states` has returned; that of another device type is left alone."""
    torch.set_rng_state(states["cpu"])
    if place.type != "cpu" and place.type in states:
        torch.get_device_module(place).set_rng_state(states[place.type], place)
