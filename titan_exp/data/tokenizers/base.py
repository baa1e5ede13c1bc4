"""Tokenizer interface: text to token ids and back."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from titan_exp.config.errors.user_error import UserError


class Tokenizer(Protocol):
    """Tokenizer interface of the data loaders and `generate`."""

    @property
    def vocab_size(self) -> int:
        """Largest token id plus 1."""
        ...

    @property
    def end_of_text(self) -> int:
        """Id of the end-of-text (EOS) token, appended to every document."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identity of vocabulary and merges."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, [tokens], in an integer dtype wide enough for the vocabulary; without EOS."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; invalid UTF-8 becomes U+FFFD."""
        ...


def encode_document(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Ids of `text` and EOS, [length + 1]. Raises UserError if a source of the user's gives anything but text."""
    if not isinstance(text, str):
        raise UserError(f"data.source: a document is of type {type(text).__name__}, but documents are str.")
    tokens = tokenizer.encode(text)
    return np.append(tokens, np.asarray(tokenizer.end_of_text, dtype=tokens.dtype))
