"""What the model sees at one step (`data.preview`): the rows of the global batch, decoded, with what surrounds them."""

from collections.abc import Iterator

import torch

from titan_exp.config.groups.experiment import Experiment
from titan_exp.data.batch import Batch
from titan_exp.data.tokenizers.base import Tokenizer, build_tokenizer
from titan_exp.data.train_loader import TrainLoader
from titan_exp.ops.loss.cross_entropy import IGNORE_INDEX

_LONGEST = 200


def preview(experiment: Experiment, step: int) -> Iterator[str]:
    """Lines about the global batch of a step, counted from 1 as the metrics do.

    For every row: which it is of the run and where from; for every document in it: its place in the row, the positions
    that the model is told, which of its tokens predict nothing, and its text, of which a long one is cut in the middle.
    Of a token store the batch is found at once, of other sources everything before it is read.

    Raises:
        UserError: the data cannot be read.
    """
    rows, seq_len = experiment.training.global_batch_size, experiment.training.seq_len
    loader = TrainLoader(experiment, dp_rank=0, dp_degree=1, micro_batch_size=rows, pin_memory=False)
    tokenizer = build_tokenizer(experiment.data)
    try:
        loader.skip(step - 1)
        epoch = loader.epochs()
        batch = next(loader)
        predicted = int((batch.labels != IGNORE_INDEX).sum())
        source = " ".join(experiment.data.paths) or experiment.data.source
        yield (
            f"step {step}: {rows} rows of {seq_len} tokens, {predicted:,} of {batch.labels.numel():,} predict the next "
            f"one; epoch {epoch:.3f} of {source}"
        )
        for row in range(rows):
            number = (step - 1) * rows + row
            source = loader.source_name(number)
            yield ""
            yield f"row {number}" + (f", from {source}" if source else "")
            yield from _documents(batch, row, tokenizer)
    finally:
        loader.close()


def _documents(batch: Batch, row: int, tokenizer: Tokenizer) -> Iterator[str]:
    """A line for each document of a row: a document ends with the end-of-text token."""
    tokens, labels = batch.tokens[row], batch.labels[row]
    positions = torch.arange(len(tokens)) if batch.positions is None else batch.positions[row]
    ends = (tokens == tokenizer.end_of_text).nonzero().flatten().tolist()
    begin = 0
    for end in [*(end + 1 for end in ends), len(tokens)]:
        if end <= begin:
            continue
        silent = (labels[begin:end] == IGNORE_INDEX).nonzero().flatten() + begin
        notes = [f"positions {int(positions[begin])}–{int(positions[end - 1])}"]
        if batch.documents is not None:
            notes.append(f"attends within document {int(batch.documents[row, begin])}")
        if len(silent):
            notes.append(f"predict nothing: {_ranges(silent.tolist())}")
        ended = int(tokens[end - 1]) == tokenizer.end_of_text
        text = _short(tokenizer.decode(tokens[begin:end].tolist()))
        yield f"  tokens {begin}–{end - 1}, {', '.join(notes)}"
        yield f"    {text!r}{' ⟨end of text⟩' if ended else ' …'}"
        begin = end


def _ranges(numbers: list[int]) -> str:
    """`3, 5–9` of ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}–{last}" if last > first else f"{first}" for first, last in runs)


def _short(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]} ⟨{len(text) - _LONGEST:,} more characters⟩ {text[-_LONGEST // 2 :]}"
