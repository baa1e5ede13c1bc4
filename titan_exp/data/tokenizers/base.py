"""Text to token ids and back: the interface, the built-in byte tokenizer, and the choice between tokenizers."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import numpy as np

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.builtins import BYTES_VOCABULARY
from titan_exp.config.groups.data import DataConfig
from titan_exp.config.paths.token_store_manifest import read_manifest


class Tokenizer(Protocol):
    """What the loaders and `generate` need of a tokenizer."""

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
        """Changes whenever the ids of some text would."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, [tokens], in an unsigned or signed integer type that holds them; no end-of-text is added."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; bytes that form no character become U+FFFD."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a text. Nothing to train, nothing to download."""

    vocab_size = BYTES_VOCABULARY
    end_of_text = 256
    fingerprint = "bytes"

    def encode(self, text: str) -> np.ndarray:
        """Ids of the UTF-8 bytes of `text`, uint16 [bytes]. A lone surrogate, which is no character, becomes `?`."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; ids above 255 stand for no text (the end-of-text id, padding of the vocabulary)."""
        return bytes(number for number in map(int, ids) if number < 256).decode("utf-8", errors="replace")


def build_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names. Raises UserError where it cannot be loaded."""
    if config.tokenizer == "store":
        return _tokenizer_of_store(config)
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    from titan_exp.data.tokenizers.huggingface import HuggingFaceTokenizer

    return HuggingFaceTokenizer(config.tokenizer)


def tokenizer_path(config: DataConfig) -> str:
    """`bytes`, or where the tokenizer's files are: what `data.tokenizer` names, or the copy in the first store."""
    if config.tokenizer != "store":
        return config.tokenizer
    manifest = read_manifest(config.paths[0])
    return "bytes" if manifest.tokenizer == ByteTokenizer.fingerprint else str(manifest.path)


def _tokenizer_of_store(config: DataConfig) -> Tokenizer:
    """The copy in the first token store; all have the same."""
    if not config.paths:
        violation = Violation("data.paths", (), "no token store is named", "data.paths='[stores/mine]'")
        raise UserError("There is no tokenizer.", [violation])
    manifest = read_manifest(config.paths[0])
    built_in = manifest.tokenizer == ByteTokenizer.fingerprint
    found = build_tokenizer(replace(config, tokenizer="bytes" if built_in else str(manifest.path)))
    if found.fingerprint != manifest.tokenizer:
        reason = f"its tokenizer.json ({found.fingerprint}) is not the one that it was made with ({manifest.tokenizer})"
        violation = Violation("data.paths", config.paths[0], reason, "put that one back, or make the store anew")
        raise UserError("The token store is damaged.", [violation])
    return found
