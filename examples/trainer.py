"""Fine-tune a causal language model with transformers.Trainer, its states on the host: `python examples/trainer.py`.

Without --model it trains a tiny Llama from scratch on Python's documentation, byte by byte. With --model DIRECTORY it
takes a local Hugging Face model and its tokenizer. Needs transformers and accelerate.
"""

import argparse
import pydoc_data.topics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainingArguments

import offload_engine as oe
from offload_engine.integrations.trainer import OffloadTrainer


class Rows(torch.utils.data.Dataset):
    """Pieces of one long text, each the labels of itself."""

    def __init__(self, tokens: list[int], length: int = 64) -> None:
        whole = len(tokens) // length
        self.rows = torch.tensor(tokens[: whole * length]).view(whole, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    """Train, save, and say where the bytes were."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a local directory with a model and its tokenizer")
    parser.add_argument("--device-memory", default="12MiB", help="device budget, such as 6GiB")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="runs/trainer")
    options = parser.parse_args()
    text = "".join(pydoc_data.topics.topics.values())
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model)
        tokens = AutoTokenizer.from_pretrained(options.model)(text)["input_ids"]
    else:
        sizes = {
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
        }
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, eos_token_id=None, bos_token_id=None, **sizes))
        tokens = list(text.encode())
    arguments = TrainingArguments(
        options.out,
        max_steps=options.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=5,
        report_to=[],
    )
    config = oe.EngineConfig(device_memory=options.device_memory)
    trainer = OffloadTrainer(model, arguments, train_dataset=Rows(tokens), engine_config=config)
    trainer.train()
    trainer.save_model()
    trainer.engine.timeline.save(f"{options.out}/timeline.json")
    print(trainer.engine.timeline.summary().words())
    print(f"model: {options.out}, timeline: {options.out}/timeline.json (opens in https://ui.perfetto.dev)")
    trainer.engine.close()


if __name__ == "__main__":
    main()
