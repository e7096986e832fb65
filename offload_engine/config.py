"""Configuration: TOML read into documented, frozen dataclasses.

Used by every room through `EngineConfig`, and by the main job, which reads its own sections with the same
`build`. Unknown keys, wrong types and wrong units are `ConfigError`s that name the key and the nearest valid one.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from offload_engine.errors import ConfigError
from offload_engine.plan import AccumulationPlace, ClipMode, UpdateTiming

__all__ = [
    "EngineConfig",
    "LinksConfig",
    "LossScaleConfig",
    "MasterLayout",
    "MomentsLayout",
    "ParallelConfig",
    "ThreadsConfig",
    "apply_overrides",
    "build",
    "check_master_layout",
    "format_bytes",
    "parse_bytes",
    "read_toml",
    "sized",
]

T = TypeVar("T")

MasterLayout = Literal["fp32", "split", "split24", "none"]
MomentsLayout = Literal["fp32", "bf16", "bf16_stochastic", "int8"]

_UNITS = {
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


_SIZE_FORMS = "A size is an int of bytes, or text with a number and a unit: '6GiB', '512MiB', '1.5GB'."
_UNIT_FORGOTTEN_BYTES = 512
"""A memory budget of so few bytes holds no parameter worth offloading: its unit was left out."""


def parse_bytes(value: int | str, where: str = "value") -> int:
    """Return a number of bytes from an int or from text such as "6GiB", "512 MiB", "1.5GB".

    Raises:
        ConfigError: the text is not a number with a unit of `_UNITS`, or the size is not positive.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif not isinstance(value, str):
        raise ConfigError(f"{where} is {value!r} ({type(value).__name__}). {_SIZE_FORMS}{_as_int(value)}")
    else:
        match = re.fullmatch(r"\s*([+-]?[0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
        if match is None:
            raise ConfigError(f"{where} is {value!r}. {_SIZE_FORMS}")
        number, unit = match.groups()
        if not unit:
            raise ConfigError(f"{where} is {value!r}, which needs a unit: '{number}GiB', say. {_SIZE_FORMS}")
        factor = _UNITS.get(unit.lower())
        if factor is None:
            raise ConfigError(
                f"{where} is {value!r}: unknown unit {unit!r}. "
                f"Units: B, KiB, MiB, GiB, TiB (powers of 1024) and KB, MB, GB, TB (powers of 1000)."
            )
        size = int(float(number) * factor)
    if size <= 0:
        raise ConfigError(f"{where} is {value!r}; a size must be above zero. {_SIZE_FORMS}")
    return size


def _as_int(value: Any) -> str:
    whole = isinstance(value, float) and value.is_integer() and value > 0
    return f" Did you mean {int(value)}, or '{format_bytes(value)}'?" if whole else ""


def _parse_budget(value: int | str, where: str) -> int:
    """As `parse_bytes`, for the memory budgets: a number that must have lost its unit is refused too."""
    size = parse_bytes(value, where)
    if size <= _UNIT_FORGOTTEN_BYTES:
        meant = f"'{size}MiB' or '{size}GiB'" if size >= 64 else f"'{size}GiB'"
        raise ConfigError(
            f"{where} is {value!r}: {size} bytes, too few for any model (more than {_UNIT_FORGOTTEN_BYTES} are needed)."
            f" Did you mean {meant}? {_SIZE_FORMS}"
        )
    return size


# Metadata of a dataclass field: how its value becomes bytes.
_PARSE = "parse"
_SIZE = {_PARSE: parse_bytes}
_BUDGET = {_PARSE: _parse_budget}


def sized(value: int | str | None) -> int | None:
    """Return a size field of a config as bytes; None stays None."""
    return None if value is None else parse_bytes(value)


def format_bytes(size: int | float) -> str:
    """Return bytes as short text in powers of 1024, for messages: 1536 -> '1.5 KiB'."""
    sign = "-" if size < 0 else ""
    number = float(abs(size))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{sign}{int(number)} B" if unit == "B" else f"{sign}{number:.1f} {unit}"
        number /= 1024
    return f"{sign}{number:.1f} TiB"


def _checked_keywords(cls: type[T]) -> type[T]:
    """Make an unknown keyword of a config dataclass the same error as an unknown key of its TOML section."""
    init: Callable[..., None] = cls.__init__
    valid = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]

    @functools.wraps(init)
    def checked(self: T, *args: Any, **values: Any) -> None:
        if args:
            raise ConfigError(
                f"{cls.__name__} was given {args[0]!r} without a keyword; every value needs one, as in "
                f"{cls.__name__}({valid[0]}=...). Valid: {', '.join(sorted(valid))}."
            )
        for key in values:
            if key not in valid:
                raise ConfigError(f"unknown keyword {key!r} of {cls.__name__}. {_nearest(key, valid)}")
        init(self, **values)

    setattr(cls, "__init__", checked)  # noqa: B010 - mypy refuses the plain assignment
    return cls


