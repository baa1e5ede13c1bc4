"""Sampler of a text: windows of its token store, or virtual shards where documents are tokenized while training."""

from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.data import DataConfig
from titan_exp.data.sampler import Sampler
from titan_exp.data.sources.base import STREAMING, content_identity, fingerprint
from titan_exp.data.sources.build import build_source, held_out_fraction
from titan_exp.data.token_store.mixture import Mixture
from titan_exp.data.token_store.reader import TokenSplit
from titan_exp.data.token_store.text_store import StoredText, stored_text
from titan_exp.data.token_store.window_sampler import RepeatedTokens, ShuffledWindows, Windows, WindowSampler
from titan_exp.data.tokenizers.build import build_tokenizer
from titan_exp.data.validation_split import training_subset
from titan_exp.data.virtual_shards.sampler import VirtualShardSampler


def build_text_sampler(data: DataConfig, seq_len: int, seed: int, *, dp_rank: int, dp_degree: int) -> Sampler:
    """Open a text. Raises UserError if the corpus or the tokenizer cannot be used."""
    tokenizer, source = build_tokenizer(data), build_source(data)
    stored = stored_text(data, source, tokenizer)
    if stored is None:
        return VirtualShardSampler(data, seq_len, seed, dp_rank=dp_rank, dp_degree=dp_degree, source=source)
    corpus: dict[str, Any] = {
        "data.source": fingerprint(source, data),
        **content_identity(source),
        "data.tokenizer": tokenizer.fingerprint,
        "data.validation_fraction": held_out_fraction(data),
        STREAMING: False,
        "experiment.seed": seed,
        "training.seq_len": seq_len,
    }
    windows = {"": _windows(stored, seq_len, seed)}
    return WindowSampler(windows, Mixture([1.0]), corpus, dp_rank=dp_rank, dp_degree=dp_degree)


def _windows(text: StoredText, seq_len: int, seed: int) -> Windows:
    manifest = text.make()
    tokens = TokenSplit(manifest, "train")
    if len(tokens) == 0:
        training_subset(text.source, held_out_fraction(text.data))  # raises if all documents are held out
        raise UserError(f"The corpus has no text: all of its {len(text.source)} documents are empty.")
    return ShuffledWindows(manifest, seq_len, seed, 0) if len(tokens) > seq_len else RepeatedTokens(tokens, seq_len)
