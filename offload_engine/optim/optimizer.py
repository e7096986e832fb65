"""The optimizer that users see: a real `torch.optim.Optimizer` whose step is the engine's.

It shares the adopted optimizer's param group dictionaries, so schedulers made for either act on both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from types import MethodType
from typing import Any

import torch

from offload_engine.buckets import Bucket, ParameterEntry, Registry
from offload_engine.errors import CheckpointError, StateError, UnsupportedError
from offload_engine.optim.groups import check_groups, check_optimizer

__all__ = ["OffloadOptimizer", "check_states"]

_State = dict[str, torch.Tensor]


def check_states(registry: Registry, state: dict[torch.Tensor, dict[str, Any]]) -> None:
    """Refuse states that have no place in the slabs, or that a parameter lacks.

    Raises:
        CheckpointError: names the parameter and what its state has.
    """
    for param, values in state.items():
        entry = registry.by_param.get(id(param))
        if entry is None or entry.group is None:
            continue
        missing = {"step", "exp_avg", "exp_avg_sq"} - values.keys()
        extra = values.keys() - {"step", "exp_avg", "exp_avg_sq"}
        if missing or extra:
            raise CheckpointError(
                f"the state of '{entry.name}' has {sorted(values)}; step, exp_avg and exp_avg_sq are needed and "
                f"nothing else has a place. Load a state of torch.optim.Adam or AdamW without amsgrad."
            )
        for name in ("exp_avg", "exp_avg_sq"):
            if values[name].shape != entry.shape:
                raise CheckpointError(
                    f"{name} of '{entry.name}' has shape {tuple(values[name].shape)}, the parameter "
                    f"{tuple(entry.shape)}. The state belongs to another model."
                )


class _ParameterState(dict[str, torch.Tensor]):
    """The state of one parameter: views of the slabs. Assigning an item writes into its view."""

    def __setitem__(self, key: str, value: torch.Tensor | float) -> None:
        own = self.get(key)
        if own is None:
            present = ", ".join(self) or "nothing before its first step"
            raise StateError(
                f"a parameter's state has no place for '{key}': it has {present}. "
                f"Only step, exp_avg and exp_avg_sq are kept; use optimizer.load_state_dict to set them before a step."
            )
        with torch.no_grad():
            if isinstance(value, torch.Tensor):
                own.copy_(value)
            else:
                own.fill_(value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def _keep(self, *_: Any) -> Any:
        raise StateError(
            "parts of a parameter's state cannot be taken away; del optimizer.state[p] starts it anew."
        )

    __delitem__ = pop = popitem = clear = setdefault = _keep

    def __deepcopy__(self, memo: dict[int, Any]) -> _State:
        return {key: value.clone() for key, value in self.items()}

    def __reduce__(self) -> Any:
        return (
            OrderedDict,
            (),
            None,
            None,
            iter(self.items()),
        )  # which torch.load takes with weights_only=True


class _StateView(MutableMapping[torch.Tensor, _State]):
    """`optimizer.state`: parameter -> {"step", "exp_avg", "exp_avg_sq"}, views of the host slabs, read when asked.

    As in torch, a parameter appears with its first step, and has an empty state before. Reading waits for the update
    that is writing it.
    """

    def __init__(self, registry: Registry, read: Callable[[ParameterEntry], _State]) -> None:
        self._registry = registry
        self._read = read

    def _entry(self, param: object) -> ParameterEntry | None:
        entry = self._registry.by_param.get(id(param))
        return entry if entry is not None and entry.group is not None and bool(entry.step) else None

    def __getitem__(self, param: torch.Tensor) -> _State:
        entry = self._entry(param)
        return _ParameterState() if entry is None else _ParameterState(self._read(entry))

    def __contains__(self, param: object) -> bool:
        return self._entry(param) is not None

    def get(self, param: torch.Tensor, default: Any = None) -> Any:
        return self[param] if param in self else default

    def __setitem__(self, param: torch.Tensor, value: _State) -> None:
        raise StateError(
            "optimizer.state cannot be assigned: its tensors are views of the engine's slabs. Write into them "
            "(optimizer.state[p]['exp_avg'].copy_(...)), or use optimizer.load_state_dict."
        )

    def __delitem__(self, param: torch.Tensor) -> None:
        entry = self._entry(param)
        if entry is None:
            raise KeyError(param)
        for value in self._read(entry).values():
            value.zero_()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (e.param for e in self._registry.entries if e.group is not None and bool(e.step))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OffloadOptimizer(torch.optim.Optimizer):
    """Facade over the engine's update.

    Args:
        adopted: `torch.optim.AdamW` or `Adam`; its `step`, `zero_grad`, `state` and `load_state_dict` act on the
            engine from now until `detach`.
        run_step: does one optimizer step on the gradients that are there.
        wait: waits for the pending update of a bucket.
    """

    def __init__(
        self,
        adopted: torch.optim.Optimizer,
        registry: Registry,
        buckets: list[Bucket],
        run_step: Callable[[], None],
        wait: Callable[[Bucket], None],
    ) -> None:
        check_optimizer(adopted)
        self._registry = registry
        self._buckets = buckets
        self._run_step = run_step
        self._wait = wait
        self._adopted = adopted
        before = dict(adopted.state)
        super().__init__(adopted.param_groups, adopted.defaults)
        self.param_groups = adopted.param_groups
        for name, hooks in vars(adopted).items():
            if name.startswith("_optimizer_") and name.endswith("_hooks"):
                setattr(
                    self, name, hooks
                )  # one set of step and state hooks, whichever object they are registered on
        self.state = _StateView(registry, self._read_state)  # type: ignore[assignment]
        self._take_state(before)
        self._redirect()

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

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler made before wrapping looks for it
        self._replaced: dict[str, Any] = {}
        for function in (step, zero_grad, state_dict, load_state_dict, add_param_group):
            self._replaced[function.__name__] = adopted.__dict__.get(function.__name__)
            adopted.__dict__[function.__name__] = MethodType(function, adopted)

    def detach(self) -> None:
        """Give the adopted optimizer its own methods back, and the present state (the slabs' memory). Idempotent."""
        adopted = self._adopted
        if not self._replaced:
            return
        for name, own in self._replaced.items():
            adopted.__dict__.pop(name, None)
            if own is not None:  # a scheduler made before wrapping had put its own there
                adopted.__dict__[name] = own
        self._replaced = {}
        state = self._adopted_state
        state.clear()
        for param, values in self.state.items():
            state[param] = dict(values)
        adopted.state = state

    # torch.optim.Optimizer.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Start the update of every parameter that has a gradient; see `OffloadEngine.step`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._run_step()
        self._adopted._opt_called = True  # type: ignore[attr-defined]  # its schedulers look whether a step came first
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse new groups after wrapping: their parameters have no optimizer states in the engine's slabs."""
        if "_adopted" in self.__dict__ and self.__dict__.get("param_groups") is self._adopted.param_groups:
            raise UnsupportedError(
                f"add_param_group was called after wrapping ({len(self.param_groups)} groups). The engine lays out its "
                f"states at wrapping: add all groups to the torch optimizer first, then wrap."
            )
        super().add_param_group(param_group)

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
        state = {by_key[key]: value for key, value in state_dict["state"].items()}
        check_states(self._registry, state)
        for target, source in zip(self.param_groups, groups, strict=True):
            target.update({key: value for key, value in source.items() if key != "params"})
        for entry in self._registry.entries:
            if entry.group is not None and entry.param not in state:
                for value in self._read_state(entry).values():
                    value.zero_()
        self._take_state(state)

    # State.

    def _read_state(self, entry: ParameterEntry) -> _State:
        bucket = self._buckets[entry.bucket_index]
        self._wait(bucket)
        assert bucket.exp_avg is not None and bucket.exp_avg_sq is not None
        return {
            "step": entry.step,
            "exp_avg": bucket.host_view(entry, bucket.exp_avg),
            "exp_avg_sq": bucket.host_view(entry, bucket.exp_avg_sq),
        }

    def _take_state(self, state: dict[torch.Tensor, dict[str, Any]]) -> None:
        check_states(self._registry, state)
        with torch.no_grad():
            for param, values in state.items():
                entry = self._registry.by_param.get(id(param))
                if entry is None or entry.group is None:
                    continue
                target = self._read_state(entry)
                entry.step.fill_(float(values["step"]))
                target["exp_avg"].copy_(values["exp_avg"])
                target["exp_avg_sq"].copy_(values["exp_avg_sq"])
