"""Models of transformers, and what people do with them."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import offload_engine as oe
from tests.compatibility.harness import (
    CASES,
    STEPS,
    Case,
    Open,
    Values,
    case,
    rounding_adamw,
    trained,
    values_of,
    words,
)

HUB = "Hugging Face"


def _hub_models() -> Iterator[Case]:
    if not importlib.util.find_spec("transformers"):
        return
    from tests.parity import test_parity_transformers as models

    for name, build in models.MODELS.items():

        def run(make: Open, name: str = name, build: Callable[[], nn.Module] = build) -> Values:
            loop = make(build())
            loss = models.LOSSES.get(name, models.language_loss)
            loop.case_name = name  # type: ignore[attr-defined]
            return trained(loop, lambda step: loss(loop, step, 0))  # type: ignore[arg-type]

        yield Case(HUB, name, run, ("transformers",))


CASES += _hub_models()


@case(HUB, "generate() between steps", "transformers")
def generation(make: Open) -> Values:
    from tests.parity.test_parity_transformers import llama

    loop = make(llama())
    seen: Values = []
    for step in range(STEPS):
        with torch.no_grad():
            text = loop.model.generate(words(3, 61, 1, 4), max_new_tokens=6, do_sample=False)
        seen += [float(token) for token in text.flatten()]
        seen.append(loop.step(loop(input_ids=words(step), labels=words(step)).loss))
    return seen + loop.masters()


@case(HUB, "LoRA (peft) over a frozen base", "transformers", "peft")
def lora(make: Open) -> Values:
    import peft

    from tests.parity.test_parity_transformers import llama

    base = llama()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(base, config)
    loop = make(model, torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2))
    return trained(loop, lambda step: loop(input_ids=words(step), labels=words(step)).loss)


@case(HUB, "a folder of safetensors shards, opened on the meta device", "transformers")
def from_shards(make: Open) -> Values:
    from offload_engine.integrations.pretrained import open_pretrained
    from tests.parity.test_parity_transformers import llama

    with tempfile.TemporaryDirectory() as folder:
        llama().save_pretrained(folder, max_shard_size="20KB")
        if make.offload:
            model, weights = open_pretrained(folder)
            loop = make(model, weights=weights)
        else:
            from transformers import AutoModelForCausalLM

            loop = make(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        return trained(loop, lambda step: loop(input_ids=words(step), labels=words(step)).loss)


class _Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = words(index, 61, 9)
        return {"input_ids": text, "labels": text}


def _fresh_accelerate() -> None:
    """accelerate keeps its settings for the life of the process."""
    import accelerate

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def _trainer(make: Open, **changes: Any) -> Values:
    import transformers

    from offload_engine.integrations.trainer import OffloadTrainer
    from tests.parity.test_parity_transformers import llama

    _fresh_accelerate()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=STEPS,
            logging_steps=1,
            learning_rate=1e-3,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            **{"save_strategy": "no", "max_grad_norm": 0.5, **changes},
        )
        model = llama()
        optimizer = rounding_adamw(model, make.offload)
        extra: dict[str, Any] = {"optimizers": (optimizer, None)}
        kind: Any = transformers.Trainer
        if make.offload:
            kind = OffloadTrainer
            extra["engine_config"] = oe.EngineConfig(device="emulated", bucket_bytes=1, timeline=False)
        trainer = kind(model, arguments, train_dataset=_Texts(), **extra)
        try:
            trainer.train()
        finally:
            if make.offload and trainer.engine is not None:
                trainer.engine.close()
        losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
        return losses + values_of(model)


@case(
    HUB,
    "transformers.Trainer (OffloadTrainer): accumulation, clipping, schedule",
    "transformers",
    "accelerate",
)
def hub_trainer(make: Open) -> Values:
    return _trainer(make)


@case(HUB, "transformers.Trainer (OffloadTrainer), fp16=True", "transformers", "accelerate")
def hub_trainer_fp16(make: Open) -> Values:
    return _trainer(make, fp16=make.offload)


@case(HUB, "accelerate (prepare): accumulate, backward, clip_grad_norm_", "transformers", "accelerate")
def hub_accelerate(make: Open) -> Values:
    import accelerate

    from offload_engine.integrations.accelerator import prepare
    from tests.parity.test_parity_transformers import llama

    _fresh_accelerate()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: Any = llama()
    optimizer: Any = rounding_adamw(model, make.offload)
    engine = None
    if make.offload:
        config = oe.EngineConfig(device="emulated", bucket_bytes=1, timeline=False)
        engine, model, optimizer = prepare(accelerator, model, optimizer, config=config)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    seen: Values = []
    for step in range(2 * STEPS):
        with accelerator.accumulate(model):
            loss = model(input_ids=words(step), labels=words(step)).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                seen.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
    seen += values_of(model)
    if engine is not None:
        engine.close()
    return seen
