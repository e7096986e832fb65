"""The main job: train a model on text, with everything written down. Called by the command line.

One loop for the engine and for plain PyTorch. Invariant: a step is a function of the checkpoint, the config and its
number alone, so an interrupted and resumed run gives the same losses, bit for bit, as one that went through.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import time
from contextlib import ExitStack
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from offload_engine.checkpoint.format import read_json, write_json
from offload_engine.errors import CheckpointError, ConfigError, NonFiniteError
from offload_engine.host.process import rss_bytes
from offload_engine.training.config import HuggingFaceConfig, JobConfig
from offload_engine.training.data import TextData
from offload_engine.training.folder import RunFolder
from offload_engine.training.interrupt import Interrupt
from offload_engine.training.losses import batch_loss
from offload_engine.training.metrics import MetricsLog, write_text_atomic
from offload_engine.training.progress import Progress, StepFacts
from offload_engine.training.ranks import JobRanks
from offload_engine.training.report import report_lines
from offload_engine.training.resume import check_same_job
from offload_engine.training.sampling import sample_text
from offload_engine.training.setup import make_schedule, make_trainer

__all__ = ["Outcome", "run_job"]


class Outcome(enum.Enum):
    """How a run ended."""

    FINISHED = "finished"
    """All steps were done."""
    STOPPED = "stopped"
    """At the step that the caller asked to stop after."""
    INTERRUPTED = "interrupted"
    """By Ctrl-C."""


@dataclasses.dataclass
class RunState:
    """What a checkpoint holds of the run, beside the trainer's own state. JSON data only."""

    step: int = 0
    """Steps that are done."""
    first_loss: float | None = None
    last_loss: float | None = None
    heldout_loss_before: float | None = None
    """In nats per token, as all losses here."""
    training_s: float = 0.0
    """Time in training steps, over all parts of the run."""
    part: int = 1
    """Parts so far: one more with each resume."""


