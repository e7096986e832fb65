"""State layouts: how the masters and optimizer states of a bucket are kept, and how many bytes that takes.

Chosen by the config and by param groups; a bucket has one. What the bytes mean is in `kernels.codecs`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import torch

from offload_engine.buckets.registry import Registry
from offload_engine.config import EngineConfig, MasterLayout, MomentsLayout, check_master_layout
from offload_engine.errors import ConfigError
from offload_engine.kernels.codecs import BLOCK_NUMEL, master_numel, state_numel

__all__ = ["LAYOUT_KEYS", "StateLayout", "assign_states"]

ALIGN_NUMEL = 32
"""Every parameter starts at a multiple of this many elements: 64 bytes even at 2 bytes per element."""

LAYOUT_KEYS = ("master_layout", "moments_layout")
"""Keys of a param group that override the config's. They say how this engine keeps states, not what they are."""

_MASTERS = {"split": torch.int16, "split24": torch.int8, "fp32": torch.float32}
_MOMENTS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "bf16_stochastic": torch.bfloat16,
    "int8": torch.uint8,
}


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """How masters and optimizer states ("moments") are kept; see `EngineConfig` for the names."""

    master: MasterLayout = "fp32"
    moments: MomentsLayout = "fp32"
    device_first: bool = False
    """The rule's updates run on the device whatever the plan's share, where there is room."""

    @property
    def align_numel(self) -> int:
        """Every parameter starts at a multiple of this many elements: a block of 8-bit states has one owner."""
        return BLOCK_NUMEL if self.moments == "int8" else ALIGN_NUMEL

    @property
    def joins(self) -> bool:
        """Whether an update may take neighbours and the padding between them as one run, with the same bits."""
        return self.moments in ("fp32", "bf16")

    def arrays(
        self, working: torch.dtype, keys: tuple[str, ...], numel: int
    ) -> dict[str, tuple[torch.dtype, int]]:
        """Return the arrays beside the working copy: kind -> (dtype, elements).

        Args:
            working: dtype of the working copy; one in fp32 is the master itself, as is one without a master.
            keys: names of the rule's states.
            numel: elements of the bucket.
        """
        found = {}
        if working is not torch.float32 and self.master != "none":
            dtype = _MASTERS[self.master]
            found["master"] = dtype, master_numel(dtype, numel)
        dtype = _MOMENTS[self.moments]
        return {**found, **dict.fromkeys(keys, (dtype, state_numel(dtype, numel)))}


def assign_states(
    registry: Registry,
    config: EngineConfig,
    keys_of: Callable[[dict[str, Any]], tuple[str, ...]],
    device_first: Callable[[dict[str, Any]], bool],
) -> None:
    """Give every parameter that an optimizer updates its layout and the names of its states.

    Args:
        keys_of: param group -> names of the states that its rule keeps.
        device_first: param group -> whether its rule's updates belong on the device.

    Raises:
        ConfigError: a param group asks for a layout that does not exist, or that the precision does not allow.
    """
    chosen: dict[int, StateLayout] = {}
    groups = {id(entry.group): entry.group for entry in registry.entries if entry.group is not None}
    for number, (key, group) in enumerate(groups.items()):
        layout = _layout_of(group, config, f"param group {number}")
        chosen[key] = dataclasses.replace(layout, device_first=device_first(group))
    for entry in registry.entries:
        if entry.group is not None:
            entry.state_keys = keys_of(entry.group)
            entry.states = chosen[id(entry.group)]
            if entry.working_dtype is torch.float32:
                entry.states = dataclasses.replace(entry.states, master="fp32")


def _layout_of(group: dict[str, Any], config: EngineConfig, where: str) -> StateLayout:
    values = {key: group.get(key, getattr(config, key)) for key in LAYOUT_KEYS}
    for key, valid in zip(LAYOUT_KEYS, (MasterLayout, MomentsLayout), strict=True):
        choices = typing.get_args(valid)
        if values[key] not in choices:
            raise ConfigError(f"{where}: {key} is {values[key]!r}. Valid: {', '.join(choices)}.")
    check_master_layout(values["master_layout"], config.precision, f"{where}: master_layout")
    return StateLayout(values["master_layout"], values["moments_layout"])
