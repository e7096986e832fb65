"""Text as batches of token ids. Used by the loop.

The invariant: a batch is a pure function of seed, step and micro-batch index, so resuming needs no data state.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from offload_engine.errors import ConfigError
from offload_engine.training.config import DataConfig, TrainConfig
from offload_engine.training.tokenizers import Tokenizer

__all__ = ["Batch", "TextData", "read_text"]


@dataclass(frozen=True)
class Batch:
    """One micro-batch: `targets_BT` are `inputs_BT` one token later; both int64 on the CPU."""

    inputs_BT: Tensor
    targets_BT: Tensor


def read_text(config: DataConfig, tokenizer: Tokenizer) -> str:
    """Return the whole text of a [data] section, always in the same order.

    Args:
        tokenizer: writes the messages of a chat as text, and what stands between the texts of a JSON Lines file.

    Raises:
        ConfigError: the file is missing, is not UTF-8 text, or a line of it is not what it should be.
    """
    if config.kind == "python_docs":
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    try:
        text = Path(config.path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.path: {config.path!r} cannot be read as UTF-8 text: {error}.") from None
    if config.kind == "file":
        return text
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    return "".join(_text_of(config, tokenizer, number, line) + tokenizer.separator for number, line in lines)


def _text_of(config: DataConfig, tokenizer: Tokenizer, number: int, line: str) -> str:
    """Return the text of one line of a JSON Lines file."""
    where = f"data.path: line {number} of {config.path!r}"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"{where} is no JSON: {error}. With data.kind = 'file' it is read as plain text."
        ) from None
    if not isinstance(row, dict) or config.field not in row:
        found = (
            f"has the fields {', '.join(map(repr, row))}"
            if isinstance(row, dict)
            else f"is a {type(row).__name__}"
        )
        raise ConfigError(
            f"{where} {found}; data.field is {config.field!r}. Name the field that holds the text."
        )
    value = row[config.field]
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return tokenizer.chat_text(value, where)
    raise ConfigError(
        f"{where}: {config.field!r} is a {type(value).__name__}; a text or a list of chat messages is needed."
    )


class TextData:
    """The text as two runs of token ids: the front is trained on, the end is held out.

    Training goes through the text in windows of `seq_len` tokens. Each epoch takes every window once, in a new
    order and with the window borders moved by a new offset.
    """

    def __init__(self, data: DataConfig, train: TrainConfig, tokenizer: Tokenizer, seed: int) -> None:
        text = read_text(data, tokenizer)
        # Cut at a character, so that the split is the same text for every tokenizer.
        cut = len(text) - round(len(text) * data.heldout_share)
        self.train_tokens = _encode(tokenizer, text[:cut])
        self.heldout_tokens = _encode(tokenizer, text[cut:])
        self.heldout_bytes_per_token = len(text[cut:].encode()) / len(self.heldout_tokens)
        self.seed, self.seq_len = seed, train.seq_len
        self.micro_batch, self.accumulation = train.micro_batch, train.accumulation
        self.eval_batches = train.eval_batches
        # One window fewer than fit, so that every offset below seq_len leaves room for all of them.
        self.windows = (len(self.train_tokens) - 1) // self.seq_len - 1
        for name, tokens, least in (
            ("training", self.train_tokens, 2 * self.seq_len + 1),
            ("held-out", self.heldout_tokens, self.seq_len + 1),
        ):
            if len(tokens) < least:
                raise ConfigError(
                    f"the {name} text has {len(tokens)} tokens; train.seq_len = {self.seq_len} needs {least}. "
                    f"Use a shorter train.seq_len or a longer text."
                )

    def micro_batches(self, step: int) -> Iterator[Batch]:
        """Yield the micro-batches of one step; the first step is 0."""
        first = step * self.accumulation * self.micro_batch
        for index in range(first, first + self.accumulation * self.micro_batch, self.micro_batch):
            starts = [self._start(sequence) for sequence in range(index, index + self.micro_batch)]
            yield _cut(self.train_tokens, starts, self.seq_len)

    def heldout(self) -> Iterator[Batch]:
        """Yield the held-out micro-batches: always the same, spread evenly over the held-out text."""
        last = len(self.heldout_tokens) - self.seq_len - 1
        count = self.eval_batches * self.micro_batch
        starts = [last * i // max(1, count - 1) for i in range(count)]
        for index in range(0, count, self.micro_batch):
            yield _cut(self.heldout_tokens, starts[index : index + self.micro_batch], self.seq_len)

    def _start(self, sequence: int) -> int:
        epoch, index = divmod(sequence, self.windows)
        order, offset = _epoch_order(self.seed, epoch, self.windows, self.seq_len)
        return int(order[index]) * self.seq_len + offset


@lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, windows: int, seq_len: int) -> tuple[Tensor, int]:
    generator = torch.Generator().manual_seed((seed << 20) + epoch)
    order = torch.randperm(windows, generator=generator)
    return order, int(torch.randint(seq_len, (1,), generator=generator))


def _encode(tokenizer: Tokenizer, text: str) -> Tensor:
    return torch.tensor(tokenizer.encode(text), dtype=torch.int64)


def _cut(tokens: Tensor, starts: list[int], seq_len: int) -> Batch:
    rows = torch.stack([tokens[start : start + seq_len + 1] for start in starts])
    return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
