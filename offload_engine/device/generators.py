"""States of torch's random generators. Used by checkpoints and layer-major order."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offload_engine.errors import CheckpointError

__all__ = ["check_generators", "generator_states", "restore_generators"]


def generator_states(place: torch.device) -> dict[str, torch.Tensor]:
    """Return device type -> state (1-D uint8, on the host) of the CPU's generator and that of `place`."""
    states = {"cpu": torch.get_rng_state()}
    if place.type != "cpu":
        states[place.type] = torch.get_device_module(place).get_rng_state(place)
    return states


def check_generators(states: Mapping[str, torch.Tensor], place: torch.device) -> None:
    """Raise if `restore_generators` could not take these states.

    Raises:
        CheckpointError: one has another form than the generator's own.
    """
    for kind, own in generator_states(place).items():
        found = states.get(kind, own)
        if (found.dtype, found.shape) != (own.dtype, own.shape):
            raise CheckpointError(
                f"the state of the random generator '{kind}' is {found.dtype} {tuple(found.shape)}, this torch's is "
                f"{own.dtype} {tuple(own.shape)}: it is damaged, or of another torch. Load an older checkpoint."
            )


def restore_generators(states: Mapping[str, torch.Tensor], place: torch.device) -> None:
    """Set the generators to what `generator_states` has returned; that of another device type is left alone."""
    torch.set_rng_state(states["cpu"])
    if place.type != "cpu" and place.type in states:
        torch.get_device_module(place).set_rng_state(states[place.type], place)
