"""Loops that people have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.compatibility.harness import STEPS, Open, Values, batch, case, mlp, trained

LOOPS = "Loops"


@case(LOOPS, "loss.backward(); optimizer.step(); scheduler.step(); optimizer.zero_grad()")
def plain_loop(make: Open) -> Values:
    loop = make(mlp())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, 5)
    seen = []
    for step in range(STEPS):
        seen.append(loop.step(loop(batch(step)).square().mean()))
        scheduler.step()
        seen.append(scheduler.get_last_lr()[0])
    return seen + loop.masters()


def _clipping(make: Open, clip: Callable[[Any], Any], **config: str) -> Values:
    loop = make(mlp(), **config)
    seen = []
    for step in range(STEPS):
        loss = 30 * loop(batch(step)).square().mean()
        loss.backward()
        norm = clip(loop.model.parameters())
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        seen += [loss.item(), 0.0 if norm is None else float(norm)]
    return seen + loop.masters()


@case(LOOPS, "torch.nn.utils.clip_grad_norm_")
def clip_norm(make: Open) -> Values:
    return _clipping(make, lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.5))


@case(LOOPS, "torch.nn.utils.clip_grad_norm_, gradients = 'release'")
def clip_released(make: Open) -> Values:
    return _clipping(
        make, lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.5), gradients="release"
    )


@case(LOOPS, "torch.nn.utils.clip_grad_value_")
def clip_value(make: Open) -> Values:
    return _clipping(make, lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 0.1))


@case(LOOPS, "gradient accumulation")
def accumulation(make: Open) -> Values:
    loop = make(mlp())
    seen = []
    for step in range(STEPS):
        for micro in range(3):
            loss = loop(batch(10 * step + micro)).square().mean() / 3
            loss.backward()
            seen.append(loss.item())
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return seen + loop.masters()


@case(LOOPS, "optimizer.step(closure)")
def with_closure(make: Open) -> Values:
    loop = make(mlp())
    seen = []
    for step in range(STEPS):

        def evaluate(step: int = step) -> torch.Tensor:
            loop.optimizer.zero_grad()
            loss = loop(batch(step)).square().mean()
            loss.backward()
            return loss

        seen.append(float(loop.optimizer.step(evaluate)))
    return seen + loop.masters()


@case(LOOPS, "torch.amp.GradScaler, disabled")
def scaler_off(make: Open) -> Values:
    return _scaled(make, False)


@case(LOOPS, "torch.amp.GradScaler, enabled, fp32")
def scaler_on(make: Open) -> Values:
    return _scaled(make, True)


@case(LOOPS, "torch.amp.GradScaler, enabled, precision = 'fp16'")
def scaler_fp16(make: Open) -> Values:
    return _scaled(make, True, precision="fp16")


def _scaled(make: Open, enabled: bool, **config: str) -> Values:
    loop = make(mlp(), **config)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)
    seen = []
    for step in range(STEPS):
        data = batch(step).half() if config and make.offload else batch(step)
        loss = loop(data).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(loop.optimizer)
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
        seen.append(loss.item())
    return seen + loop.masters()


@case(LOOPS, "evaluation between steps")
def evaluation(make: Open) -> Values:
    loop = make(nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Dropout(0.0), nn.Linear(9, 3)))
    seen = []
    for step in range(STEPS):
        loop.model.eval()
        with torch.inference_mode():
            seen.append(loop(batch(99)).sum().item())
        loop.model.train()
        seen.append(loop.step(loop(batch(step)).square().mean()))
    return seen + loop.masters()


@case(LOOPS, "two models, two engines (GAN)")
def gan(make: Open) -> Values:
    generator, critic = make(mlp()), make(nn.Sequential(nn.Linear(3, 11), nn.Tanh(), nn.Linear(11, 1)))
    seen = []
    for step in range(STEPS):
        fake = generator(batch(step))
        loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(batch(50 + step, 4, 3))).mean()
        seen.append(critic.step(loss))
        loss = F.softplus(-critic(generator(batch(step)))).mean()
        loss.backward()
        generator.optimizer.step()
        generator.optimizer.zero_grad()
        critic.optimizer.zero_grad()
        seen.append(loss.item())
    return seen + generator.masters() + critic.masters()


@case(LOOPS, "a frozen teacher beside the student")
def distillation(make: Open) -> Values:
    teacher, student = mlp(23).requires_grad_(False), make(mlp())
    return trained(student, lambda step: (student(batch(step)) - teacher(batch(step))).square().mean())


@case(LOOPS, "freezing and unfreezing while training")
def freezing(make: Open) -> Values:
    loop = make(mlp())
    seen = []
    for step in range(6):
        loop.model[0].requires_grad_(step not in (2, 3))
        seen.append(loop.step(loop(batch(step)).square().mean()))
    return seen + loop.masters()


@case(LOOPS, "unfreezing what was frozen at wrapping")
def unfreezing(make: Open) -> Values:
    model = mlp()
    model[0].requires_grad_(False)
    loop = make(model)
    seen = []
    for step in range(6):
        if step == 3:
            model[0].requires_grad_(True)
        seen.append(loop.step(loop(batch(step)).square().mean()))
    return seen + loop.masters()


@case(LOOPS, "optimizer.add_param_group while training")
def adding_groups(make: Open) -> Values:
    model = mlp()
    optimizer = torch.optim.AdamW(model[2:].parameters(), lr=1e-2)
    loop = make(model, optimizer)
    seen = []
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-3})
        seen.append(loop.step(loop(batch(step)).square().mean()))
        model.zero_grad()
    return seen + loop.masters()
