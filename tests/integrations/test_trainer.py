"""`transformers.Trainer` and `accelerate` loops over the engine, against the same without it."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import offload_engine as oe
from tests.parity.harness import one_compute_thread

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed (make setup-hf)")
accelerate = pytest.importorskip("accelerate", reason="the extra 'hf' is not installed (make setup-hf)")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
__all__ = ["one_compute_thread"]


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps its settings for the life of the process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[oe.OffloadEngine]]:
    """An engine left open counts the memory of whatever the next test runs; so each is closed with its test."""
    made: list[oe.OffloadEngine] = []
    make = oe.OffloadEngine.__init__

    def recorded(self: oe.OffloadEngine, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(oe.OffloadEngine, "__init__", recorded)
    yield made
    for engine in made:
        engine.close()


SMALL = oe.EngineConfig(device="emulated", bucket_bytes=1, device_memory="384KiB")


class Texts(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = torch.randint(101, (9,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": text, "labels": text}


def small_llama() -> Any:
    from tests.parity.test_parity_transformers import llama

    torch.manual_seed(0)
    return llama()


def arguments(folder: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "logging_steps": 1,
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "learning_rate": 1e-3,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return transformers.TrainingArguments(str(folder), **{**settings, **changes})


def trainer(folder: Path, offload: bool, **changes: Any) -> Any:
    from offload_engine.integrations.trainer import OffloadTrainer

    kind, extra = (OffloadTrainer, {"engine_config": SMALL}) if offload else (transformers.Trainer, {})
    return kind(
        small_llama(), arguments(folder, **changes), train_dataset=Texts(), eval_dataset=Texts(), **extra
    )


def history(done: Any) -> list[float]:
    """Return every loss, held-out loss, norm and learning rate that was logged."""
    keys = ("loss", "eval_loss", "grad_norm", "learning_rate")
    return [float(line[key]) for line in done.state.log_history for key in keys if key in line]


@pytest.mark.parametrize(
    "changes", [{}, {"gradient_checkpointing": True}, {"bf16": True}, {"optim": "sgd"}], ids=str
)
def test_the_trainers_loop(changes: dict[str, Any], tmp_path: Path) -> None:
    """Accumulation, clipping, warm-up and schedule, evaluation, saving: the numbers of the plain trainer."""
    plain, ours = (trainer(tmp_path / str(offload), offload, **changes) for offload in (False, True))
    plain.train()
    ours.train()
    assert ours.engine is not None and ours.engine.summary()["steps"] == 6
    assert len(history(ours)) == 6 * 3 + 2
    torch.testing.assert_close(
        torch.tensor(history(ours)), torch.tensor(history(plain)), rtol=1e-5, atol=1e-6
    )
    ours.save_model(tmp_path / "saved")
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(map(torch.equal, loaded.parameters(), ours.model.parameters()))
    ours.engine.close()


def test_resuming(tmp_path: Path) -> None:
    """From the trainer's own checkpoint of step 3: the losses of a run that was never stopped, bit for bit."""
    whole = trainer(tmp_path / "whole", True)
    whole.train()
    resumed = trainer(tmp_path / "resumed", True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert history(resumed)[-10:] == history(whole)[-10:]
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))


def test_the_model_is_never_moved_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Any] = []
    monkeypatch.setattr(
        transformers.PreTrainedModel, "to", lambda self, *args, **kwargs: moved.append(args) or self
    )
    trainer(tmp_path, True, max_steps=1).train()
    assert not moved


def test_what_the_trainer_cannot_do_beside_the_engine(tmp_path: Path) -> None:
    from offload_engine.integrations.trainer import OffloadTrainer

    def refused(error: type[Exception], match: str, config: oe.EngineConfig = SMALL, **changes: Any) -> None:
        with pytest.raises(error, match=match):
            OffloadTrainer(
                small_llama(), arguments(tmp_path, eval_strategy="no", **changes), engine_config=config
            )

    half = oe.EngineConfig(device="emulated", precision="fp16")
    refused(oe.UnsupportedError, "does not go with precision = 'fp16'.*bf16", half)
    clipping = oe.EngineConfig(device="emulated", max_grad_norm=0.5)
    refused(oe.ConfigError, r"clips at 0.5 and TrainingArguments at 1.0.*max_grad_norm=0", clipping)
    with pytest.raises(oe.UnsupportedError, match="RMSprop; supported are"):
        trainer(tmp_path, True, optim="rmsprop").train()


def accelerated(offload: bool, **changes: Any) -> list[float]:
    from offload_engine.integrations.accelerator import prepare

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **changes)
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(Texts(), batch_size=2)
    engine = None
    if offload:
        engine, model, optimizer, loader, scheduler = prepare(
            accelerator, model, optimizer, loader, scheduler, config=SMALL
        )
    else:
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    seen = []
    for rows in loader:
        with accelerator.accumulate(model):
            loss = model(**rows).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                seen.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            seen.append(loss.item())
    if engine is not None:
        assert engine.summary()["steps"] == 6
        engine.close()
    return [*seen, *scheduler.get_last_lr()]


@pytest.mark.parametrize("changes", [{}, {"mixed_precision": "bf16"}], ids=str)
def test_a_loop_of_accelerate(changes: dict[str, Any]) -> None:
    ours = accelerated(True, **changes)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    plain = accelerated(False, **changes)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(plain), rtol=1e-5, atol=1e-7)


def test_what_accelerate_cannot_do_beside_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import DistributedType

    from offload_engine.integrations.accelerator import prepare

    accelerator = accelerate.Accelerator(cpu=True)
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(oe.UnsupportedError, match="precision='bf16'"):
        prepare(accelerator, model, optimizer, config=oe.EngineConfig(device="emulated", precision="fp16"))
    monkeypatch.setattr(accelerator.state, "distributed_type", DistributedType.MULTI_GPU)
    with pytest.raises(oe.UnsupportedError, match="set up for MULTI_GPU.*without `accelerate launch`"):
        prepare(accelerator, model, optimizer)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world_size": 2}, "world_size = 2. Start one process"),
        ({"n_gpu": 4}, "n_gpu = 4. Show the process one device"),
        ({"deepspeed": "zero3.json"}, "deepspeed. Leave it out"),
        ({"fsdp": "full_shard"}, "fsdp. Leave it out"),
        ({"fp16": True}, "fp16 = True. Use bf16 = True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_arguments_that_ask_for_what_goes_on_beside_the_engine(changes: dict[str, Any], words: str) -> None:
    from offload_engine.integrations.trainer import _check

    plain = {"world_size": 1, "n_gpu": 0, "deepspeed": None, "fsdp": "", "fp16": False, "max_grad_norm": 1.0}
    _check(types.SimpleNamespace(**plain), SMALL)  # type: ignore[arg-type]
    with pytest.raises(oe.UnsupportedError, match=words):
        _check(types.SimpleNamespace(**{**plain, **changes}), SMALL)  # type: ignore[arg-type]
