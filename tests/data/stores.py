"""Small token stores, and experiments over them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.data.corpora import experiment
from tests.data.store_sources import TEXTS
from titan_exp.cli.tokenize import TokenizeOptions, make_store
from titan_exp.config.data_files import Manifest, read_manifest
from titan_exp.config.groups.experiment import Experiment


def make(folder: Path, *, shard_tokens: int = 400, parts: int = 4, workers: int = 1, **data: Any) -> Manifest:
    """Make a store of several shards with a validation fraction of 0.2."""
    run = experiment(**{"source": TEXTS, "validation_fraction": 0.2, **data})
    options = TokenizeOptions(str(folder), workers=workers, parts=parts, shard_tokens=shard_tokens)
    assert make_store(options, run) == 0
    return read_manifest(folder)


def over(*stores: Manifest, seq_len: int = 24, batch: int = 24, seed: int = 0, **data: Any) -> Experiment:
    """An experiment that trains from stores."""
    paths = tuple(str(store.path) for store in stores)
    run = experiment(
        seed=seed,
        seq_len=seq_len,
        batch=batch,
        **{"source": "tokens", "paths": paths, "tokenizer": "store", "validation_fraction": 0.0, **data},
    )
    return replace(run, evaluation=replace(run.evaluation, every=10))


def content(folder: Path) -> dict[str, bytes]:
    """Files below a folder, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
