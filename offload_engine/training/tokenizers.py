"""Text to token ids and back: bytes, or the tokenizer that came with a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from offload_engine.errors import ConfigError

__all__ = ["ByteTokenizer", "ModelTokenizer", "Tokenizer"]


class Tokenizer(Protocol):
    """What the data and the sampling need of a tokenizer."""

    unit: str
    """What a token is called: "byte" or "token"."""

    separator: str
    """What stands after each text of several."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the token ids of a text, without special tokens."""

    def chat_text(self, messages: list[Any], where: str) -> str:
        """Return the messages of a chat as the text that the model knows.

        Raises:
            ConfigError: it starts with `where`: there is no chat template, or the messages do not fit it.
        """

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids; what is not valid text becomes U+FFFD."""


class ByteTokenizer:
    """One token per UTF-8 byte."""

    unit = "byte"
    separator = "\n\n"

    def chat_text(self, messages: list[Any], where: str) -> str:
        """Refuse: bytes have no chat template."""
        raise ConfigError(
            f"{where} is a list of chat messages, which bytes have no template for. Use data.tokenizer = 'model', or a "
            f"field that holds text."
        )

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
        self.separator: str = tokenizer.eos_token or "\n\n"

    def chat_text(self, messages: list[Any], where: str) -> str:
        """Return the messages by the model's own chat template."""
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"{where} is a list of chat messages, but the model's tokenizer has no chat template. Use a field that "
                f"holds text, or a model that was made for chats."
            )
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # templates are programs; they raise what they like
            raise ConfigError(
                f"{where} is no list of chat messages for this model's template: {type(error).__name__}: {error}. "
                f'A message is {{"role": "user", "content": "..."}}.'
            ) from None

    def save(self, folder: Path) -> None:
        """Write the tokenizer's own files."""
        self._tokenizer.save_pretrained(folder)

    def encode(self, text: str) -> Sequence[int]:
        """Return the token ids of the text, without special tokens."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens."""
        return str(self._tokenizer.decode(list(tokens)))
