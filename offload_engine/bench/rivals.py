"""What the update is compared with: torch's fused optimizers and, where it is installed, DeepSpeed's CPU optimizers.

Each does the same job with the passes that it needs, on the arrays of `update_arrays`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from offload_engine.bench.update_arrays import LR, WEIGHT_DECAY, Arrays

__all__ = ["DeepSpeed", "Rival", "RivalJob", "Torch", "deepspeed", "job_of"]

Params = Sequence[torch.nn.Parameter]
States = Sequence[Sequence[torch.Tensor]]


class Rival(Protocol):
    """Somebody else's optimizers."""

    @property
    def name(self) -> str:
        """How rows call it."""

    @property
    def version(self) -> str:
        """The installed version."""

    def knows(self, rule: str, params_dtype: torch.dtype, states_dtype: torch.dtype) -> str:
        """Return the optimizer's name, empty where there is none for it."""

    def optimizer(
        self, rule: str, params: Params, states: States, weight_decay: float = WEIGHT_DECAY
    ) -> torch.optim.Optimizer:
        """Return an optimizer over these parameters that goes on with these states."""


class RivalJob(NamedTuple):
    """One step of somebody else's."""

    run: Callable[[], object]
    words: str
    """Which passes it makes."""


class Torch:
    """torch.optim with fused=True, the fastest of its implementations on a CPU."""

    name = "torch"
    version = torch.__version__
    _CLASSES: Mapping[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
        "adamw": (torch.optim.AdamW, {}),
        "sgd": (torch.optim.SGD, {"momentum": 0.9}),
        "adagrad": (torch.optim.Adagrad, {}),
    }
    _KEYS: Mapping[str, tuple[str, ...]] = {
        "adamw": ("exp_avg", "exp_avg_sq"),
        "sgd": ("momentum_buffer",),
        "adagrad": ("sum",),
    }

    def knows(self, rule: str, params_dtype: torch.dtype, states_dtype: torch.dtype) -> str:
        """Return the optimizer's name; its states have the parameters' dtype.

        Fused SGD of bfloat16 tensors does not count: in torch 2.13 its vector path leaves the parameters as they are.
        """
        wrong = rule == "sgd" and params_dtype != torch.float32
        if rule not in self._CLASSES or params_dtype != states_dtype or wrong:
            return ""
        return f"torch.optim.{self._CLASSES[rule][0].__name__}(fused=True)"

    def optimizer(
        self, rule: str, params: Params, states: States, weight_decay: float = WEIGHT_DECAY
    ) -> torch.optim.Optimizer:
        """Return a fused optimizer over these parameters that goes on with these states."""
        make, options = self._CLASSES[rule]
        found = make(params, lr=LR, weight_decay=weight_decay, fused=True, **options)  # type: ignore[call-arg]
        for param, own in zip(params, states, strict=True):
            steps = {} if rule == "sgd" else {"step": torch.tensor(0.0)}
            found.state[param] = {**steps, **dict(zip(self._KEYS[rule], own, strict=True))}
        return found


class DeepSpeed:
    """DeepSpeed's CPU optimizers. Their extensions are built when they are first used, for a minute or two each."""

    name = "deepspeed"
    _CLASSES: Mapping[str, tuple[str, str]] = {
        "adamw": ("deepspeed.ops.adam", "DeepSpeedCPUAdam"),
        "lion": ("deepspeed.ops.lion", "DeepSpeedCPULion"),
        "adagrad": ("deepspeed.ops.adagrad", "DeepSpeedCPUAdagrad"),
    }
    _KEYS: Mapping[str, tuple[str, ...]] = {
        "adamw": ("exp_avg", "exp_avg_sq"),
        "lion": ("exp_avg",),
        "adagrad": ("exp_avg_sq",),
    }

    def __init__(self) -> None:
        self.version = str(importlib.import_module("deepspeed").__version__)

    def knows(self, rule: str, params_dtype: torch.dtype, states_dtype: torch.dtype) -> str:
        """Return the optimizer's name; its states are float32 or have the parameters' dtype."""
        fits = states_dtype in (torch.float32, params_dtype)
        return self._CLASSES[rule][1] if rule in self._CLASSES and fits else ""

    def optimizer(
        self, rule: str, params: Params, states: States, weight_decay: float = WEIGHT_DECAY
    ) -> torch.optim.Optimizer:
        """Return an optimizer over these parameters that goes on with these states."""
        module, name = self._CLASSES[rule]
        options: dict[str, Any] = {"fp32_optimizer_states": states[0][0].dtype == torch.float32}
        with _said_on_stderr():
            found: torch.optim.Optimizer = getattr(importlib.import_module(module), name)(
                params, lr=LR, weight_decay=weight_decay, **options
            )
        for param, own in zip(params, states, strict=True):
            found.state[param] = {"step": 0, **dict(zip(self._KEYS[rule], own, strict=True))}
        return found


@functools.cache
def deepspeed() -> DeepSpeed | str:
    """Return DeepSpeed, ready to use, or why it is not there. Its first use builds its CPU Adam."""
    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if importlib.util.find_spec("deepspeed") is None:
        return "not installed"
    print(
        "DeepSpeed: loading its CPU optimizers; the first use builds them, for minutes. Where a build was killed, its "
        f"folder in {os.environ.get('TORCH_EXTENSIONS_DIR', '~/.cache/torch_extensions')} keeps a file 'lock' that "
        "the next one waits for: remove it.",
        file=sys.stderr,
        flush=True,
    )
    # torch's build of extensions looks for ninja on the path, and pip puts it beside the interpreter.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    try:
        with _said_on_stderr():
            found = DeepSpeed()
            param = torch.nn.Parameter(torch.zeros(1))
            found.optimizer("adamw", [param], [(torch.zeros(1), torch.zeros(1))])
    except Exception as error:  # whatever a build of somebody else's code fails with
        cause = error.__cause__ or error
        return f"installed, but its CPU Adam cannot be used ({type(cause).__name__}: {cause})"
    return found


def job_of(rival: Rival, arrays: Arrays) -> RivalJob | None:
    """Return the rival's step on these arrays, with the passes it needs; None where it has no such rule.

    Parameters that the rival cannot take as they are get float32 copies, which it widens to and narrows from.
    """
    states_dtype = arrays.states[0].dtype
    name = rival.knows(arrays.rule, arrays.master.dtype, states_dtype)
    widened = not name
    if widened:
        name = rival.knows(arrays.rule, torch.float32, states_dtype)
    if not name:
        return None
    master, grad, working = arrays.master, arrays.grad, arrays.working
    values = torch.empty(arrays.numel) if widened else master
    param = torch.nn.Parameter(values)
    widens_grad = grad.dtype != param.dtype
    param.grad = torch.empty(arrays.numel) if widens_grad else grad
    their_grad = param.grad
    optimizer = rival.optimizer(arrays.rule, [param], [arrays.states])

    def run() -> None:
        if widened:
            values.copy_(master)
        if widens_grad:
            their_grad.copy_(grad)
        optimizer.step()
        if widened:
            master.copy_(values)
        if working is not None:
            working.copy_(master)

    words = [
        "parameter.float()" if widened else "",
        "gradient.float()" if widens_grad else "",
        f"{name}" + (" on the fp32 masters" if working is not None else ""),
        "parameter.copy_(fp32)" if widened else "",
        "working.copy_(master)" if working is not None else "",
    ]
    return RivalJob(run, ", ".join(word for word in words if word))


@contextmanager
def _said_on_stderr() -> Iterator[None]:
    """Send to stderr what Python and C code print, the compiler's lines among them: stdout is for rows."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
