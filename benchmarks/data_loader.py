"""Tokens per second that the training loader can deliver to one rank, for each kind of source.

    python benchmarks/data_loader.py [--seconds 2]

The loader runs alone, so a rate is the most that a rank could be fed; a model that trains slower never waits for data.
`first` is the time from building the loader to its first batch. Everything is made on this machine from the source of
Python's own library, in a temporary folder; nothing is downloaded.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch

from titan_exp.config.compose import compose
from titan_exp.config.convert import to_experiment
from titan_exp.config.experiment import Experiment
from titan_exp.data.python_stdlib import PythonStdlib
from titan_exp.data.train_loader import TrainLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measurement")
    seconds = parser.parse_args().seconds
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; Python {platform.python_version()},")
    print(f"numpy {numpy.__version__}, torch {torch.__version__}")
    base = to_experiment(compose([]))
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.setdefault("HF_DATASETS_CACHE", f"{scratch}/cache")
        print(f"{'source':34} {'seq_len':>8} {'rows':>5} {'first, s':>9} {'tokens/s':>12} {'rows/s':>10}")
        for name, data in corpora(Path(scratch)).items():
            for seq_len, rows in ((256, 16), (8192, 2)):
                first, rate = measure(variant(base, seq_len, rows, data), rows, seconds)
                print(f"{name:34} {seq_len:8} {rows:5} {first:9.3f} {rate:12,.0f} {rate / seq_len:10,.0f}", flush=True)


def corpora(scratch: Path) -> dict[str, dict[str, Any]]:
    """The `data` groups to measure, by name."""
    library = PythonStdlib()
    texts = [library[index] for index in range(len(library))]
    text, jsonl, parquet = scratch / "text", scratch / "jsonl", scratch / "parquet"
    for folder in (text, jsonl, parquet):
        folder.mkdir()
    for number, document in enumerate(texts):
        (text / f"{number}.txt").write_text(document)
    import pyarrow
    import pyarrow.parquet

    for part in range(64):
        share = texts[part::64]
        (jsonl / f"{part}.jsonl").write_text("\n".join(json.dumps({"text": document}) for document in share))
        pyarrow.parquet.write_table(pyarrow.table({"text": share}), parquet / f"{part}.parquet")
    tokenizer = train_tokenizer(texts, scratch / "tokenizer.json")
    tables = {"source": "huggingface", "dataset": "parquet", "data_files": (str(parquet / "*.parquet"),)}
    lines = {"source": "huggingface", "dataset": "json", "data_files": (str(jsonl / "*.jsonl"),)}
    return {
        "python_stdlib, bytes": {},
        "python_stdlib, bytes, masks": {"document_mask": True, "reset_positions": True},
        "python_stdlib, BPE of 8192": {"tokenizer": tokenizer},
        "python_stdlib, bytes, 512 shards": {"virtual_shards": 512},
        "text, bytes": {"source": "text", "paths": (str(text),)},
        "parquet, bytes": tables,
        "parquet streamed, bytes": {**tables, "streaming": True},
        "parquet streamed, BPE of 8192": {**tables, "streaming": True, "tokenizer": tokenizer},
        "JSON lines streamed, bytes": {**lines, "streaming": True},
    }


def train_tokenizer(texts: list[str], path: Path) -> str:
    """A byte-level BPE tokenizer of these texts, saved at `path`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
    return str(path)


def variant(base: Experiment, seq_len: int, rows: int, data: dict[str, Any]) -> Experiment:
    training = replace(base.training, seq_len=seq_len, global_batch_size=rows)
    return replace(base, training=training, data=replace(base.data, **data))


def measure(run: Experiment, rows: int, seconds: float) -> tuple[float, float]:
    """Seconds to the first batch, and tokens per second after a fifth of the time."""
    begin = time.perf_counter()
    loader = TrainLoader(run, dp_rank=0, dp_degree=1, micro_batch_size=rows, pin_memory=False)
    next(loader)
    first = time.perf_counter() - begin
    deliver(loader, seconds / 5)
    batches, elapsed = deliver(loader, seconds)
    loader.close()
    return first, batches * rows * run.training.seq_len / elapsed


def deliver(loader: TrainLoader, seconds: float) -> tuple[int, float]:
    """Batches taken in at least `seconds`, and how long that was."""
    begin, batches = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begin) < seconds:
        next(loader)
        batches += 1
    return batches, elapsed


if __name__ == "__main__":
    main()
