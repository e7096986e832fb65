"""A small language model learns Python's documentation byte by byte: `python examples/own_loop.py --steps 30`.

The states are on the host; plain_loop.py is the same loop in plain PyTorch.
"""

import argparse
import pydoc_data.topics

import torch
import torch.nn.functional as F
from torch import nn

import offload_engine as oe


class Model(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self, width: int = 128, layers: int = 6, context: int = 64) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, length, 256) of tokens (batch, length)."""
        length = tokens.shape[1]
        x = self.embed(tokens) + self.place(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def main() -> None:
    """Train and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    text = torch.tensor(list("".join(pydoc_data.topics.topics.values()).encode()))
    device = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    )
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    engine = oe.OffloadEngine(model, optimizer, oe.EngineConfig(device_memory="8MiB"))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        starts = torch.randint(len(text) - 65, (2,))
        rows = torch.stack([text[start : start + 65] for start in starts]).to(device)
        loss = F.cross_entropy(engine(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {loss.item():.4f}")
    print(engine.timeline.summary().words())
    engine.timeline.save("runs/own_loop.trace.json")
    print("The timeline is in runs/own_loop.trace.json; open https://ui.perfetto.dev and drop the file in.")


if __name__ == "__main__":
    main()
