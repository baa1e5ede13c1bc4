"""Token rows of a task: contexts and continuations by its convention, documents by windows; and their batches."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from titan_exp.config.devices import device_type
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.data.tokenizers import Tokenizer
from titan_exp.extensions.tasks.formats import Item, Task


@dataclass(frozen=True)
class Row:
    """Row of tokens for one forward pass; its log-likelihood is added to its cell of the array [items, choices]."""

    item: int  # index into `EncodedTask.items`
    choice: int  # index of the choice
    tokens: np.ndarray  # token ids, int32, at most `max_tokens` + 1: the model reads all but the last
    first: int  # index of the first scored token, at least 1. `tokens[first:]` are the targets.


MULTIPLE = 16  # lengths of batches are multiples of it, and at most the sequence length
CPU_TOKENS = 4096  # largest number of tokens of a batch on a CPU, whose caches lose larger activations


class RowBatch(NamedTuple):
    """Rows that share a batch. Rows of one group differ in their last token at most, which the model does not read."""

    groups: tuple[tuple[int, ...], ...]  # numbers of the rows of each group
    size: int  # sequences of the batch; the last may be empty
    length: int  # tokens of a sequence


def row_batches(rows: Sequence[Row], run: Experiment, dp: tuple[int, int]) -> Iterator[RowBatch]:
    """Batches of a data rank `dp`, (rank, degree), each of the tokens of a micro-batch: as many as every other rank
    has, of the same shapes. Groups are dealt one by one, the longest first."""
    length, layout, micro_batch_size = run.training.seq_len, run.parallelism, ResolvedLayout.of(run).micro_batch_size
    # Hidden states between stages, and the parts of sequences, have one shape.
    fixed, multiple = layout.pp > 1 or layout.cp > 1, math.lcm(MULTIPLE, layout.tp)
    most = micro_batch_size * length
    if device_type(run.cluster) == "cpu":
        most = max(length, min(most, CPU_TOKENS))
    alike: dict[bytes, list[int]] = {}
    for number, row in enumerate(rows):
        alike.setdefault(row.tokens[:-1].tobytes(), []).append(number)
    order = sorted(map(tuple, alike.values()), key=lambda group: (-len(rows[group[0]].tokens), group))
    rank, degree = dp
    while order:
        longest = -(-(len(rows[order[0][0]].tokens) - 1) // multiple) * multiple
        width = length if fixed else min(longest, length)
        size = micro_batch_size if fixed else max(1, most // width)
        taken, order = order[: size * degree], order[size * degree :]
        yield RowBatch(tuple(taken[rank::degree]), size if fixed else -(-len(taken) // degree), width)


@dataclass(frozen=True)
class EncodedTask:
    """Task as token rows, with the lengths that scores divide by. Arrays are int64 [items, choices] and 0 where an item
    has fewer choices."""

    task: Task  # task, with all of its items
    items: tuple[Item, ...]  # items that can be scored
    rows: tuple[Row, ...]  # rows; a document has one for each of its windows
    neutral: tuple[Row, ...]  # rows of the continuations after the neutral context, one for each choice that has it
    windows: np.ndarray  # number of `rows` in each cell
    characters: np.ndarray  # characters of the answers, without the delimiter
    bytes: np.ndarray  # UTF-8 bytes of the answers, without the delimiter
    scored_bytes: np.ndarray  # UTF-8 bytes of the scored tokens, with the delimiter if they have it
    tokens: np.ndarray  # number of scored tokens
    truncated: int  # number of rows whose context was cut from the left, neutral ones included
    refused: tuple[str, ...]  # items that cannot be scored fairly: number from 1, name and reason


def encode(task: Task, tokenizer: Tokenizer, max_tokens: int) -> EncodedTask:
    """Encode a task for a model that reads `max_tokens`. Raises UserError if no item can be scored."""
    encoder = _Encoder(task, tokenizer, max_tokens)
    kept, rows, neutral = list[Item](), list[Row](), list[Row]()
    lengths, refused, truncated = [], [], 0
    for number, item in enumerate(task.items, 1):
        plain = [(item.neutral, continuation) for _, continuation in item.choices if item.neutral is not None]
        try:
            found = [encoder.rows(len(kept), choices) for choices in (item.choices, plain)]
            # What the border moves from the context into the continuation is scored, and is not the answer's.
            answers = found[0][1] if task.convention == "common" else [text for _, text in item.choices]
            lengths.append(_lengths(found[0][0], [text.removeprefix(task.delimiter) for text in answers], found[0][1]))
        except ValueError as error:
            refused.append(f"item {number} ({item.id}): {error}")
            continue
        kept.append(item)
        rows += found[0][0]
        neutral += found[1][0]
        truncated += found[0][2] + found[1][2]
    if not kept:
        raise UserError(f"{task.name} has no item that can be scored; {refused[0]}. Leave the task out.")
    arrays = np.zeros((5, len(kept), max(len(item.choices) for item in kept)), np.int64)
    for index, each in enumerate(lengths):
        arrays[:, index, : each.shape[1]] = each
    found = (tuple(kept), tuple(rows), tuple(neutral))
    return EncodedTask(task, *found, *arrays, truncated, tuple(refused))  # type: ignore[call-arg]


def _lengths(rows: Sequence[Row], answers: Sequence[str], texts: Sequence[str]) -> np.ndarray:
    """Windows, characters and bytes of the answers, bytes of the scored texts and tokens, [5, choices]. Raises
    ValueError for an empty answer."""
    if not all(answers):
        raise ValueError(f"its choice {answers.index('') + 1} is empty")
    found = np.zeros((5, len(texts)), np.int64)
    found[1] = [len(answer) for answer in answers]
    found[2], found[3] = ([len(one.encode("utf-8", "replace")) for one in each] for each in (answers, texts))
    for row in rows:
        found[0, row.choice] += 1
        found[4, row.choice] += len(row.tokens) - row.first
    return found


class _Encoder:
    def __init__(self, task: Task, tokenizer: Tokenizer, max_tokens: int) -> None:
        self.task, self.tokenizer, self.max_tokens = task, tokenizer, max_tokens
        # The choices of an item share their context.
        self.encode = lru_cache(4)(lambda text: tokenizer.encode(text).astype(np.int32))
        begin = getattr(tokenizer, "begin_of_text", None)
        self.begin = np.array([] if begin is None else [begin], np.int32)
        self.prefix = np.array([tokenizer.end_of_text if begin is None else begin], np.int32)

    def rows(self, item: int, choices: Sequence[tuple[str, str]]) -> tuple[list[Row], list[str], int]:
        """Rows of an item, the text that each choice scores, and the number of cut rows. Raises ValueError."""
        if not choices:
            return [], [], 0
        if self.task.kind == "rolling":
            return self._document(item, choices[0][1]), [choices[0][1]], 0
        found, texts, cut = [], [], 0
        split = self._by_common_tokens if self.task.convention == "common" else self._by_border
        for index, (tokens, first, text) in enumerate(split(choices)):
            scored, excess = len(tokens) - first, max(len(tokens) - self.max_tokens - 1, 0)
            if scored < 1 or first < 1:
                raise ValueError(f"its choice {index + 1} has no tokens of its own")
            if scored > self.max_tokens:
                raise ValueError(f"its choice {index + 1} has {scored} tokens, and the model reads {self.max_tokens}")
            found.append(Row(item, index, tokens[excess:], first - excess))
            texts.append(text)
            cut += excess > 0
        return found, texts, cut

    def _by_border(self, choices: Sequence[tuple[str, str]]) -> Iterator[tuple[np.ndarray, int, str]]:
        """Tokens, index of the first scored one, and scored text of each choice."""
        for context, text in choices:
            if self.task.convention == "apart":
                before, after, scored = np.append(self.begin, self.encode(context)), self.encode(text), text
            else:
                stripped = context.rstrip()
                before, scored = self.encode(stripped), context[len(stripped) :] + text
                after = self.encode(context + text)[len(before) :]
            before = before if len(before) else self.prefix
            yield np.append(before, after), len(before), scored

    def _by_common_tokens(self, choices: Sequence[tuple[str, str]]) -> Iterator[tuple[np.ndarray, int, str]]:
        """As `_by_border`; what all choices share is context, or the continuation if their contexts differ."""
        rows = [np.append(self.prefix, self.encode(context + text)) for context, text in choices]
        if self.task.kind == "continuation":
            rows.append(np.append(self.prefix, self.encode(choices[0][0].strip())))
            if _shared(rows) < len(rows[1]):
                raise ValueError("a token reaches from its context into its continuation")
        same = len({context for context, _ in choices}) == 1
        shared = _shared(rows if same else [row[::-1] for row in rows])
        for row in rows[: len(choices)]:
            first = shared if same else len(row) - shared
            yield row, first, self.tokenizer.decode(row[first:])

    def _document(self, item: int, text: str) -> list[Row]:
        """Windows of a document: each token is scored once, in the last window after as much context as fits."""
        tokens = np.append(self.prefix, self.encode(text))
        ends = [*range(self.max_tokens, len(tokens) - 1, self.max_tokens), len(tokens) - 1]
        spans = [(max(end - self.max_tokens, 0), done + 1, end + 1) for done, end in pairwise([0, *ends])]
        return [Row(item, 0, tokens[start:stop], first - start) for start, first, stop in spans]


def _shared(rows: Sequence[np.ndarray]) -> int:
    columns = enumerate(zip(*(row.tolist() for row in rows), strict=False))
    return next((index for index, column in columns if len(set(column)) > 1), min(map(len, rows)))
