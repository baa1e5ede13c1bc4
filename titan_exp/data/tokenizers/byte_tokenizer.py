"""Byte tokenizer without a trained vocabulary."""

from collections.abc import Iterable

import numpy as np

from titan_exp.config.schema.builtins import BYTES_VOCABULARY


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for end-of-text."""

    vocab_size = BYTES_VOCABULARY
    end_of_text = 256
    fingerprint = "bytes"

    def encode(self, text: str) -> np.ndarray:
        """Ids of the UTF-8 bytes of `text`, uint16 [bytes]. Lone surrogates become `?`."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; ids above 255 (end-of-text, vocabulary padding) are skipped."""
        return bytes(token for token in map(int, ids) if token < 256).decode("utf-8", errors="replace")
