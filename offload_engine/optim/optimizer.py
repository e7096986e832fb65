"""The optimizer that users see: a real `torch.optim.Optimizer` whose step is the engine's.

It shares the adopted optimizer's param group dictionaries, so schedulers made for either act on both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch

from offload_engine.buckets import LAYOUT_KEYS, Bucket, ParameterEntry, Registry
from offload_engine.errors import CheckpointError, StateError, UnsupportedError
from offload_engine.optim.groups import check_groups, check_optimizer, counts_steps, state_keys
from offload_engine.optim.state_view import DecodedState, State, StateView
from offload_engine.optim.torch_clipping import allow_torch_clipping, refuse_torch_clipping

__all__ = ["OffloadOptimizer", "check_states"]


def check_states(registry: Registry, state: dict[torch.Tensor, dict[str, Any]]) -> None:
    """Refuse states that have no place in the slabs, or that a parameter lacks.

    Raises:
        CheckpointError: names the parameter and what its state has.
    """
    for param, values in state.items():
        entry = registry.by_param.get(id(param))
        present = _present(values)
        if entry is None or entry.group is None or not present:
            continue
        needed = _names(entry)
        if present != set(needed):
            words = f"{', '.join(needed)} are needed and nothing else" if needed else "nothing"
            raise CheckpointError(
                f"the state of '{entry.name}' has {sorted(present)}; {words} has a place. Load a state of the same "
                f"optimizer class with the same settings (Adam and AdamW without amsgrad)."
            )
        for name in entry.state_keys:
            if values[name].shape != entry.shape:
                raise CheckpointError(
                    f"{name} of '{entry.name}' has shape {tuple(values[name].shape)}, the parameter "
                    f"{tuple(entry.shape)}. The state belongs to another model."
                )


def _names(entry: ParameterEntry) -> tuple[str, ...]:
    """Return what the state of a parameter has in torch's format."""
    return (*(("step",) if counts_steps(entry.state_keys) else ()), *entry.state_keys)


def _present(values: dict[str, Any]) -> set[str]:
    """Return the names in a state; SGD writes None for a momentum that has not started."""
    return {name for name, value in values.items() if value is not None}


def _layouts(group: dict[str, Any]) -> dict[str, Any]:
    """Return what a param group says about the layout of its master and states."""
    return {key: group[key] for key in LAYOUT_KEYS if key in group}


