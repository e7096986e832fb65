"""`offload-engine train` on a local Hugging Face folder: texts and chats in, a folder for `from_pretrained` out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_engine.__main__ import main

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed (make setup-hf)")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model with a tokenizer of words and characters, saved as people's are."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "</s>", "<user>", "<assistant>", *(chr(code) for code in range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="</s>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=TEMPLATE,
    )
    from tests.parity.test_parity_transformers import llama

    torch.manual_seed(0)
    path = tmp_path / "model"
    llama(eos_token_id=1, bos_token_id=None).save_pretrained(path)
    fast.save_pretrained(path)
    return path


def train(model: Path, data: Path, out: Path, *settings: str) -> int:
    changes = {
        "run.out": f"'{out}'",
        "model.path": f"'{model}'",
        "data.path": f"'{data}'",
        "data.heldout_share": "0.2",
        "train.steps": "4",
        "train.accumulation": "2",
        "train.seq_len": "16",
        "train.warmup_steps": "1",
        "train.eval_batches": "2",
        "train.lr": "1e-2",
        "engine.device": "'emulated'",
        "engine.device_memory": "'1MiB'",
        "engine.precision": "'fp32'",
    }
    arguments = ["train", str(ROOT / "configs" / "finetune_local.toml")]
    for change in (*(f"{key}={value}" for key, value in changes.items()), *settings):
        arguments += ["--set", change]
    return main(arguments)


def rows(path: Path, make: Any) -> Path:
    path.write_text("".join(json.dumps(make(i)) + "\n" for i in range(30)), encoding="utf-8")
    return path


@pytest.mark.parametrize("field", ["text", "messages"])
def test_texts_and_chats(field: str, folder: Path, tmp_path: Path) -> None:
    def row(i: int) -> dict[str, Any]:
        text = f"The number after {i} is {i + 1}."
        return {
            "text": text,
            "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}],
        }

    data = rows(tmp_path / "t.jsonl", row)
    assert train(folder, data, tmp_path / "runs", f"data.field='{field}'") == 0
    out = tmp_path / "runs" / "finetune_local"
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    assert summary["steps"] == 4 and summary["heldout_loss_after"] < summary["heldout_loss_before"]
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    before = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert all(not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    assert model.config.use_cache
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "model")
    ids = tokenizer("The number", return_tensors="pt")["input_ids"]
    assert (
        tokenizer.decode(ids[0]).replace(" ", "") == "Thenumber"
        and model.generate(ids, max_new_tokens=3).shape[1] > ids.shape[1]
    )


def test_a_chat_without_a_template_and_folders_without_a_model(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    data = rows(tmp_path / "t.jsonl", lambda i: {"messages": [{"role": "user", "content": "a"}]})
    (folder / "chat_template.jinja").unlink()
    assert train(folder, data, tmp_path / "runs", "data.field='messages'") == 2
    assert "the model's tokenizer has no chat template" in capsys.readouterr().err
    empty = tmp_path / "empty"
    empty.mkdir()
    assert train(empty, data, tmp_path / "runs") == 2
    assert "transformers cannot load a model from" in capsys.readouterr().err
    assert train(tmp_path / "missing", data, tmp_path / "runs") == 2
    assert "does not exist" in capsys.readouterr().err
