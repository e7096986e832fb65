"""Text, split and batches: a batch is a function of seed, step and micro-batch, and held-out text stays held out."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from offload_engine.errors import ConfigError
from offload_engine.training.config import DataConfig, TrainConfig
from offload_engine.training.data import TextData, read_text
from offload_engine.training.tokenizers import ByteTokenizer

TRAIN = TrainConfig(steps=1, micro_batch=2, accumulation=3, seq_len=16, eval_batches=4)


def data(path: Path, text: str, train: TrainConfig = TRAIN, seed: int = 1) -> TextData:
    path.write_text(text, encoding="utf-8")
    return TextData(DataConfig(kind="file", path=str(path)), train, ByteTokenizer(), seed)


@pytest.fixture
def numbered(tmp_path: Path) -> TextData:
    return data(tmp_path / "t.txt", " ".join(f"{i:03d}" for i in range(400)))


def test_python_docs_are_the_same_text_each_time() -> None:
    text = read_text(DataConfig(), ByteTokenizer())
    assert text == read_text(DataConfig(), ByteTokenizer())
    assert len(text) > 100_000
    assert "assert" in text


def test_targets_follow_inputs(numbered: TextData) -> None:
    for batch in (*numbered.micro_batches(0), *numbered.heldout()):
        assert batch.inputs_BT.shape == batch.targets_BT.shape == (2, 16)
        assert torch.equal(batch.inputs_BT[:, 1:], batch.targets_BT[:, :-1])


def test_a_step_has_its_micro_batches(numbered: TextData) -> None:
    assert len(list(numbered.micro_batches(5))) == 3


def test_batches_depend_on_seed_and_step_alone(tmp_path: Path, numbered: TextData) -> None:
    text = " ".join(f"{i:03d}" for i in range(400))
    again, other = data(tmp_path / "a.txt", text), data(tmp_path / "b.txt", text, seed=2)
    list(numbered.micro_batches(3))  # reading one step changes no other
    for step in (0, 7, 200):
        first = [b.inputs_BT for b in numbered.micro_batches(step)]
        assert all(torch.equal(x, b.inputs_BT) for x, b in zip(first, again.micro_batches(step), strict=True))
        assert not all(
            torch.equal(x, b.inputs_BT) for x, b in zip(first, other.micro_batches(step), strict=True)
        )


def test_an_epoch_takes_every_window_once_and_the_next_one_in_a_new_order(tmp_path: Path) -> None:
    train = TrainConfig(steps=1, seq_len=16)
    numbered = data(tmp_path / "t.txt", " ".join(f"{i:03d}" for i in range(400)), train)

    def starts(epoch: int) -> list[int]:
        return [numbered._start(epoch * numbered.windows + i) for i in range(numbered.windows)]

    for epoch in (0, 1):
        ordered = sorted(starts(epoch))
        assert all(b - a == 16 for a, b in zip(ordered, ordered[1:], strict=False))
        assert 0 <= ordered[0] and ordered[-1] + 17 <= len(numbered.train_tokens)
    assert starts(0) != starts(1)


def test_heldout_text_is_the_end_and_never_trained_on(numbered: TextData) -> None:
    whole = torch.cat([numbered.train_tokens, numbered.heldout_tokens])
    text = " ".join(f"{i:03d}" for i in range(400))
    assert bytes(whole.tolist()).decode() == text
    assert len(numbered.heldout_tokens) == round(len(text) * 0.1)
    trained = {
        tuple(row.tolist()) for step in range(60) for b in numbered.micro_batches(step) for row in b.inputs_BT
    }
    held_out = {tuple(row.tolist()) for b in numbered.heldout() for row in b.inputs_BT}
    assert not trained & held_out


def test_heldout_batches_are_always_the_same(numbered: TextData) -> None:
    first = list(numbered.heldout())
    assert len(first) == 4
    assert all(torch.equal(a.inputs_BT, b.inputs_BT) for a, b in zip(first, numbered.heldout(), strict=True))


def test_text_with_long_characters_is_cut_at_a_character(tmp_path: Path) -> None:
    held = data(tmp_path / "t.txt", "äöü€" * 200)
    bytes(held.train_tokens.tolist()).decode()
    bytes(held.heldout_tokens.tolist()).decode()
    assert held.heldout_bytes_per_token == 1.0


def test_short_text_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"held-out text has 10 tokens.*needs 17.*shorter train.seq_len"):
        data(tmp_path / "t.txt", "x" * 100)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xfa"])
def test_unreadable_file_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "t.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"data.path.*t.txt.*cannot be read"):
        read_text(DataConfig(kind="file", path=str(path)), ByteTokenizer())


def test_byte_tokenizer_round_trips_and_marks_what_is_no_text() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("Grüße €")) == "Grüße €"
    assert tokenizer.decode([65, 0xC3]) == "A\ufffd"
    assert list(islice(tokenizer.encode("AB"), 2)) == [65, 66]


def lines(path: Path, text: str, field: str = "text") -> str:
    path.write_text(text, encoding="utf-8")
    return read_text(DataConfig(kind="jsonl", path=str(path), field=field), ByteTokenizer())


def test_json_lines(tmp_path: Path) -> None:
    """Each text of its field, in order, with what the tokenizer puts after each; blank lines are none."""
    path = tmp_path / "t.jsonl"
    assert lines(path, '{"text": "one\\ntwo"}\n\n{"id": 7, "text": "dré"}\n') == "one\ntwo\n\ndré\n\n"
    assert lines(path, '{"body": "x"}', "body") == "x\n\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a"}\nplain text\n', "line 2 of .* is no JSON.*data.kind = 'file'"),
        ('{"body": "a", "id": 1}', "line 1 of .* has the fields 'body', 'id'; data.field is 'text'"),
        ('["a"]', "is a list; data.field"),
        ('{"text": 3}', "'text' is a int; a text or a list of chat messages"),
        ('{"text": [{"role": "user", "content": "a"}]}', "bytes have no template.*tokenizer = 'model'"),
    ],
)
def test_lines_that_are_no_text(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        lines(tmp_path / "t.jsonl", text)
