"""The models of the main job: a small decoder of our own, and causal language models of transformers."""

from __future__ import annotations

from torch import nn

from offload_engine.checkpoint.weights import Weights
from offload_engine.training.config import DecoderConfig, HuggingFaceConfig
from offload_engine.training.models.decoder import Decoder
from offload_engine.training.tokenizers import ByteTokenizer, Tokenizer

__all__ = ["Decoder", "build_model"]


def build_model(
    config: DecoderConfig | HuggingFaceConfig, tokenizer: str, *, streamed: bool = False
) -> tuple[nn.Module, Tokenizer, Weights | None]:
    """Return the model in fp32 on the CPU, and the tokenizer "bytes" or "model".

    With `streamed`, the model may come without values, and its weights beside it, for `OffloadEngine(..., weights=)`.

    A decoder's weights are drawn from torch's global generator; seed it first.
    """
    if isinstance(config, DecoderConfig):
        return Decoder(config), ByteTokenizer(), None
    # Imported on demand: transformers is an optional extra.
    from offload_engine.training.models import huggingface

    model, model_tokenizer, weights = huggingface.load(config, streamed=streamed)
    return model, ByteTokenizer() if tokenizer == "bytes" else model_tokenizer, weights