class Job:
    """One run of the main job, or one part of it between an interruption and a resume."""

    def __init__(
        self, config: JobConfig, folder: RunFolder, progress: Progress, ranks: JobRanks | None = None
    ) -> None:
        self.config, self.folder, self.progress = config, folder, progress
        self.state = RunState()
        self._first_step = 1
        self.heldout_loss_after: float | None = None
        self._last_waits_ns: dict[str, int] = {}
        self._last_grad_norm = math.nan
        self.ranks = ranks = ranks or JobRanks()
        self._share = ranks.share(config.train.accumulation)
        self.trainer, self.tokenizer = make_trainer(config, several=ranks.world > 1)
        try:
            self.data = TextData(config.data, config.train, self.tokenizer, config.run.seed)
            self.schedule = make_schedule(self.trainer.optimizer, config.train)
        except BaseException:
            self.trainer.close()
            raise

    def resume(self) -> None:
        """Take up the run where its checkpoint left it."""
        for line in check_same_job(read_json(self.folder.config), self.config.as_dict()):
            self.progress.note(line)
        extra = self.trainer.load(self.folder.checkpoint)
        try:
            schedule, state = extra["schedule"], extra["run"]
        except KeyError as error:
            raise CheckpointError(
                f"{self.folder.checkpoint} lacks {error}: it was not written by 'offload-engine train'."
            ) from None
        self.schedule.load_state_dict(schedule)
        for group, lr in zip(self.trainer.optimizer.param_groups, self.schedule.get_last_lr(), strict=True):
            group["lr"] = lr
        self.state = RunState(**state)
        self.state.part += 1
        while self.folder.timeline_of(self.state.part).exists():  # of a part that left no checkpoint
            self.state.part += 1
        self._first_step = self.state.step + 1
        self.progress.note(f"resumed at step {self.state.step} of {self.config.train.steps}")

    def train(self, metrics: MetricsLog, interrupt: Interrupt, stop_after: int | None) -> Outcome:
        """Do the remaining steps, unless asked to stop."""
        train, state = self.config.train, self.state
        if state.heldout_loss_before is None:
            state.heldout_loss_before = self.heldout_loss()
            self.progress.note(f"held-out loss before: {self._loss_words(state.heldout_loss_before)}")
        while state.step < train.steps:
            if self.ranks.any(interrupt.requested, "whether to stop"):
                return Outcome.INTERRUPTED
            if stop_after is not None and state.step >= stop_after:
                return Outcome.STOPPED
            self._step(metrics)
            if train.eval_every and state.step % train.eval_every == 0 and state.step < train.steps:
                self.progress.note(
                    f"step {state.step}: held-out loss {self._loss_words(self.heldout_loss())}"
                )
            if train.save_every and state.step % train.save_every == 0 and state.step < train.steps:
                self.save()
        return Outcome.FINISHED

    def _step(self, metrics: MetricsLog) -> None:
        train, state, trainer = self.config.train, self.state, self.trainer
        start = time.perf_counter()
        losses = []
        mine = islice(self.data.micro_batches(state.step), self.ranks.rank, None, self.ranks.world)
        batches = {id(batch.inputs_BT): batch for batch in mine}

        def share_of_loss(output: Any, inputs_BT: Tensor) -> Tensor:
            loss = batch_loss(output, batches[id(inputs_BT)])
            losses.append(loss.detach())
            return loss / self._share

        inputs = [batch.inputs_BT for batch in batches.values()]
        trainer.train_batch(inputs, share_of_loss, order=train.micro_batch_order)
        # The one place of a step where the host waits for the device.
        step_loss = self.ranks.mean(_mean(losses), "loss")
        lr = float(trainer.optimizer.param_groups[0]["lr"])
        if not math.isfinite(step_loss):
            raise self._non_finite("loss", step_loss, lr)
        grad_norm = trainer.grad_norm
        if (
            not math.isfinite(grad_norm) and self.config.engine.precision != "fp16"
        ):  # there, the step is skipped
            raise self._non_finite("gradient norm", grad_norm, lr)
        trainer.step()
        trainer.optimizer.zero_grad()
        self.schedule.step()
        seconds = time.perf_counter() - start
        state.step += 1
        state.training_s += seconds
        state.first_loss = step_loss if state.first_loss is None else state.first_loss
        state.last_loss, self._last_grad_norm = step_loss, grad_norm
        tokens_per_s = train.tokens_per_step / seconds
        trainer.timeline.memory("host", rss_bytes(), trainer.timeline.clock())
        metrics.write(
            {
                "step": state.step,
                "loss": step_loss,
                "lr": lr,
                "grad_norm": grad_norm if math.isfinite(grad_norm) else None,
                "tokens_per_s": round(tokens_per_s, 1),
                "device_bytes": trainer.device_bytes,
                "device_peak_bytes": trainer.device_peak_bytes,
            }
        )
        self.progress.step(
            StepFacts(
                step=state.step,
                steps=train.steps,
                loss=step_loss,
                tokens_per_s=tokens_per_s,
                device_peak_bytes=trainer.device_peak_bytes,
                device_budget_bytes=trainer.device_budget_bytes,
                wait_ns_by_cause=self._new_waits(),
            )
        )

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """Return the mean loss over the fixed held-out batches, in nats per token."""
        self.trainer.eval()
        losses = []
        for batch in self.data.heldout():
            losses.append(batch_loss(self.trainer(batch.inputs_BT), batch))
        self.trainer.train()
        return _mean(losses)

    def save(self) -> None:
        """Write the checkpoint, in place of the one before, at once or not at all."""
        extra = {
            "schedule": self.schedule.state_dict(),
            "run": dataclasses.asdict(self.state),
        }
        self.trainer.save(self.folder.checkpoint, extra=extra)

    def write_sample(self) -> str:
        """Sample a short text and write sample.txt."""
        train = self.config.train
        text = sample_text(
            self.trainer,
            self.tokenizer,
            prompt=train.sample_prompt,
            length_bytes=train.sample_bytes,
            temperature=train.sample_temperature,
            seed=self.config.run.seed,
            seq_len=train.seq_len,
        )
        write_text_atomic(self.folder.sample, text + "\n")
        return text

    def write_model(self) -> bool:
        """Write a model of transformers and its tokenizer for `from_pretrained`; return False for other models."""
        if not isinstance(self.config.model, HuggingFaceConfig):
            return False
        from offload_engine.training.models import huggingface

        huggingface.save(self.trainer.module, self.tokenizer, self.folder.model)
        return True

    def write_summary(self, outcome: str) -> dict[str, Any]:
        """Write summary.json and the timeline of this part of the run; return the summary."""
        config, state = self.config, self.state
        per_byte = 1 / self.data.heldout_bytes_per_token
        before, after = state.heldout_loss_before, self.heldout_loss_after
        tokens = state.step * config.train.tokens_per_step
        whole = {
            "run": config.run.name,
            "outcome": outcome,
            "engine_enabled": config.engine.enabled,
            "precision": config.engine.precision,
            "steps": state.step,
            "ranks": self.ranks.world,
            "first_loss": state.first_loss,
            "last_loss": state.last_loss,
            "loss_unit": f"nats per {self.tokenizer.unit}",
            "heldout_loss_before": before,
            "heldout_loss_after": after,
            "heldout_nats_per_byte_before": None if before is None else before * per_byte,
            "heldout_nats_per_byte_after": None if after is None else after * per_byte,
            "tokens": tokens,
            "training_s": state.training_s,
            "tokens_per_s": tokens / state.training_s if state.training_s else 0.0,
        }
        timeline = self.folder.timeline_of(state.part)
        # The trainer knows of this part of a resumed run; where both have a word, the whole run's counts.
        of_part = {key: value for key, value in self.trainer.summary().items() if key not in whole}
        part = {
            "number": state.part,
            "first_step": self._first_step,
            "steps": state.step + 1 - self._first_step,
            "timeline": timeline.name if config.engine.timeline else None,
            "keys": sorted(of_part),
        }
        summary = whole | {"part": part} | of_part
        write_json(self.folder.summary, summary)
        if config.engine.timeline:
            self.trainer.timeline.save(timeline, rank=self.ranks.rank)
        return summary

    def _new_waits(self) -> dict[str, int]:
        waits_ns = dict(self.trainer.timeline.totals.wait_ns_by_cause)
        new = {cause: ns - self._last_waits_ns.get(cause, 0) for cause, ns in waits_ns.items()}
        self._last_waits_ns = waits_ns
        return new

    def _loss_words(self, loss: float) -> str:
        words = f"{loss:.4f} nats per {self.tokenizer.unit}"
        if self.tokenizer.unit != "byte":
            words += f" ({loss / self.data.heldout_bytes_per_token:.4f} per byte)"
        return words

    def _non_finite(self, what: str, value: float, lr: float) -> NonFiniteError:
        state, norm = self.state, self._last_grad_norm
        loss_words = (
            "no loss" if state.last_loss is None else f"the last finite loss was {state.last_loss:.4f}"
        )
        norm_words = "" if math.isnan(norm) else f", with a gradient norm of {norm:.3g}"
        kept = " The checkpoint is from before it, and whole." if self.folder.has_checkpoint() else ""
        return NonFiniteError(
            f"the {what} of step {state.step + 1} is {value} at lr {lr:.3g}; before it, {loss_words}{norm_words}. "
            f"The step was not applied.{kept} Lower train.lr, lengthen train.warmup_steps, or set train.clip."
        )


