"""From a job's config to the objects that train it: model, optimizer, trainer, schedule."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import nn

from offload_engine.config import EngineConfig
from offload_engine.errors import ConfigError
from offload_engine.training.config import EngineSection, JobConfig, TrainConfig
from offload_engine.training.models import build_model
from offload_engine.training.reference import PlainTrainer
from offload_engine.training.rounded_adamw import RoundedAdamW
from offload_engine.training.tokenizers import Tokenizer
from offload_engine.training.trainer import Trainer

__all__ = ["make_optimizer", "make_schedule", "make_trainer"]


def make_trainer(job: JobConfig, *, several: bool = False) -> tuple[Trainer, Tokenizer]:
    """Return the engine, or plain PyTorch where it is off, around a seeded model; and the tokenizer.

    Args:
        several: whether the job has several ranks, which plain PyTorch here knows nothing of.

    Raises:
        ConfigError: it has, and the engine is off.
    """
    if several and not job.engine.enabled:
        raise ConfigError("engine.enabled = false trains in one process. Start one, or leave the engine on.")
    torch.manual_seed(job.run.seed)
    model, tokenizer, weights = build_model(job.model, job.data.tokenizer, streamed=job.engine.enabled)
    rounded = not job.engine.enabled and job.engine.update == "rounded"
    optimizer = make_optimizer(model, job.train, RoundedAdamW if rounded else torch.optim.AdamW)
    if not job.engine.enabled:
        if job.engine.threads.compute:
            torch.set_num_threads(job.engine.threads.compute)
        plain = PlainTrainer(
            model,
            optimizer,
            precision=job.engine.precision,
            loss_scale=job.engine.loss_scale,
            max_grad_norm=job.train.clip or None,
            device=_plain_device(job.engine),
            timeline=job.engine.timeline,
        )
        return plain, tokenizer
    from offload_engine.engine import OffloadEngine

    return OffloadEngine(model, optimizer, _engine_config(job), weights=weights), tokenizer


def make_optimizer(
    model: nn.Module, train: TrainConfig, adamw: type[torch.optim.AdamW] = torch.optim.AdamW
) -> torch.optim.AdamW:
    """Return AdamW with two groups: matrices with weight decay; norms, biases and embeddings without."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2 and id(p) not in embeddings]
    rest = [p for p in trained if p.ndim < 2 or id(p) in embeddings]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": train.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return adamw([g for g in groups if g["params"]], lr=train.lr, betas=train.betas, eps=train.eps)


def make_schedule(optimizer: torch.optim.Optimizer, train: TrainConfig) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the learning-rate schedule: linear warm-up, then cosine or constant."""

    def share(step: int) -> float:
        if step < train.warmup_steps:
            return (step + 1) / train.warmup_steps
        if train.schedule == "constant":
            return 1.0
        done = min(1.0, (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps))
        return train.min_lr_share + (1 - train.min_lr_share) * 0.5 * (1 + math.cos(math.pi * done))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def _plain_device(engine: EngineSection) -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator if accelerator is not None and engine.device != "emulated" else torch.device("cpu")


def _engine_config(job: JobConfig) -> EngineConfig:
    fields = {field.name: getattr(job.engine, field.name) for field in dataclasses.fields(EngineConfig)}
    return EngineConfig(**fields | {"max_grad_norm": job.train.clip or None})
