"""Scores of tasks from log-likelihoods, with standard errors; comparisons of runs on the same items."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from titan_exp.extensions.tasks.encoding import EncodedTask


@dataclass(frozen=True)
class Score:
    """Value of a metric on a task."""

    value: float
    """Mean of `items` by `weights`; for a perplexity, the exponential of that."""
    error: float
    """Standard error from the items, by clusters if they have any. NaN for a single one."""
    items: np.ndarray
    """Value of each item, to pair runs by, float64 [items]; for a perplexity, its logarithm."""
    weights: np.ndarray
    """Weight of each item: 1, and in ratios of sums its share of the divisor, with the mean 1."""
    ties: int = 0
    """Number of items whose best choice is not the only one; the first one counts."""


@dataclass(frozen=True)
class TaskScores:
    """Scores of a task."""

    task: str
    """Name of the task."""
    digest: str
    """Version of the task."""
    primary: str
    """Metric that the task is usually reported by."""
    scores: Mapping[str, Score]
    """Score by metric; bits per byte come first."""
    ids: tuple[str, ...]
    """Names of the items, in the order of `Score.items`."""
    clusters: tuple[str, ...]
    """Cluster of each item."""
    chance: float
    """Accuracy of guessing."""
    truncated: int
    """Number of rows with a cut context."""
    refused: tuple[str, ...]
    """Items that were not scored, with the reason."""


@np.errstate(over="ignore", invalid="ignore")
def score(
    encoded: EncodedTask,
    log_likelihoods: np.ndarray,
    greedy: np.ndarray | None = None,
    neutral: np.ndarray | None = None,
) -> TaskScores:
    """Scores of a task from sums of log-likelihoods over the scored tokens, in nats, float64 [items, choices].

    - `bits_per_byte`: of the gold choice over all bytes that it scores, its delimiter too; the best of several gold
      ones. Of documents a ratio of sums, as `byte_perplexity` and `word_perplexity`.
    - `acc`, `acc_per_char`, `acc_per_byte`, `acc_per_token`: share of items whose choice of the highest log-likelihood
      is gold; it is divided by the answer's length without the delimiter. Of a continuation, `acc` is the share where
      every scored token has the largest logit (`greedy`).
    - `acc_pmi`: the same with the difference to the log-likelihood after the neutral context, of `encoded.neutral`.
    - `gold_probability`: softmax over the choices' log-likelihoods, of the gold ones.
    """
    task, clusters = encoded.task, tuple(item.cluster or f"item {item.id}" for item in encoded.items)
    found: dict[str, Score] = {}

    def add(name: str, values: np.ndarray, by: np.ndarray | None = None, ties: int = 0) -> None:
        weights = np.ones(len(values)) if by is None else by / by.mean()
        value, error = mean_and_error(values, weights, clusters)
        if name.endswith("perplexity"):
            value = float(np.exp(value))
            error *= value
        found[name] = Score(value, error, values, weights, ties)

    present = encoded.windows > 0
    nats = np.where(present, -log_likelihoods, np.inf)
    if task.kind == "rolling":
        size = encoded.scored_bytes[:, 0]
        words = np.array([len(re.split(r"\s+", item.choices[0][1])) for item in encoded.items])
        add("bits_per_byte", nats[:, 0] / size / math.log(2), size)
        add("byte_perplexity", nats[:, 0] / size, size)
        add("word_perplexity", nats[:, 0] / words, words)
    else:
        gold = np.zeros(present.shape, bool)
        for index, item in enumerate(encoded.items):
            gold[index, list(item.gold)] = True
        bits = nats / np.maximum(encoded.scored_bytes, 1) / math.log(2)
        add("bits_per_byte", np.where(gold, bits, np.inf).min(axis=1))
        if task.kind == "continuation":
            if greedy is not None:
                add("acc", greedy[:, 0].astype(float))
            add("perplexity", nats[:, 0])
        else:
            lengths = {"char": encoded.characters, "byte": encoded.bytes, "token": encoded.tokens}
            measures = {"acc": -nats, **{f"acc_per_{name}": -nats / np.maximum(by, 1) for name, by in lengths.items()}}
            if neutral is not None and all(item.neutral is not None for item in encoded.items):
                measures["acc_pmi"] = np.where(present, log_likelihoods - neutral, -np.inf)
            for name, measure in measures.items():
                hits, ties = _hits(measure, gold)
                add(name, hits, ties=ties)
            likelihoods = np.exp(nats.min(axis=1, keepdims=True) - nats)
            add("gold_probability", np.where(gold, likelihoods, 0).sum(axis=1) / likelihoods.sum(axis=1))
    ids = tuple(item.id for item in encoded.items)
    return TaskScores(
        task.name, task.digest, task.primary, found, ids, clusters, task.chance, encoded.truncated, encoded.refused
    )


def _hits(measure: np.ndarray, gold: np.ndarray) -> tuple[np.ndarray, int]:
    """Whether each item's first best choice is gold, as 0 or 1, or NaN if its measure is; and the number of ties."""
    best = measure.max(axis=1)
    hits = np.take_along_axis(gold, measure.argmax(axis=1)[:, None], axis=1)[:, 0]
    ties = int(((measure == best[:, None]).sum(axis=1) > 1).sum())
    return np.where(np.isnan(best), np.nan, hits), ties


def mean_and_error(values: np.ndarray, weights: np.ndarray, clusters: Sequence[str]) -> tuple[float, float]:
    """Weighted mean and its standard error, by linearization of the ratio of sums and over sums of clusters."""
    mean = float(np.average(values, weights=weights))
    _, cluster = np.unique(clusters, return_inverse=True)
    residuals = np.bincount(cluster, weights * (values - mean)) / weights.sum()
    number = len(residuals)
    return mean, math.sqrt(number / (number - 1) * float(residuals @ residuals)) if number > 1 else math.nan


def crossed(differences: np.ndarray) -> tuple[float, float, float]:
    """Mean, standard error and degrees of freedom (Satterthwaite) of differences [seeds, items], at least 2 of each;
    both are samples."""
    n, m = differences.shape
    mean, rows, columns = differences.mean(), differences.mean(axis=1), differences.mean(axis=0)
    rest = ((differences - rows[:, None] - columns + mean) ** 2).sum() / ((n - 1) * (m - 1))
    a, b, c = rows.var(ddof=1) / n, columns.var(ddof=1) / m, rest / (n * m)
    variance, divisor = max(a + b - c, a, b), a**2 / (n - 1) + b**2 / (m - 1) + c**2 / ((n - 1) * (m - 1))
    return float(mean), math.sqrt(variance), float(variance**2 / divisor) if divisor else n - 1.0
