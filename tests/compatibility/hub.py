"""Models of transformers, and what people do with them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import torch
from torch import nn

from tests.compatibility.harness import CASES, STEPS, Case, Open, Values, case, trained, words

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
