"""Data loader benchmark: tokens per second per source, and resume time by position."""

import json
import os
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.bench import Output, benchmark, composed, option, repeated, seconds_of
from titan_exp.cli.tokenize import TokenizeOptions, make_store
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.typed_config import load_experiment
from titan_exp.data.sources.python_stdlib import PythonStdlibSource
from titan_exp.data.train_loader import TrainLoader
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics

NEED = 0.5 * 989e12 / (6 * 1e9)
"""Default consumption of a rank in tokens/s; see the benchmark."""
RESUMED = ("python_stdlib, bytes", "parquet streamed, bytes", "store, bytes", "two stores, bytes")


@dataclass(frozen=True)
class LoaderOptions:
    seconds: float = option(2.0, "length of each measurement", smallest=0.02)
    only: str = option("", "sources whose name holds this word")
    need: float = option(NEED, "tokens/s that a rank consumes")
    run: Path | None = option(None, "run folder whose measured tokens/s are the need")
    documents: int | None = option(None, "documents of the corpus; all of the standard library without", smallest=128)


@benchmark
def data_loader(options: LoaderOptions, out: Output) -> None:
    """Tokens per second of the data loader by source, beside what a rank consumes, and resume time by position.

    The loader runs alone, so its rate is an upper bound for one rank; a model that trains slower never waits for data.
    `need` is that rate over a rank's consumption: `--need`; or the fastest row of a run on this machine (`--run`,
    divided by its data-parallel ranks); or that of a 1B model at half of an H100's dense bf16 peak, 0.5 × 989e12 / (6 ×
    1e9), about 82,000 tokens/s (an eighth of that for an 8B model). `first` is the time from building the loader to its
    first batch. The corpus is the source code of Python's standard library, in a temporary folder; nothing is
    downloaded.
    """
    need = options.need if options.run is None else measured_need(options.run)
    base = composed()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.setdefault("HF_DATASETS_CACHE", f"{scratch}/cache")
        corpora = corpora_of(Path(scratch), base, options.documents)
        found = {name: data for name, data in corpora.items() if options.only in name}
        form = {"seq_len": "d", "rows": "d", "first, s": ".3f", "tokens/s": ",.0f", "rows/s": ",.0f", "need": ".1f"}
        table = out.table({"source": ""} | form, f"A rank is taken to consume {need:,.0f} tokens/s")
        for name, data in found.items():
            for seq_len, rows in ((256, 16), (8192, 2)):
                first, rate = measure(variant(base, seq_len, rows, data), options.seconds)
                table.add(name, seq_len, rows, first, rate, rate / seq_len, rate / need)
        table = out.table({"source": "", "rows before": ",", "to the next batch, s": ".4f"}, "Resume")
        for name, data in found.items():
            if name in RESUMED:
                for batches in (0, 100, 10**6, 10**12) if data.get("source") == "tokens" else (0, 100, 1000):
                    table.add(name, 16 * batches, resume(variant(base, 256, 16, data), batches))


def measured_need(folder: Path) -> float:
    """Tokens/s per data-parallel rank in the fastest row of a run's metrics."""
    ranks = ResolvedLayout.of(load_experiment(folder / "config.yaml")).dp_degree
    rates = [row.get("tokens_per_second") for row in read_metrics(folder / "metrics.jsonl")]
    return max(float(rate) for rate in rates if rate is not None) / ranks


def corpora_of(scratch: Path, run: Experiment, documents: int | None) -> dict[str, dict[str, Any]]:
    """Data groups to measure, by name."""
    library = PythonStdlibSource()
    texts = [library[index] for index in range(len(library))[:documents]]
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
    stores = {"source": "tokens", "tokenizer": "store", "validation_fraction": 0.0}
    mine, half, bpe = (str(scratch / name) for name in ("mine", "half", "bpe"))
    for out, data in (
        (mine, {}),
        (half, {"source": "text", "paths": (f"{text}/1*.txt",)}),
        (bpe, {"tokenizer": tokenizer}),
    ):
        make_store(TokenizeOptions(out, workers=1), replace(run, data=replace(run.data, **data)))
    lines = {"source": "huggingface", "dataset": "json", "data_files": (str(jsonl / "*.jsonl"),)}
    return {
        "python_stdlib, bytes": {},
        "python_stdlib, bytes, masks": {"document_mask": True, "reset_positions": True},
        "python_stdlib, BPE of 8192": {"tokenizer": tokenizer},
        "python_stdlib, bytes, streamed": {"streaming": True},
        "python_stdlib, bytes, streamed, 512 shards": {"streaming": True, "virtual_shards": 512},
        "text, bytes": {"source": "text", "paths": (str(text),)},
        "parquet, bytes": tables,
        "parquet streamed, bytes": {**tables, "streaming": True},
        "parquet streamed, BPE of 8192": {**tables, "streaming": True, "tokenizer": tokenizer},
        "JSON lines streamed, bytes": {**lines, "streaming": True},
        "store, bytes": {**stores, "paths": (mine,)},
        "store, bytes, masks": {**stores, "paths": (mine,), "document_mask": True, "reset_positions": True},
        "store, BPE of 8192": {**stores, "paths": (bpe,)},
        "two stores, bytes": {**stores, "paths": (mine, half), "weights": (0.7, 0.3)},
    }


def train_tokenizer(texts: list[str], path: Path) -> str:
    """Train a byte-level BPE tokenizer on texts and save it at `path`."""
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


def measure(run: Experiment, seconds: float) -> tuple[float, float]:
    """Seconds to the first batch, and tokens per second after a fifth of the time."""
    begin = time.perf_counter()
    loader = loader_of(run)
    next(loader)
    first = time.perf_counter() - begin
    repeated(lambda: next(loader), seconds / 5)
    times = repeated(lambda: next(loader), seconds)
    loader.close()
    return first, len(times) * run.training.global_batch_size * run.training.seq_len / sum(times)


def loader_of(run: Experiment) -> TrainLoader:
    """Loader of the only rank of a run."""
    rows = run.training.global_batch_size
    return TrainLoader(
        run.data, run.training, run.experiment.seed, dp_rank=0, dp_degree=1, micro_batch_size=rows, pin_memory=False
    )


def resume(run: Experiment, batches: int) -> float:
    """Seconds from building a loader to its next batch, after a resume at `batches`."""
    loader = loader_of(run)
    loader.skip(run.training.global_batch_size * batches)
    state = loader.state_dict()
    loader.close()

    def go_on() -> None:
        again = loader_of(run)
        again.load_state_dict(state)
        next(again)
        again.close()

    return seconds_of(go_on)
