"""Tokenizer lookup: `data.tokenizer` is `bytes`, `store` (the copy in a token store), or a path."""

from dataclasses import replace

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.data import DataConfig
from titan_exp.config.paths.token_store_manifest import read_manifest
from titan_exp.data.tokenizers.base import Tokenizer
from titan_exp.data.tokenizers.byte_tokenizer import ByteTokenizer
from titan_exp.data.tokenizers.huggingface import HuggingFaceTokenizer


def build_tokenizer(config: DataConfig) -> Tokenizer:
    """Build the tokenizer of `data.tokenizer`. Raises UserError if it cannot be loaded."""
    if config.tokenizer == "store":
        return _build_from_store(config)
    return ByteTokenizer() if config.tokenizer == "bytes" else HuggingFaceTokenizer(config.tokenizer)


def tokenizer_path(config: DataConfig) -> str:
    """`bytes`, or the path of the tokenizer's files: `data.tokenizer`, or the copy in the first store."""
    if config.tokenizer != "store":
        return config.tokenizer
    manifest = read_manifest(config.paths[0])
    return "bytes" if manifest.tokenizer == ByteTokenizer.fingerprint else str(manifest.path)


def _build_from_store(config: DataConfig) -> Tokenizer:
    """Build the tokenizer of the first token store; all stores of a mixture share it."""
    if not config.paths:
        violation = Violation("data.paths", (), "no token store is given", "data.paths='[stores/mine]'")
        raise UserError("There is no tokenizer.", [violation])
    tokenizer = build_tokenizer(replace(config, tokenizer=tokenizer_path(config)))
    expected = read_manifest(config.paths[0]).tokenizer
    if tokenizer.fingerprint != expected:
        reason = f"its tokenizer.json ({tokenizer.fingerprint}) is not the one it was built with ({expected})"
        violation = Violation("data.paths", config.paths[0], reason, "restore that file, or rebuild the store")
        raise UserError("The token store is damaged.", [violation])
    return tokenizer
