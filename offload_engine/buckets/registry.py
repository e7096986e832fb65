"""The registry: every parameter once, under its global name, and the units (modules) that use it.

The engine's whole ledger about users' objects lives here and in `bucket`, keyed by parameter; nothing is attached to
parameters or modules.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from offload_engine.errors import StateError, UnsupportedError

if TYPE_CHECKING:
    from offload_engine.buckets.states import StateLayout

__all__ = ["ParameterEntry", "Registry", "Unit", "discover", "is_compiled"]

_COMPOSITE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules whose forward reads their children's parameters without calling the children: one unit as a whole."""

_SPREADING = (nn.DataParallel, nn.parallel.DistributedDataParallel)

TRAINED = (torch.float32, torch.bfloat16, torch.float16)
"""What a trainable parameter may be."""

_HOLDERS = (nn.ParameterList, nn.ParameterDict)
"""Modules that are never called: their parameters belong to the module around them."""


@dataclasses.dataclass(eq=False)
class ParameterEntry:
    """What the engine knows of one parameter (tied names included)."""

    index: int
    """Position in `Registry.entries`: the fixed parameter order of norms and checkpoints."""
    name: str
    """First fully qualified name; the key in checkpoints."""
    names: tuple[str, ...]
    """All names, ties included."""
    param: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    """Strides kept in every copy, in elements: the user's memory format does not change."""
    span_numel: int
    """Elements of storage that the strides span; equals numel unless the layout has gaps."""
    working_dtype: torch.dtype
    original_dtype: torch.dtype
    trainable: bool
    group: dict[str, Any] | None
    """The optimizer's own param group dictionary; None when no optimizer updates this parameter."""
    step: torch.Tensor
    """fp32 scalar as torch keeps it: the number of updates applied. The only counter there is."""

    # Filled in by `states`.
    states: StateLayout | None = None
    """How master and states are kept; None when no optimizer updates this parameter."""
    state_keys: tuple[str, ...] = ()
    """The states that the update rule keeps, by torch's names."""

    # Filled in by `bucket`.
    bucket_index: int = -1
    offset_numel: int = -1
    host_view: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    """The host working copy, in the parameter's shape: what `param.data` is while no module uses it."""
    device_view: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    grad_view: torch.Tensor | None = None
    """The host gradient in the parameter's shape: what `param.grad` is between backward and `zero_grad`."""
    host_address: int = 0
    uses: int = 0
    """How many units in progress point this parameter at the device."""
    seen_version: int = 0
    """`param._version` when host copies were last known to agree."""
    shares_version: bool = False
    """It was wrapped as a view of the same memory as another parameter: torch counts writes to either in both."""

    # One backward's life of the gradient (see streaming.gradients).
    grad_seen_version: int = 0
    landed: bool = False
    previous_grad: torch.Tensor | None = None
    in_accumulator: bool = False
    """bf16: the sum lives in the fp32 accumulator, `grad_view` is its rounding."""
    on_device_sum: bool = False
    """The sum of the micro-batches so far is on the device; the host gradient has not got it yet."""
    norm_valid: bool = False
    grad_changes: int = 0
    """Counts changes of the host gradient, whoever made them: an update made from an older one is void."""

    def gradient_changed(self) -> None:
        """Note that the host gradient is another one now: its norm, and updates made from it, are void."""
        self.norm_valid = False
        self.grad_changes += 1

    def changed_in_place(self) -> None:
        """Count an update, as torch counts any change in place: a graph made before it must not be used after it."""
        torch.autograd.graph.increment_version(self.param)
        self.seen_version = self.param._version

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    @property
    def dense(self) -> bool:
        """Whether storage order has no gaps."""
        return self.span_numel == self.numel


@dataclasses.dataclass(eq=False)
class Unit:
    """A module that is hooked: while it runs, its parameters are on the device."""

    name: str
    module: nn.Module
    entries: list[ParameterEntry]
    slots: list[tuple[nn.Module, str, ParameterEntry]]
    """(module, attribute, entry) of each parameter, to notice one that was replaced."""
    compiled: bool = False
    """Whether its forward is compiled code, with all that is in it."""
    contains_units: bool = False
    """Whether other units run inside this one's forward."""


