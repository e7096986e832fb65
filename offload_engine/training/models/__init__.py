"""The models of the main job: a small decoder of our own, and causal language models of transformers."""

from __future__ import annotations

from torch import nn

from offload_engine.training.config import DecoderConfig, HuggingFaceConfig
from offload_engine.training.models.decoder import Decoder
from offload_engine.training.tokenizers import ByteTokenizer, Tokenizer

__all__ = ["Decoder", "build_model"]


def build_model(config: DecoderConfig | HuggingFaceConfig, tokenizer: str) -> tuple[nn.Module, Tokenizer]:
    """Return the model in fp32 on the CPU, and the tokenizer "bytes" or "model".

    A decoder's weights are drawn from torch's global generator; seed it first.
    """
    if isinstance(config, DecoderConfig):
        return Decoder(config), ByteTokenizer()
    # Imported on demand: transformers is an optional extra.
    from offload_engine.training.models import huggingface

    model, model_tokenizer = huggingface.load(config)
    return model, ByteTokenizer() if tokenizer == "bytes" else model_tokenizer
