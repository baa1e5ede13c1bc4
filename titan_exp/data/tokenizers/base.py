"""Tokenizer interface: text to token ids and back."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """Tokenizer members that the loaders and `generate` use."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def end_of_text(self) -> int:
        """Id that follows every document."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identity of the text-to-id mapping."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, [tokens], in an integer type that holds them; without end-of-text."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; invalid UTF-8 becomes U+FFFD."""
        ...


def encode_document(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Tokens of `text` and the end-of-text token, [length + 1]."""
    tokens = tokenizer.encode(text)
    return np.append(tokens, np.asarray(tokenizer.end_of_text, dtype=tokens.dtype))
