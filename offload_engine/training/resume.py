"""May a checkpoint be gone on with under this config? What changes numbers must be the same; the rest may differ."""

from __future__ import annotations

from typing import Any

from offload_engine.errors import ConfigError

__all__ = ["check_same_job"]

# Where and how fast, what is shown and written: none of these changes a loss.
_FREE_KEYS = {
    "run.name",
    "run.out",
    "train.steps",
    "train.eval_batches",
    "train.eval_every",
    "train.save_every",
    "train.log_every",
    "train.sample_bytes",
    "train.sample_prompt",
    "train.sample_temperature",
}
_FREE_SECTION = "engine."
_FIXED_ENGINE_KEYS = {"engine.precision", "engine.enabled", "engine.reference_update"}


def check_same_job(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Return notes about differences that are allowed but worth a word.

    Raises:
        ConfigError: a setting that decides about losses is not what the checkpoint was made with.
    """
    before, now = _flat(saved), _flat(current)
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    blocking = [key for key in changed if key not in _FREE_KEYS and not _is_free_engine_key(key)]
    if blocking:
        listing = "; ".join(f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in blocking)
        raise ConfigError(
            f"the checkpoint was made with other settings: {listing}. "
            f"Set them back, or start over without --resume or under another run.name."
        )
    if "train.steps" in changed and now.get("train.schedule") == "cosine":
        return [
            f"train.steps was {before['train.steps']} and is {now['train.steps']}: from here on the learning rate "
            f"follows the longer or shorter schedule"
        ]
    return []


def _is_free_engine_key(key: str) -> bool:
    return key.startswith(_FREE_SECTION) and key not in _FIXED_ENGINE_KEYS


def _flat(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