def run_job(config: JobConfig, *, resume: bool = False, stop_after: int | None = None) -> Outcome:
    """Run the main job and write everything under the run's folder.

    Args:
        resume: go on from the run's checkpoint.
        stop_after: stop, as Ctrl-C would, once this many steps of the whole run are done.

    Raises:
        ConfigError: the config does not fit, or `resume` finds nothing to resume.
        NonFiniteError: a loss or a gradient norm is not finite; the files written so far stay.
    """
    ranks = JobRanks()
    folder = RunFolder(config.run.folder)
    if resume and not folder.has_checkpoint():
        raise ConfigError(
            f"there is nothing to resume in {folder.path}. "
            + (
                f"The run before it can be gone on with: --set run.name={folder.previous.name} --resume."
                if RunFolder(folder.previous).has_checkpoint()
                else "Run without --resume first."
            )
        )
    with ExitStack() as ended:
        ended.callback(ranks.close)
        if not ranks.leads:
            folder = ended.enter_context(folder.followed(ranks.rank))
        folder.make()
        progress = ended.enter_context(Progress(config.train.log_every, silent=not ranks.leads))
        job = Job(config, folder, progress, ranks)
        ended.callback(job.trainer.close)
        for line in job.trainer.describe():
            progress.note(line)
        if resume:
            job.resume()
        else:
            previous = folder.start_over() if ranks.leads else None
            if previous is not None:
                progress.note(
                    f"{folder.path} held an earlier run; starting over, since --resume was not given. It is whole in "
                    f"{previous}/ (--set run.name={previous.name} --resume goes on with it)"
                )
        return _run(job, stop_after)


def _run(job: Job, stop_after: int | None) -> Outcome:
    progress, folder = job.progress, job.folder
    message = "stopping after this step; everything will be written. Ctrl-C again stops at once."
    with MetricsLog(folder.metrics, job.state.step) as metrics, Interrupt(message) as interrupt:
        if job.ranks.leads:
            write_json(folder.config, job.config.as_dict())
        try:
            outcome = job.train(metrics, interrupt, stop_after)
        except NonFiniteError:
            job.write_summary("failed")
            raise
        progress.close()
        job.save()
        if outcome is Outcome.FINISHED:
            job.heldout_loss_after = job.heldout_loss()
        summary = job.write_summary(outcome.value)
        budget_bytes = summary["device_budget_bytes"]
        for line in report_lines(summary, job.trainer.timeline.summary(device_budget_bytes=budget_bytes)):
            progress.note(line)
        if not job.ranks.leads:
            job.ranks.barrier("end of the run")
            return outcome
        if outcome is Outcome.FINISHED and job.config.train.sample_bytes:
            progress.note(f"a sample:\n\n{job.write_sample()}\n")
        if outcome is Outcome.FINISHED and job.write_model():
            progress.note(f"for from_pretrained: {folder.model}/")
        progress.note(f"written to {folder.path}/")
        job.ranks.barrier("end of the run")
        return outcome


def _mean(losses: list[Tensor]) -> float:
    values: list[float] = torch.stack(losses).tolist()
    return sum(values) / len(values)
