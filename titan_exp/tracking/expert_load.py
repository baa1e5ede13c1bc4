"""Expert load: statistics of a layer's token counts, and the thinned record `expert_load.jsonl` of a run.

A row of the record is `{"step": 10, "layer_0": [tokens of expert 0, 1, ...], ..., "attempt": 1}`, as in metrics.jsonl.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from titan_exp.tracking.run_folder.metrics_jsonl import JsonlSink

ROWS = 500
"""Approximate number of rows in a run's record; a picture shows no more, and 94 layers of 128 experts take 70 kB a
row."""


class LoadStatistics(NamedTuple):
    """Balance of one layer's tokens over its experts."""

    load_max: float
    """Tokens of the busiest expert over the mean; 1 is balanced."""
    dead: int
    """Experts without a token."""
    entropy: float
    """−Σ p ln p / ln(experts), p the share of tokens: 1 is balanced, 0 is all tokens on one expert."""


def load_statistics(counts: Sequence[int]) -> LoadStatistics:
    """Statistics of a layer's tokens per expert."""
    total = sum(counts)
    if not total:
        return LoadStatistics(0.0, len(counts), 0.0)
    shares = [count / total for count in counts if count]
    # Six digits suffice: a row has three such numbers for each of up to a hundred layers.
    entropy = abs(math.fsum(share * math.log(share) for share in shares)) / math.log(len(counts))
    return LoadStatistics(_rounded(max(counts) * len(counts) / total), len(counts) - len(shares), _rounded(entropy))


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


class ExpertLoadLog:
    """Appends token counts to the record, at steps that depend only on the run's length."""

    def __init__(self, path: Path, attempt: int, *, steps: int, log_every: int) -> None:
        self._sink = JsonlSink(path, attempt)
        self._steps = steps
        self._every = log_every * math.ceil(steps / (log_every * ROWS))

    def log(self, step: int, counts: Mapping[str, Sequence[int]]) -> None:
        """Write the counts of a step, by layer, if the step is due."""
        if step % self._every == 0 or step == self._steps:
            self._sink.log({"step": step, **counts})

    def close(self, state: str) -> None:
        """Close the file. Raises OSError if rows could not be written."""
        self._sink.close(state)


def layer_counts(row: Mapping[str, Any]) -> dict[str, list[int]]:
    """Token counts of a row of the record, by layer."""
    return {key: value for key, value in row.items() if isinstance(value, list)}