@_checked_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How many ranks each kind of parallelism has; their product is the number of ranks."""

    pp: int = 1
    """Pipeline stages."""
    dp: int | None = None
    """Replicas of the model that see different data; None: what the other axes leave."""
    cp: int = 1
    """Ranks that share out one sequence."""
    tp: int = 1
    """Ranks that share out matrices and heads."""
    ep: int = 1
    """Ranks of dp x cp that share out the experts."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """What the ranks of dp x cp share out: nothing, masters and moments, gradients too, parameters too."""

    def __post_init__(self) -> None:
        for axis in ("pp", "dp", "cp", "tp", "ep"):
            value = getattr(self, axis)
            if (value is not None or axis != "dp") and (type(value) is not int or value < 1):
                raise ConfigError(f"parallel.{axis} is {value!r}; it is a number of ranks, from 1 up.")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ConfigError(f"parallel.zero_stage is {self.zero_stage!r}. Valid: 0, 1, 2, 3.")

    def words(self) -> str:
        """Return the settings that differ from one rank, for messages."""
        chosen = {axis: getattr(self, axis) for axis in ("pp", "dp", "cp", "tp", "ep")}
        return (
            ", ".join(f"{axis} = {value}" for axis, value in chosen.items() if value not in (None, 1))
            or "dp = 1"
        )


@_checked_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class ThreadsConfig:
    """How the cores are split. 0: chosen from affinity, cpuset, cgroup quota and topology; every run logs the split.
    Several ranks on one machine (LOCAL_RANK, LOCAL_WORLD_SIZE) share its cores, never the two CPUs of one core.
    """

    compute: int = 0
    """Intra-op threads of torch. 0 leaves torch's own setting as it is."""
    update: int = 0
    """Threads of the CPU optimizer's pool. 0: one on each usable core of this rank."""
    copies: int = 0
    """Threads of each emulated copy lane's pool. 0: one thread per lane."""
    bind: Literal["auto", "off"] = "auto"
    """"auto": the update's threads stay on their rank's cores where ranks share a machine, and slabs on its NUMA nodes
    where there are several; elsewhere nothing is bound. "off": never."""
    cpus: str = ""
    """CPUs of the update's threads, such as "0-15,32-47", which ranks share. Empty: all that the process may use."""

    def __post_init__(self) -> None:
        _check_types(self)
        for name in ("compute", "update", "copies"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"threads.{name} is {getattr(self, name)}; it must be 0 (automatic) or more."
                )
        if self.cpus and self.bind == "off":
            raise ConfigError(
                f"threads.cpus is {self.cpus!r} and threads.bind 'off': nothing would stay on these CPUs. Leave one of "
                f"the two out."
            )


@_checked_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class LinksConfig:
    """Rates of the emulated links, in 1e9 bytes per second. 0 leaves a link at the speed of memory."""

    h2d_gbps: float = 0.0
    """Host to device. Has no effect on a real accelerator."""
    d2h_gbps: float = 0.0
    """Device to host. Has no effect on a real accelerator."""

    def __post_init__(self) -> None:
        _check_types(self)
        for field in dataclasses.fields(self):
            rate = getattr(self, field.name)
            if not (rate >= 0 and math.isfinite(rate)):
                raise ConfigError(
                    f"links.{field.name} is {rate}; it must be 0 (unlimited) or a positive number of GB/s."
                )


