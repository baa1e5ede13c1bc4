"""Tokenizer lookup: `data.tokenizer` is `bytes`, `store` (the copy in a token store), or a path."""

from dataclasses import replace

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.data import DataConfig
from titan_exp.config.paths.data_files import tokenizer_path
from titan_exp.config.paths.token_store_manifest import read_manifest
from titan_exp.data.tokenizers.base import Tokenizer
from titan_exp.data.tokenizers.byte_tokenizer import ByteTokenizer
from titan_exp.data.tokenizers.huggingface import HuggingFaceTokenizer


def build_tokenizer(config: DataConfig) -> Tokenizer:
    """Build the tokenizer of `data.tokenizer`. Raises UserError if it cannot be loaded."""
    if config.tokenizer == "store":
        return _build_from_store(config)
    return ByteTokenizer() if config.tokenizer == "bytes" else HuggingFaceTokenizer(config.tokenizer)


def _build_from_store(config: DataConfig) -> Tokenizer:
    """Build the tokenizer of the first token store; all stores of a mixture share it."""
    tokenizer = build_tokenizer(replace(config, tokenizer=tokenizer_path(config)))
    expected = read_manifest(config.paths[0]).tokenizer
    if tokenizer.fingerprint != expected:
        reason = f"its tokenizer.json ({tokenizer.fingerprint}) is not the one it was built with ({expected})"
        violation = Violation("data.paths", config.paths[0], reason, "restore that file, or rebuild the store")
        raise UserError("The token store is damaged.", [violation])
    return tokenizer