class Registry:
    """All parameters and units of one wrapped model, in registration order."""

    def __init__(
        self,
        entries: list[ParameterEntry],
        units: list[Unit],
        modules: Iterable[tuple[str, nn.Module]] = (),
    ) -> None:
        self.entries = entries
        self.units = units
        self.by_param = {id(entry.param): entry for entry in entries}
        self._shape_of_model = [(name, module, _held(module)) for name, module in modules]

    def of(self, param: nn.Parameter) -> ParameterEntry | None:
        """Return the entry of a parameter object, or None for one that the model does not hold."""
        return self.by_param.get(id(param))

    def check_additions(self) -> None:
        """Raise if the model has got parameters since wrapping.

        Raises:
            StateError: names the first one and the remedy.
        """
        for name, module, held in self._shape_of_model:
            if _held(module) == held:
                continue
            known = {name for entry in self.entries for name in entry.names}
            for inner, param in module.named_parameters(prefix=name):
                # A parameter in another's place is told where it is used, by `check_slots`; not so a whole module.
                if id(param) not in self.by_param:
                    how = "came to the model" if inner not in known else "took the place of another"
                    raise StateError(
                        f"parameter '{inner}' (shape {tuple(param.shape)}) {how} after wrapping. The engine would "
                        f"neither fetch nor update it. Call engine.close(), then wrap the changed model."
                    )

    def check_slots(self, unit: Unit) -> None:
        """Raise if a parameter of `unit` was replaced or changed its shape since wrapping.

        Raises:
            StateError: names the parameter, both shapes, and the remedy.
        """
        for module, attribute, entry in unit.slots:
            current = module._parameters.get(attribute)
            if current is not None and not isinstance(current, nn.Parameter):
                raise StateError(
                    f"parameter '{entry.name}' stands aside for a tensor of shape {tuple(current.shape)}, as "
                    f"torch.func.functional_call has it. The engine streams the parameter itself: make that call on a "
                    f"plain copy, copy.deepcopy(model)."
                )
            if current is not entry.param:
                found = (
                    "removed"
                    if current is None
                    else f"replaced by another object of shape {tuple(current.shape)}"
                )
                raise StateError(
                    f"parameter '{entry.name}' (shape {tuple(entry.shape)}) was {found} after wrapping. The engine "
                    f"keeps the old one. Call engine.close(), change the model, and wrap it anew."
                )


def _held(module: nn.Module) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the names of a module's parameters and the identities of its children."""
    names = tuple(name for name, param in module._parameters.items() if param is not None)
    return names, tuple(map(id, module._modules.values()))


def _first_names(model: nn.Module) -> Iterator[tuple[nn.Parameter, tuple[str, ...]]]:
    names: dict[int, list[str]] = {}
    params: dict[int, nn.Parameter] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
        params[id(param)] = param
    for key, param in params.items():
        yield param, tuple(names[key])


def _layout(param: torch.Tensor, name: str) -> tuple[tuple[int, ...], int]:
    """Return (strides, storage span in elements) for the engine's copies of `param`."""
    if param.numel() == 0:
        return tuple(param.stride()), 0
    pairs = sorted(
        (stride, size) for size, stride in zip(param.shape, param.stride(), strict=True) if size > 1
    )
    reach = 1
    for stride, size in pairs:
        if stride < reach:
            raise UnsupportedError(
                f"parameter '{name}' has overlapping memory (shape {tuple(param.shape)}, strides {param.stride()}): "
                f"one element stands for several. Make it whole first: param.data = param.data.clone()."
            )
        reach = stride * (size - 1) + reach
    return tuple(param.stride()), reach