@_checked_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Dynamic loss scale of fp16, as `torch.amp.GradScaler` moves it."""

    init: float = 65536.0
    """First scale."""
    growth_factor: float = 2.0
    """Factor after `growth_interval` steps in a row without overflow."""
    backoff_factor: float = 0.5
    """Factor after a step that overflowed and was skipped."""
    growth_interval: int = 2000
    """Steps without overflow before the scale grows."""
    minimum: float = 1.0
    """An overflow at this scale is an error: the values are not finite themselves."""

    def __post_init__(self) -> None:
        _check_types(self)
        if not (self.minimum > 0 and math.isfinite(self.init) and self.init >= self.minimum):
            raise ConfigError(
                f"loss_scale.init is {self.init} and loss_scale.minimum {self.minimum}; the minimum must be above zero "
                f"and the first scale finite and at least the minimum."
            )
        if not (self.growth_factor >= 1 and math.isfinite(self.growth_factor)):
            raise ConfigError(f"loss_scale.growth_factor is {self.growth_factor}; it must be 1 or more.")
        if not 0 < self.backoff_factor < 1:
            raise ConfigError(
                f"loss_scale.backoff_factor is {self.backoff_factor}; it must be between 0 and 1."
            )
        if self.growth_interval < 1:
            raise ConfigError(f"loss_scale.growth_interval is {self.growth_interval}; it must be 1 or more.")


@_checked_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that can be set about one `OffloadEngine`. All sizes take bytes or text such as '6GiB'."""

    device: Literal["auto", "accelerator", "emulated"] = "auto"
    """Where compute runs. "auto": the accelerator when torch sees one, else the emulated device."""
    device_memory: int | str | None = dataclasses.field(default=None, metadata=_BUDGET)
    """Device budget. None: 90 % of the accelerator's free memory; unlimited on the emulated device."""
    host_memory: int | str | None = dataclasses.field(default=None, metadata=_BUDGET)
    """Host budget for the engine's slabs. None: what the machine and the cgroup have left."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Compute dtype of parameters. In fp32 the host copy is the master.
    Normalisations with fp32 running statistics (BatchNorm) compute in fp32 beside them. "fp16" scales the loss."""
    master_layout: MasterLayout = "fp32"
    """How masters are kept beside a bf16 working copy. "split": the working copy and a 16-bit remainder, the exact fp32
    master. "split24": an 8-bit remainder. "none": the bf16 value itself is updated. A param group's key
    "master_layout" overrides it; parameters that compute in fp32 keep fp32 masters."""
    moments_layout: MomentsLayout = "fp32"
    """How optimizer states are kept. "bf16", rounded to nearest or ("bf16_stochastic") by chance drawn from parameter
    and step; "int8": 8-bit codes with one scale per 256 elements. A param group's key "moments_layout" overrides it."""
    gradients: Literal["keep", "release"] = "keep"
    """"release": no host gradients. Each bucket is updated during backward as its gradients land; `p.grad` is None
    afterwards, and `step()` ends the step. Needs one backward per step, no clipping, no fp16, updates on the CPU."""
    cast_inputs: bool = True
    """Cast floating tensors passed to `engine(...)` to the compute dtype. No effect in fp32."""
    bucket_bytes: int | str | None = dataclasses.field(default=None, metadata=_SIZE)
    """Largest bucket, in working-copy bytes; one module's own parameters are never split.
    None: a sixteenth of the device budget or a 24th of the model, whichever is less, from 64 KiB to 64 MiB."""
    lookahead_bytes: int | str | None = dataclasses.field(default=None, metadata=_SIZE)
    """Bytes of buckets fetched ahead of use. None: two of the largest buckets, an eighth of the budget at most.
    1 effectively turns prefetch off."""
    keep_resident: bool = False
    """Keep every bucket's working copy on the device between micro-batches instead of evicting it after backward."""
    max_grad_norm: float | None = None
    """Clip the global gradient norm to this in `step()`. None: no clipping."""
    micro_batches: int | None = None
    """Backwards per step. None: as many as the last step had. A wrong number costs time, never correctness."""
    update_timing: UpdateTiming = "under_forward"
    """"under_forward": `step()` returns at once and the next forward waits per bucket. "during_backward": updates start
    as soon as a bucket's last gradient has landed, into spare slabs (12 more bytes per parameter, 14 in bf16 and fp16),
    and `step()` commits them. "serial": `step()` waits."""
    clip_mode: ClipMode = "auto"
    """during_backward with `max_grad_norm` or fp16. "speculate": update as if nothing will be clipped, redo if it was.
    "norm_first": wait for the norm. "auto": by how often steps were clipped."""
    speculation_memory: int | str | None = dataclasses.field(default=None, metadata=_SIZE)
    """Host bytes for the spare slabs of during_backward. None: enough for all buckets. Buckets beyond it are updated in
    `step()`."""
    device_share: float = 0.0
    """Share of the buckets, 0 to 1, whose update runs on the device, their states streamed in and out."""
    resident_states: int | str | None = dataclasses.field(default=None, metadata=_SIZE)
    """Device bytes for masters and moments that stay there and are updated there. None: none stay."""
    accumulation: AccumulationPlace = "host"
    """Where the gradients of several micro-batches are added up, in fp32 either way."""
    activations: Literal["keep", "offload"] = "keep"
    """"offload": what autograd saves inside the model's blocks goes to the host until backward."""
    activation_modules: tuple[str, ...] = ()
    """Modules whose saved activations are offloaded, by name or pattern ("layers.*"). Empty: the blocks found."""
    kernels: Literal["auto", "native", "numba"] = "auto"
    """CPU kernels. "auto" needs the native extension; "numba" is the explicit fallback without a compiler."""
    isa: Literal["auto", "scalar", "avx2", "avx512", "neon"] = "auto"
    """Instruction set of the native kernels. All give the same bits."""
    memory_ledger: bool = True
    """Emulated device: count every storage that operators and autograd produce, and enforce the budget on it.
    False counts and caps the engine's own buffers only, and costs nothing per operator."""
    timeline: bool = True
    """Record the timeline."""
    timeline_events: int = 200_000
    """Size of the timeline's ring buffer; totals are kept beyond it."""
    threads: ThreadsConfig = dataclasses.field(default_factory=ThreadsConfig)
    """Split of the cores."""
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    """What the ranks of a running process group do; by default they are replicas that see different data."""
    links: LinksConfig = dataclasses.field(default_factory=LinksConfig)
    """Rates of the emulated links."""
    loss_scale: LossScaleConfig = dataclasses.field(default_factory=LossScaleConfig)
    """Dynamic loss scale of fp16."""
    hostile_seed: int | None = None
    """Emulated device, for tests: jobs of every lane start late by chance drawn from this seed, memory that nobody may
    read is full of NaN, and an access that has not waited for the one before it is a HazardError that names both. The
    numbers stay the same. None: off."""

    def __post_init__(self) -> None:
        _check_types(self)
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(
                f"max_grad_norm is {self.max_grad_norm}; it must be above zero, or None for no clipping."
            )
        if not 0 <= self.device_share <= 1:
            raise ConfigError(f"device_share is {self.device_share}; it must be between 0 and 1.")
        if self.micro_batches is not None and self.micro_batches < 1:
            raise ConfigError(f"micro_batches is {self.micro_batches}; it must be 1 or more, or None.")
        if self.timeline_events < 1000:
            raise ConfigError(f"timeline_events is {self.timeline_events}; the ring needs at least 1000.")
        check_master_layout(self.master_layout, self.precision, "master_layout")
        if self.gradients == "release":
            self._check_release()

    def _check_release(self) -> None:
        """Refuse what needs gradients after they were used, or an update elsewhere than on the CPU in place."""
        found = {
            f"max_grad_norm = {self.max_grad_norm}": (
                self.max_grad_norm is not None,
                "the norm is known only when all gradients are there",
            ),
            "precision = 'fp16'": (
                self.precision == "fp16",
                "an overflow is known only when all gradients are there",
            ),
            f"micro_batches = {self.micro_batches}": (
                (self.micro_batches or 1) > 1,
                "there is nowhere to add gradients up",
            ),
            "update_timing = 'during_backward'": (
                self.update_timing == "during_backward",
                "released gradients are used during backward anyway, in place and without spare slabs: 'under_forward'",
            ),
            f"device_share = {self.device_share}": (self.device_share > 0, "the update runs on the CPU"),
            f"resident_states = {self.resident_states}": (
                self.resident_states is not None,
                "the update runs on the CPU",
            ),
        }
        for what, (is_set, why) in found.items():
            if is_set:
                raise ConfigError(
                    f"gradients = 'release' does not go with {what}: {why}. Take it away, or use gradients = 'keep'."
                )


