"""LoRA adapters on a frozen model that is streamed from the host: `python examples/lora.py`.

Frozen weights have no gradient and no optimizer states; the host holds their working copies alone. Without --model the
base is a tiny Llama with random weights; with --model DIRECTORY it is a local Hugging Face model. Needs transformers
and peft.
"""

import argparse
import pydoc_data.topics

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import offload_engine as oe


def main() -> None:
    """Train adapters and save them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a local directory with a model and its tokenizer")
    parser.add_argument("--device-memory", default="12MiB", help="device budget, such as 6GiB")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="runs/lora")
    options = parser.parse_args()
    torch.manual_seed(0)
    text = "".join(pydoc_data.topics.topics.values())
    if options.model:
        base = AutoModelForCausalLM.from_pretrained(options.model)
        tokens = AutoTokenizer.from_pretrained(options.model)(text)["input_ids"]
    else:
        sizes = {
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
        }
        base = LlamaForCausalLM(LlamaConfig(vocab_size=256, eos_token_id=None, bos_token_id=None, **sizes))
        tokens = list(text.encode())
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    engine = oe.OffloadEngine(model, optimizer, oe.EngineConfig(device_memory=options.device_memory))
    for line in engine.describe():
        print(line)
    for step in range(options.steps):
        starts = torch.randint(len(tokens) - 64, (2,))
        rows = torch.tensor([tokens[start : start + 64] for start in starts])
        loss = engine(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {loss.item():.4f}")
    total, few = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in trained)
    print(
        f"{few} of {total} parameters trained; {engine.model_state_bytes} bytes of states on the host, at most "
        f"{engine.device_peak_bytes} bytes on the device"
    )
    model.save_pretrained(options.out)
    engine.timeline.save(f"{options.out}/timeline.json")
    print(
        f"adapters: {options.out}, timeline: {options.out}/timeline.json (opens in https://ui.perfetto.dev)"
    )
    engine.close()


if __name__ == "__main__":
    main()
