"""Batch preview (`data.preview`): decoded rows of one global batch, with document boundaries, positions and labels."""

import math
from collections.abc import Iterator

import torch

from titan_exp.config.groups.run import DataConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.data.batch import Batch
from titan_exp.data.tokenizers import Tokenizer, build_tokenizer
from titan_exp.data.train_loader import TrainLoader
from titan_exp.ops.cross_entropy import IGNORE_INDEX

_MAX_TEXT = 200


def preview(data: DataConfig, training: TrainingConfig, seed: int, step: int) -> Iterator[str]:
    """Describe the global batch of a step, counted from 1 as in the metrics, as lines of text.

    A row is shown with its number in the run and its source. Each of its documents has token range, positions, tokens
    without a label, and text, shortened in the middle. Token stores are read at the step, other sources from the
    beginning.
    """
    rows, first = training.batch_size_at(step), training.sequences_after(step - 1)
    size = math.gcd(*training.batch_sizes)
    loader = TrainLoader(data, training, seed, dp_rank=0, dp_degree=1, micro_batch_size=size, pin_memory=False)
    tokenizer = build_tokenizer(data)
    try:
        loader.skip(first)
        epoch = loader.epochs()
        batches = [next(loader) for _ in range(rows // size)]
        predicted = sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in batches)
        source = " ".join(data.paths) or data.source
        yield (
            f"step {step}: {rows} rows of {training.seq_len} tokens, {predicted:,} of {rows * training.seq_len:,} "
            f"predict the next one; epoch {epoch:.3f} of {source}"
        )
        for row in range(rows):
            number = first + row
            source = loader.source_name(number)
            yield ""
            yield f"row {number}" + (f", from {source}" if source else "")
            yield from _documents(batches[row // size], row % size, tokenizer)
    finally:
        loader.close()


def _documents(batch: Batch, row: int, tokenizer: Tokenizer) -> Iterator[str]:
    """Lines for the documents of a row, split at end-of-text tokens; two per document."""
    tokens, labels = batch.tokens[row], batch.labels[row]
    positions = torch.arange(len(tokens)) if batch.positions is None else batch.positions[row]
    ends = (tokens == tokenizer.end_of_text).nonzero().flatten().tolist()
    begin = 0
    for end in [*(end + 1 for end in ends), len(tokens)]:
        if end <= begin:
            continue
        ignored = (labels[begin:end] == IGNORE_INDEX).nonzero().flatten() + begin
        notes = [f"positions {int(positions[begin])}–{int(positions[end - 1])}"]
        if batch.documents is not None:
            notes.append(f"attends within document {int(batch.documents[row, begin])}")
        if len(ignored):
            notes.append(f"no label: {_ranges(ignored.tolist())}")
        complete = int(tokens[end - 1]) == tokenizer.end_of_text
        text = _shorten(tokenizer.decode(tokens[begin:end].tolist()))
        yield f"  tokens {begin}–{end - 1}, {', '.join(notes)}"
        yield f"    {text!r}{' ⟨end of text⟩' if complete else ' …'}"
        begin = end


def _ranges(numbers: list[int]) -> str:
    """Format ascending numbers as ranges, `3, 5–9`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{first}–{last}" if last > first else f"{first}" for first, last in ranges)


def _shorten(text: str) -> str:
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[: _MAX_TEXT // 2]} ⟨{len(text) - _MAX_TEXT:,} more characters⟩ {text[-_MAX_TEXT // 2 :]}"