def check_master_layout(layout: str, precision: str, where: str) -> None:
    """Refuse a master that is made of a bf16 working copy where there is none.

    Raises:
        ConfigError: with the precision found.
    """
    if layout != "fp32" and precision != "bf16":
        raise ConfigError(
            f"{where} is {layout!r}, which is made of a bf16 working copy, but precision is {precision!r}. "
            f"Set precision = 'bf16', or {where} = 'fp32'."
        )


def _check_types(config: Any) -> None:
    """Hold a config made in Python to the types that one read from TOML is held to; sizes become bytes."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        parse = field.metadata.get(_PARSE)
        value = _convert(hints[field.name], getattr(config, field.name), field.name, parse)
        object.__setattr__(config, field.name, value)


def _nearest(name: str, valid: Iterable[str]) -> str:
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    listing = ", ".join(valid)
    return f"Did you mean {close[0]!r}? Valid: {listing}." if close else f"Valid: {listing}."


def _bad_choice(where: str, value: Any, choices: Iterable[Any]) -> str:
    return f"{where} is {value!r}. {_nearest(str(value), map(str, choices))}"


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        ConfigError: the file is missing, is not readable, or is not TOML (the message has line and column).
    """
    file = Path(path)
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = sorted(p.name for p in file.parent.glob("*.toml")) if file.parent.is_dir() else []
        hint = f" Files there: {', '.join(near)}." if near else ""
        raise ConfigError(f"config file {str(file)!r} does not exist.{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(file)!r} cannot be read: {error}.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {str(file)!r} is not valid TOML: {error}.") from None