class OffloadOptimizer(torch.optim.Optimizer):
    """Facade over the engine's update.

    Args:
        adopted: one of the classes in `groups.SUPPORTED`; its `step`, `zero_grad`, `state` and `load_state_dict` act on
            the engine from now until `detach`.
        run_step: does one optimizer step on the gradients that are there.
        wait: waits for the pending update of a bucket.
        grow: gives parameters of new groups a place for gradients and states.
    """

    def __init__(
        self,
        adopted: torch.optim.Optimizer,
        registry: Registry,
        buckets: list[Bucket],
        run_step: Callable[[], None],
        wait: Callable[[Bucket], None],
        grow: Callable[[], None],
    ) -> None:
        check_optimizer(adopted)
        self._registry = registry
        self._buckets = buckets
        self._run_step = run_step
        self._wait = wait
        self._grow = grow
        self._adopted = adopted
        self._laid_out = [state_keys(group, type(adopted)) for group in adopted.param_groups]
        self._layouts = [_layouts(group) for group in adopted.param_groups]
        before = dict(adopted.state)
        super().__init__(adopted.param_groups, adopted.defaults)
        self.param_groups = adopted.param_groups
        self._counted = self._count()
        for name, hooks in vars(adopted).items():
            if name.startswith("_optimizer_") and name.endswith("_hooks"):
                setattr(
                    self, name, hooks
                )  # one set of step and state hooks, whichever object they are registered on
        self.state = StateView(  # type: ignore[assignment]
            registry, self._appears, self._read_state, self._write_state, self._reset_state
        )
        self._take_state(before, fresh=True)
        self._redirect()
        self._refuse_clipping()

    # The adopted optimizer.

    def _redirect(self) -> None:
        """Make the adopted object's methods act on the engine; instance attributes, taken off by `detach`."""
        adopted = self._adopted
        self._adopted_state = adopted.state
        adopted.state = self.state

        def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self.step(closure)

        def zero_grad(_: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            self.zero_grad(set_to_none)

        def load_state_dict(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            self.load_state_dict(state_dict)

        def state_dict(_: torch.optim.Optimizer) -> dict[str, Any]:
            return self.state_dict()

        def add_param_group(_: torch.optim.Optimizer, group: dict[str, Any]) -> None:
            self.add_param_group(group)

        def deepcopy(_: torch.optim.Optimizer, memo: dict[int, Any]) -> Any:
            return self.__deepcopy__(memo)

        deepcopy.__name__ = "__deepcopy__"
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler made before wrapping looks for it
        self._replaced: dict[str, Any] = {}
        for function in (step, zero_grad, state_dict, load_state_dict, add_param_group, deepcopy):
            self._replaced[function.__name__] = adopted.__dict__.get(function.__name__)
            adopted.__dict__[function.__name__] = MethodType(function, adopted)

    def _refuse_clipping(self) -> None:
        """Have torch's own clipping raise where it cannot do what it is called for."""
        released = any(not bucket.keeps_gradient for bucket in self._buckets)
        if released or any(entry.working_dtype is torch.float16 for entry in self._registry.entries):
            named = ((entry.name, entry.param) for entry in self._registry.entries if entry.trainable)
            refuse_torch_clipping(named, "release" if released else "fp16")

    def detach(self) -> None:
        """Give the adopted optimizer its own methods back, and the present state (the slabs' memory). Idempotent."""
        adopted = self._adopted
        if not self._replaced:
            return
        allow_torch_clipping(entry.param for entry in self._registry.entries)
        for name, own in self._replaced.items():
            adopted.__dict__.pop(name, None)
            if own is not None:  # a scheduler made before wrapping had put its own there
                adopted.__dict__[name] = own
        self._replaced = {}
        state = self._adopted_state
        state.clear()
        for param, values in self.state.items():
            state[param] = {k: v.plain() if isinstance(v, DecodedState) else v for k, v in values.items()}
        adopted.state = state

    # torch.optim.Optimizer.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Refuse: the copy's step would act on this engine.

        Raises:
            StateError: always.
        """
        raise StateError(
            "an optimizer whose step acts on an engine cannot be copied. Copy optimizer.state_dict(), or make an "
            "optimizer of the same class over the copy of the model and load that into it."
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Start the update of every parameter that has a gradient; see `OffloadEngine.step`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._count() != self._counted:
            self._take_in_groups()
        self._check_rules(self.param_groups)
        self._run_step()
        self._adopted._opt_called = True  # type: ignore[attr-defined]  # its schedulers look whether a step came first
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does; its trainable parameters get states in new buckets, from their first step on.

        Raises:
            StateError: a parameter is not the model's, or a forward or backward is going on.
            UnsupportedError: the update does not have one of its settings.
            DeviceMemoryError, HostMemoryError: there is no room for the states. On any error nothing is changed.
        """
        if (
            "_adopted" not in self.__dict__
            or self.__dict__.get("param_groups") is not self._adopted.param_groups
        ):
            super().add_param_group(param_group)  # while this object is made
            return
        adopted, count = self._adopted, len(self.param_groups)
        try:
            type(adopted).add_param_group(adopted, param_group)
            self._take_in_groups()
        except BaseException:
            del self.param_groups[count:]
            raise

    def _count(self) -> tuple[int, int]:
        return len(self.param_groups), sum(len(group["params"]) for group in self.param_groups)

    def _take_in_groups(self) -> None:
        """Make places for what groups hold now.

        Raises:
            UnsupportedError: a group, or a parameter of one, is gone.
        """
        groups = self.param_groups
        held = {id(param): group for group in groups for param in group["params"]}
        for entry in self._registry.entries:
            if entry.group is not None and held.get(id(entry.param)) is not entry.group:
                raise UnsupportedError(
                    f"parameter '{entry.name}' was taken out of its param group after wrapping. Its states lie with "
                    f"its group's: put it back and freeze it, or set the group's lr to 0; or close the engine."
                )
        check_groups(groups)
        self._grow()
        kind = type(self._adopted)
        self._laid_out.extend(state_keys(group, kind) for group in groups[len(self._laid_out) :])
        self._layouts.extend(map(_layouts, groups[len(self._layouts) :]))
        self._counted = self._count()

    def start_anew(self, entries: Sequence[ParameterEntry]) -> None:
        """Take in parameters that have got a place: their states are what they are before their first step."""
        self._refuse_clipping()
        if self._initial:
            for entry in entries:
                if entry.group is not None:
                    self._reset_state(entry)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's own format, with copies of the states: they do not change under later steps."""
        packed: dict[str, Any] = super().state_dict()
        packed["state"] = {
            key: {name: value.clone() for name, value in state.items()}
            for key, state in packed["state"].items()
        }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over settings, moments and counters from torch's format.

        Raises:
            CheckpointError: groups, parameters or shapes do not match; nothing is changed then.
        """
        groups = state_dict["param_groups"]
        ours = [group["params"] for group in self.param_groups]
        if [len(group["params"]) for group in groups] != [len(params) for params in ours]:
            raise CheckpointError(
                f"the state has param groups of {[len(g['params']) for g in groups]} parameters, the optimizer of "
                f"{[len(p) for p in ours]}. Build the optimizer with the same groups as when it was saved."
            )
        by_key = {
            key: param
            for group, params in zip(groups, ours, strict=True)
            for key, param in zip(group["params"], params, strict=True)
        }
        homeless = sorted(str(key) for key in state_dict["state"] if key not in by_key)
        if homeless:
            raise CheckpointError(
                f"the state has values for parameter {homeless[0]}, which is in none of its groups; it is damaged."
            )
        check_groups(groups)
        own = ("params", *LAYOUT_KEYS)
        settings = [{key: value for key, value in group.items() if key not in own} for group in groups]
        self._check_rules(
            [{**target, **new} for target, new in zip(self.param_groups, settings, strict=True)]
        )
        state = {by_key[key]: value for key, value in state_dict["state"].items()}
        check_states(self._registry, state)
        for target, new in zip(self.param_groups, settings, strict=True):
            target.update(new)
        self._take_state(state)

    def _check_rules(self, groups: Sequence[dict[str, Any]]) -> None:
        """Refuse settings that need other states than there were places made for.

        Raises:
            UnsupportedError: a momentum has become zero or started, or use_muon has changed.
        """
        for number, (group, kept) in enumerate(zip(groups, self._laid_out, strict=True)):
            wanted = state_keys(group, type(self._adopted))
            if wanted != kept:
                found, needed = (", ".join(keys) or "no states" for keys in (kept, wanted))
                raise UnsupportedError(
                    f"param group {number} keeps {found}; with its settings now (momentum, use_muon) it would keep "
                    f"{needed}. The engine lays out its states at wrapping: set them back, or call engine.close() and "
                    f"wrap anew."
                )
        for number, (group, made) in enumerate(zip(groups, self._layouts, strict=True)):
            asked = _layouts(group)
            if asked != made:
                key = next(key for key in LAYOUT_KEYS if asked.get(key) != made.get(key))
                raise UnsupportedError(
                    f"param group {number} has {key} = {asked.get(key)!r}; at wrapping it was "
                    f"{made.get(key, 'not set')!r}. The engine lays them out at wrapping: set it back, or "
                    f"call engine.close() and wrap anew."
                )

    # State.

    def _appears(self, entry: ParameterEntry) -> bool:
        return bool(_names(entry)) and (bool(entry.step) or "sum" in entry.state_keys)

    @property
    def _initial(self) -> float:
        """What states start from: Adagrad's own value, else 0."""
        return float(self._adopted.defaults.get("initial_accumulator_value", 0.0))

    def _read_state(self, entry: ParameterEntry) -> State:
        bucket = self._buckets[entry.bucket_index]
        self._wait(bucket)
        found = {"step": entry.step} if counts_steps(entry.state_keys) else {}
        for key in entry.state_keys:
            values = bucket.read_state(entry, key)
            plain = bucket.states[key].dtype is torch.float32
            found[key] = values if plain else DecodedState.of(values)
        return found

    def _write_state(self, entry: ParameterEntry, key: str, value: torch.Tensor | float) -> torch.Tensor:
        """Make the state hold a value, and return what is read there then."""
        bucket = self._buckets[entry.bucket_index]
        self._wait(bucket)
        if key == "step":
            entry.step.fill_(float(value))
        else:
            bucket.write_state(entry, key, value)
            bucket.state_writes += 1
        return self._read_state(entry)[key]

    def _reset_state(self, entry: ParameterEntry) -> None:
        """Have the next step of a parameter be its first."""
        entry.step.zero_()
        for key in entry.state_keys:
            self._write_state(entry, key, self._initial)

    @torch.no_grad()
    def _take_state(self, state: dict[torch.Tensor, dict[str, Any]], *, fresh: bool = False) -> None:
        """Make every parameter hold its state; those that have none start anew.

        Args:
            fresh: all arrays are zero, and stay untouched where they may.
        """
        check_states(self._registry, state)
        for entry in self._registry.entries:
            if entry.group is None:
                continue
            values = state.get(entry.param, {})
            if not _present(values):
                if not fresh or self._initial:
                    self._reset_state(entry)
                continue
            for key in entry.state_keys:
                self._write_state(entry, key, values[key])
            # Where torch counts no steps it only matters whether there was one: SGD's momentum starts with the first.
            entry.step.fill_(float(values.get("step", 1.0)))
