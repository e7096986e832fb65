"""Plain PyTorch behind the engine's verbs: the reference of every comparison, for `engine.enabled` = false.

In bf16 and fp16 it does by hand what the engine does on the host: narrow working parameters in the model, each
micro-batch's gradient added in fp32, the optimizer on fp32 masters, the result rounded back once per step. In fp16
torch's `GradScaler` scales the loss and skips steps that overflow.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from offload_engine.checkpoint.format import (
    atomic_directory,
    open_tensors,
    read_json,
    resolve,
    write_json,
    write_tensors,
)
from offload_engine.config import LossScaleConfig
from offload_engine.errors import CheckpointError
from offload_engine.host.process import peak_rss_bytes
from offload_engine.kernels.codecs import STATE_KEYS
from offload_engine.optim.groups import SUPPORTED, counts_steps, state_keys
from offload_engine.timeline import Timeline

__all__ = ["PlainTrainer"]

FORMAT = "offload-engine plain trainer 1"
MOMENTS = tuple(dict.fromkeys(key for keys in STATE_KEYS.values() for key in keys))
"""Names of the states that the adopted optimizers keep."""


class PlainTrainer:
    """Trains `model` with `optimizer` as a plain loop would; has the verbs of `Trainer`.

    Owns: in bf16 and fp16, the fp32 masters, which take the parameters' places in the optimizer's groups.

    Args:
        loss_scale: of fp16.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        loss_scale: LossScaleConfig | None = None,
        max_grad_norm: float | None = None,
        device: torch.device | None = None,
        timeline: bool = True,
    ) -> None:
        self.device = device or torch.device("cpu")
        self.module = model.to(self.device)
        self.optimizer = optimizer
        self.timeline = Timeline(time.perf_counter_ns, enabled=timeline)
        self.max_grad_norm = max_grad_norm
        self._norm: float | None = None  # of the present gradients, once somebody asked
        self.steps = 0
        # Name, what the model computes with, what the optimizer updates: the same tensor in fp32.
        self._working = dict(self.module.named_parameters())
        self._masters: dict[str, nn.Parameter] = self._working
        self._scaler: torch.amp.GradScaler | None = None
        if precision == "fp16":
            scale = loss_scale or LossScaleConfig()
            self._scaler = torch.amp.GradScaler(
                self.device.type,
                init_scale=scale.init,
                growth_factor=scale.growth_factor,
                backoff_factor=scale.backoff_factor,
                growth_interval=scale.growth_interval,
            )
            self._scaler.scale(torch.zeros((), device=self.device))  # makes its state
        if precision != "fp32":
            narrow = torch.bfloat16 if precision == "bf16" else torch.float16
            self._masters = {
                name: nn.Parameter(p.detach().clone().float()) for name, p in self._working.items()
            }
            self._replace_in_groups()
            for parameter in self._working.values():
                parameter.data = parameter.data.to(narrow)
        self._step_start_ns = time.perf_counter_ns()

    @property
    def device_bytes(self) -> int:
        """Memory that the accelerator has in use; 0 on the CPU, where nothing counts it."""
        return torch.accelerator.memory_allocated() if self.device.type != "cpu" else 0

    @property
    def device_peak_bytes(self) -> int:
        """The largest of `device_bytes` so far."""
        return torch.accelerator.max_memory_allocated() if self.device.type != "cpu" else 0

    @property
    def device_budget_bytes(self) -> int | None:
        """None: nothing limits a plain loop."""
        return None

    @property
    def model_state_bytes(self) -> int:
        """Master, gradient and the rule's states in fp32: 16 bytes per trained parameter with Adam."""
        trained = {id(p): p.numel() for p in self._masters.values() if p.requires_grad}
        kind = next(
            base for base in type(self.optimizer).__mro__ if base in SUPPORTED
        )  # RoundedAdamW is an AdamW
        return 8 * sum(trained.values()) + sum(
            4 * len(state_keys(group, kind)) * trained.get(id(p), 0)
            for group in self.optimizer.param_groups
            for p in group["params"]
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Move the inputs to the device and run the model's forward."""
        phase = "FORWARD" if torch.is_grad_enabled() else "EVAL"
        args = tuple(a.to(self.device) if isinstance(a, Tensor) else a for a in args)
        return self._timed(phase, lambda: self.module(*args, **kwargs))

    def backward(self, loss: Tensor) -> None:
        """Run backward; the gradients of this micro-batch are added to the masters' in fp32."""
        scaled = loss if self._scaler is None else self._scaler.scale(loss.float())
        self._timed("BACKWARD", lambda: torch.autograd.backward(scaled))
        self._norm = None
        if self._masters is self._working:
            return
        for name, working in self._working.items():
            if working.grad is None:
                continue
            master, grad = self._masters[name], working.grad.float()
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            working.grad = None

    def train_batch(
        self,
        batches: Iterable[Any],
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        *,
        order: Literal["layer_major", "micro_batch"] = "micro_batch",
    ) -> list[Tensor]:
        """Run forward and backward of each batch, one argument of the model, in turn, whatever the `order`."""
        losses = []
        for batch in batches:
            output = self(batch)
            loss = output if loss_fn is None else loss_fn(output, batch)
            self.backward(loss)
            losses.append(loss.detach())
        return losses

    @property
    def grad_norm(self) -> float:
        """Global norm of the present gradients, before clipping. The sum of squares is taken in float64."""
        if self._norm is None:
            scale = 1.0 if self._scaler is None else self._scaler.get_scale()
            squares = (torch.linalg.vector_norm(g, dtype=torch.float64).item() ** 2 for g in self._grads())
            self._norm = math.sqrt(sum(squares)) / scale
        return self._norm

    @torch.no_grad()
    def step(self) -> None:
        """Clip and apply the gradients; in bf16, round the masters into the working parameters.

        Numerics: the factor min(1, max_grad_norm / (norm + 1e-6)) is rounded to fp32 once.
        """
        norm = self.grad_norm if self.max_grad_norm is not None else 0.0
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        if self.max_grad_norm is not None:
            factor = self.max_grad_norm / (norm + 1e-6)
            if factor < 1:
                for grad in self._grads():
                    grad.mul_(factor)
        if self._scaler is None:
            self._timed("UPDATE", self.optimizer.step)
        else:
            scale = self._scaler.get_scale()
            self._timed("UPDATE", partial(self._scaler.step, self.optimizer))
            self._scaler.update()
            if self._scaler.get_scale() < scale:
                return  # it overflowed and was skipped
        if self._masters is not self._working:
            for name, working in self._working.items():
                working.copy_(self._masters[name])
        self.steps += 1
        now_ns = time.perf_counter_ns()
        self.timeline.step(self.steps, self._step_start_ns, now_ns)
        self._step_start_ns = now_ns

    def _grads(self) -> list[Tensor]:
        return [p.grad for p in self._masters.values() if p.grad is not None]

    def train(self) -> None:
        """Put the model's modules in training mode."""
        self.module.train()

    def eval(self) -> None:
        """Put the model's modules in evaluation mode."""
        self.module.eval()

    def save(self, path: str | Path, extra: dict[str, Any] | None = None) -> None:
        """Write masters, moments, step counters, group settings, generators and `extra`, whole or not at all."""
        optimizer_steps = {
            name: float(self.optimizer.state[p].get("step", 0.0))  # SGD's and Muon's states have none
            for name, p in self._masters.items()
            if p in self.optimizer.state
        }
        facts = {
            "format": FORMAT,
            "steps": self.steps,
            "optimizer_steps": optimizer_steps,
            "groups": [
                {k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups
            ],
            "loss_scale": None if self._scaler is None else self._scaler.state_dict(),
            "extra": extra or {},
        }
        with atomic_directory(path) as folder:
            write_tensors(folder / "plain.safetensors", self._tensors(), {"format": FORMAT})
            write_json(folder / "plain.json", facts)

    @torch.no_grad()
    def load(self, path: str | Path) -> dict[str, Any]:
        """Read a checkpoint of `save` back; return its `extra`.

        Raises:
            CheckpointError: it is missing, was written by something else, or belongs to another model.
        """
        folder = resolve(path)
        file = folder / "plain.json"
        if not file.is_file():
            raise CheckpointError(
                f"{folder} has no plain.json: it was not written with engine.enabled=false. "
                f"Resume with the setting that it was written with."
            )
        facts: dict[str, Any] = read_json(file)
        with open_tensors(folder / "plain.safetensors") as stored:
            names = set(stored.keys())
            for name, master in self._masters.items():
                if name not in names or tuple(stored.get(name).shape) != tuple(master.shape):
                    raise CheckpointError(
                        f"{folder} does not fit this model: parameter {name!r} is missing or of another shape."
                    )
                master.copy_(stored.get(name))
                if name in facts["optimizer_steps"]:
                    state = {
                        key: stored.get(f"{name}.{key}").to(self.device)
                        for key in MOMENTS
                        if f"{name}.{key}" in names
                    }
                    if counts_steps(tuple(state)):
                        state["step"] = torch.tensor(facts["optimizer_steps"][name])
                    self.optimizer.state[master] = state
                self._working[name].copy_(master)
            torch.set_rng_state(stored.get("rng.cpu"))
            if "rng.accelerator" in names and self.device.type != "cpu":
                torch.get_device_module(self.device).set_rng_state(stored.get("rng.accelerator"))
        for group, settings in zip(self.optimizer.param_groups, facts["groups"], strict=True):
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()})
        if self._scaler is not None and facts.get("loss_scale"):
            self._scaler.load_state_dict(facts["loss_scale"])
        self.steps = facts["steps"]
        extra: dict[str, Any] = facts["extra"]
        return extra

    def summary(self) -> dict[str, Any]:
        """Return the engine's keys of summary.json: None or empty where only the engine has something to say."""
        return {
            "device_kind": None,
            "kernel_isa": None,
            "device_budget_bytes": None,
            "device_peak_bytes": self.device_peak_bytes,
            "model_state_bytes": self.model_state_bytes,
            "host_peak_bytes": peak_rss_bytes(),
            "bytes_by_lane": {},
            "busy_share_by_lane": {},
            "exposed_wait_s_by_cause": {},
            "loss_scale": None,
            "overlaps": {},
        }

    def describe(self) -> list[str]:
        """Return one line for the log."""
        return [f"engine off: plain PyTorch on {self.device} with {type(self.optimizer).__name__}"]

    def close(self) -> None:
        """Nothing to give back."""

    def _timed(self, phase: str, work: Callable[[], Any]) -> Any:
        start_ns = time.perf_counter_ns()
        result = work()
        self.timeline.phase(phase, start_ns, time.perf_counter_ns())
        return result

    def _replace_in_groups(self) -> None:
        master_of = {self._working[name]: master for name, master in self._masters.items()}
        for group in self.optimizer.param_groups:
            group["params"] = [master_of[p] for p in group["params"]]

    def _tensors(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], Callable[[], Tensor]]]:
        def entry(
            name: str, tensor: Tensor
        ) -> tuple[str, torch.dtype, tuple[int, ...], Callable[[], Tensor]]:
            return name, tensor.dtype, tuple(tensor.shape), lambda: tensor.detach().cpu()

        for name, master in self._masters.items():
            yield entry(name, master)
            for key in MOMENTS:
                if key in self.optimizer.state.get(master, {}):
                    yield entry(f"{name}.{key}", self.optimizer.state[master][key])
        yield entry("rng.cpu", torch.get_rng_state())
        if self.device.type != "cpu":
            yield entry("rng.accelerator", torch.get_device_module(self.device).get_rng_state())