def apply_overrides(mapping: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy of `mapping` with each "a.b=value" set. A value that is not TOML is taken as text.

    Raises:
        ConfigError: an override has no "=", an empty key part, or walks through a value that is not a table.
    """
    result: dict[str, Any] = _copy_tables(mapping)
    for override in overrides:
        key, separator, text = override.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not separator or not all(parts):
            raise ConfigError(f"override {override!r} is not of the form section.key=value.")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        table = result
        for part in parts[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"override {override!r}: {part!r} is a value, not a section.")
        table[parts[-1]] = value
    return result


def _copy_tables(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy_tables(v) if isinstance(v, Mapping) else v for k, v in mapping.items()}


def build(cls: type[T], mapping: Mapping[str, Any], where: str = "engine") -> T:
    """Make the frozen dataclass `cls` from a mapping, strictly.

    Args:
        where: name of the section, put before each key in messages.

    Raises:
        ConfigError: a key is unknown, a value has the wrong type, unit or range, or a needed key is missing.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where} is {mapping!r}; a section with keys is needed.")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        if key not in fields:
            raise ConfigError(f"unknown key '{where}.{key}'. {_nearest(key, fields)}")
        values[key] = _convert(hints[key], value, f"{where}.{key}", fields[key].metadata.get(_PARSE))
    for name, field in fields.items():
        no_default = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if no_default and name not in values:
            raise ConfigError(f"'{where}.{name}' is missing; it has no default.")
    try:
        return cls(**values)
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(where) else f"{where}: {text}") from None


def _convert(annotation: Any, value: Any, where: str, parse: Callable[[Any, str], int] | None) -> Any:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(annotation)
        if value is None and type(None) in options:
            return None
        if isinstance(value, str) and value.lower() == "none" and type(None) in options:
            return None  # TOML has no null: key = "none" says it
        inner = [option for option in options if option is not type(None)]
        if parse is not None:
            return parse(value, where)
        for option in inner[:-1]:
            try:
                return _convert(option, value, where, parse)
            except ConfigError:
                continue
        return _convert(inner[-1], value, where, parse)
    if parse is not None:
        return parse(value, where)
    if origin is Literal:
        choices = typing.get_args(annotation)
        if value not in choices:
            raise ConfigError(_bad_choice(where, value, choices))
        return value
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return value if isinstance(value, annotation) else build(annotation, value, where)
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} is {value!r}; a list is needed.")
        item_types = typing.get_args(annotation)
        fixed = origin is tuple and item_types[-1:] != (Ellipsis,)
        if fixed and len(item_types) != len(value):
            raise ConfigError(f"{where} is {value!r}; it needs exactly {len(item_types)} values.")
        converted = [
            _convert(item_types[i if fixed else 0], item, f"{where}[{i}]", None)
            for i, item in enumerate(value)
        ]
        return tuple(converted) if origin is tuple else converted
    return _convert_scalar(annotation, value, where)


def _convert_scalar(annotation: Any, value: Any, where: str) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is float and is_number:
        return float(value)
    if annotation is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if annotation is int and is_number and isinstance(value, int):
        return value
    if annotation in (bool, str, dict) and isinstance(value, annotation):
        return value
    if annotation is Any:
        return value
    name = getattr(annotation, "__name__", str(annotation))
    raise ConfigError(f"{where} is {value!r} ({type(value).__name__}); {name} is needed.")