def _check_supported(param: nn.Parameter, name: str, precision: torch.dtype, meta: bool) -> None:
    if param.is_sparse or param.layout is not torch.strided:
        raise UnsupportedError(
            f"parameter '{name}' has layout {param.layout}; only dense (strided) ones are supported."
        )
    kind = type(param.data)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UnsupportedError(
            f"parameter '{name}' is a {kind.__module__}.{kind.__name__}, a tensor subclass with operators of its own, "
            f"whose memory the engine cannot move. Use a plain parameter of its values."
        )
    if param.is_meta:
        _check_meta(param, name, meta)
    if param.requires_grad and param.dtype not in TRAINED:
        raise UnsupportedError(
            f"trainable parameter '{name}' is {param.dtype}; supported are float32, bfloat16 and float16, "
            f"trained as {precision}. Convert the model first, for example model.float()."
        )


def _check_meta(param: nn.Parameter, name: str, filled: bool) -> None:
    """Refuse a parameter without values, unless `filled`: then one that could not be made whole as the same object."""
    if not filled:
        raise UnsupportedError(
            f"parameter '{name}' is on the meta device and has no values. Say where they are, "
            f"OffloadEngine(model, optimizer, config, weights='model.safetensors'), or load the model first."
        )
    if (
        param._backward_hooks
        or getattr(param, "_post_accumulate_grad_hooks", None)
        or weakref.getweakrefs(param)
    ):
        raise UnsupportedError(
            f"parameter '{name}' is on the meta device and has hooks or weak references (nn.LSTM and its like keep "
            f"some), which would stay with the tensor without values. Add them after wrapping, or make this module "
            f"outside parameters_on_meta(), with its values."
        )


def _beside_wide_statistics(model: nn.Module) -> set[int]:
    """Return the ids of parameters of normalisations with fp32 running statistics: torch wants one dtype for both."""
    return {
        id(param)
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        and module.running_mean is not None
        and module.running_mean.dtype is torch.float32
        for param in module.parameters(recurse=False)
    }


def _working_dtype(param: nn.Parameter, precision: torch.dtype, wide: bool) -> torch.dtype:
    """Return the compute dtype of a parameter: `precision`, unless frozen integers, float64 or float8, or `wide`."""
    if param.dtype not in TRAINED:
        return param.dtype
    return torch.float32 if wide else precision


def _check_storages(entries: list[ParameterEntry]) -> None:
    owners: dict[int, list[tuple[int, int, ParameterEntry]]] = {}
    for entry in entries:
        if entry.span_numel == 0:
            continue
        start = entry.param.data_ptr()
        end = start + entry.span_numel * entry.param.element_size()
        owners.setdefault(entry.param.untyped_storage()._cdata, []).append((start, end, entry))
    for spans in owners.values():
        for _, _, entry in spans:
            entry.shares_version = len(spans) > 1
        spans.sort(key=lambda span: span[0])
        for (_, end, first), (start, _, second) in zip(spans, spans[1:], strict=False):
            if start < end and first.dense and second.dense:
                raise UnsupportedError(
                    f"parameters '{first.name}' and '{second.name}' are different objects over the same memory; an "
                    f"optimizer would update it twice. Tie them by assigning one Parameter object to both places."
                )


