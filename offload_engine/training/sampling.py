"""A short text from the model as it is, a token at a time through the trainer, so that the weights stream."""

from __future__ import annotations

import torch

from offload_engine.training.losses import logits_of
from offload_engine.training.tokenizers import Tokenizer
from offload_engine.training.trainer import Trainer

__all__ = ["sample_text"]

# Keeping no keys and values, each token costs a forward over its whole context; short ones are enough to look at.
CONTEXT_TOKENS = 96


@torch.no_grad()
def sample_text(
    trainer: Trainer,
    tokenizer: Tokenizer,
    *,
    prompt: str,
    length_bytes: int,
    temperature: float,
    seed: int,
    seq_len: int,
) -> str:
    """Return `prompt` and about `length_bytes` bytes after it. Torch's global generator is not touched."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(tokenizer.encode(prompt))
    wanted_bytes = len(prompt.encode()) + length_bytes
    context = min(seq_len, CONTEXT_TOKENS)
    trainer.eval()
    for _ in range(length_bytes):
        if len(tokenizer.decode(tokens).encode()) >= wanted_bytes:
            break
        inputs_BT = torch.tensor([tokens[-context:]])
        logits_V = logits_of(trainer(inputs_BT))[0, -1].float().cpu()
        if temperature == 0:
            tokens.append(int(logits_V.argmax()))
        else:
            shares_V = torch.softmax(logits_V / temperature, dim=0)
            tokens.append(int(torch.multinomial(shares_V, 1, generator=generator)))
    trainer.train()
    return tokenizer.decode(tokens)
