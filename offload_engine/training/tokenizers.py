"""Text to token ids and back: bytes, or the tokenizer that came with a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["ByteTokenizer", "ModelTokenizer", "Tokenizer"]


class Tokenizer(Protocol):
    """What the data and the sampling need of a tokenizer."""

    unit: str
    """What a token is called: "byte" or "token"."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the token ids of a text, without special tokens."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids; what is not valid text becomes U+FFFD."""


class ByteTokenizer:
    """One token per UTF-8 byte."""

    unit = "byte"

    def encode(self, text: str) -> Sequence[int]:
        """Return the bytes of the text."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the bytes; ids above 255, which only a larger vocabulary has, become U+FFFD."""
        return b"".join(bytes((token,)) if token < 256 else b"\xef\xbf\xbd" for token in tokens).decode(
            errors="replace"
        )


class ModelTokenizer:
    """A tokenizer of transformers."""

    unit = "token"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> Sequence[int]:
        """Return the token ids of the text, without special tokens."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens."""
        return str(self._tokenizer.decode(list(tokens)))