def _check_modules(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"the model is a {type(model).__module__}.{type(model).__qualname__}; an nn.Module is needed: "
            f"OffloadEngine(model, optimizer)."
        )
    for name, module in model.named_modules():
        what = f"module '{name}'" if name else "the model"
        if isinstance(module, _SPREADING):
            raise UnsupportedError(
                f"{what} is a {type(module).__name__}, which spreads the model over devices in its own way. "
                f"Wrap the module inside it, without it: OffloadEngine(model.module, ...)."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{what} is a TorchScript module, which takes no hooks: nobody could fetch its parameters. "
                f"Use the Python module that it was made from."
            )
        if any(is_lazy(param) for param in module.parameters(recurse=False)):
            raise UnsupportedError(
                f"{what} is a {type(module).__name__} that has not seen an input yet: its parameters have no "
                f"shape. Run the model once, make the optimizer, then wrap."
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UnsupportedError(
                f"{what} makes sparse gradients (sparse=True), which the engine does not support. "
                f"Set sparse=False; the result is the same."
            )


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile(module)` made it, or `module.compile()` was called."""
    dynamo = sys.modules.get("torch._dynamo")  # nothing is compiled before somebody has imported it
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        return True
    return getattr(module, "_compiled_call_impl", None) is not None


def _find_units(model: nn.Module, by_param: dict[int, ParameterEntry]) -> list[Unit]:
    units: list[Unit] = []
    inside_composite: set[int] = set()
    by_module: dict[int, Unit] = {}
    parents = {id(child): module for module in model.modules() for child in module.children()}
    for name, module in model.named_modules():
        if id(module) in inside_composite:
            continue
        # Hooks inside of compiled code would part it into pieces; the whole model is too much to fetch at once.
        compiled = is_compiled(module) and module is not model
        composite = compiled or isinstance(module, _COMPOSITE)
        sources = list(module.modules()) if composite else [module]
        if composite:
            inside_composite.update(id(child) for child in sources)
        slots = [
            (source, attribute, by_param[id(param)])
            for source in sources
            for attribute, param in source._parameters.items()
            if param is not None
        ]
        if not slots:
            continue
        owner, owner_name = module, name
        while isinstance(owner, _HOLDERS) and id(owner) in parents:
            owner = parents[id(owner)]
            owner_name = owner_name.rpartition(".")[0]
        unit = by_module.get(id(owner))
        if unit is None:
            unit = Unit(owner_name or "model", owner, [], [], compiled)
            by_module[id(owner)] = unit
            units.append(unit)
        unit.slots.extend(slots)
        for _, _, entry in slots:
            if entry not in unit.entries:
                unit.entries.append(entry)
    hooked = {id(unit.module) for unit in units}
    for unit in units:
        unit.contains_units = any(
            id(child) in hooked for child in unit.module.modules() if child is not unit.module
        )
    return units


def discover(
    model: nn.Module, groups: list[dict[str, Any]], precision: torch.dtype, *, filled: bool = False
) -> Registry:
    """Read a model and its optimizer's param groups into a registry. Changes nothing.

    Args:
        groups: `optimizer.param_groups`, whose dictionaries are kept, not copied.
        precision: dtype of the working copies; see `_working_dtype` for what keeps its own.
        filled: whether parameters on the meta device will get values; else they are refused.

    Raises:
        UnsupportedError: a parameter or module that would be computed wrongly; the message has its name and remedy.
        StateError: the optimizer holds a trainable parameter that the model does not.
    """
    _check_modules(model)
    wide = _beside_wide_statistics(model)
    group_of = {id(param): group for group in groups for param in group["params"]}
    entries: list[ParameterEntry] = []
    for param, names in _first_names(model):
        name = names[0]
        _check_supported(param, name, precision, filled)
        stride, span = _layout(param, name)
        trains = param.requires_grad
        entries.append(
            ParameterEntry(
                index=len(entries),
                name=name,
                names=names,
                param=param,
                shape=param.shape,
                stride=stride,
                span_numel=span,
                working_dtype=_working_dtype(param, precision, id(param) in wide),
                original_dtype=param.dtype,
                trainable=trains,
                group=group_of.get(id(param)) if trains else None,
                step=torch.zeros((), dtype=torch.float32),
                seen_version=param._version,
            )
        )
    _check_storages(entries)
    by_param = {id(entry.param): entry for entry in entries}
    for number, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            if param.requires_grad and id(param) not in by_param:
                raise StateError(
                    f"param group {number} of the optimizer holds at position {position} a trainable parameter of "
                    f"shape {tuple(param.shape)} that the model does not have. Build the optimizer from "
                    f"model.parameters(), or wrap a module that contains all of them."
                )
    return Registry(entries, _find_units(model, by_param), model.named_modules())
