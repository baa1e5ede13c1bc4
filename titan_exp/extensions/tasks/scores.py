"""Scores of tasks from log-likelihoods, with standard errors, and their files in a run folder."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from titan_exp.config.foreign_file import parse_json, read_file
from titan_exp.extensions.tasks.encoding import EncodedTask
from titan_exp.extensions.tasks.formats import placed
from titan_exp.tracking.run_folder.files import mkdir_below, write_atomically


@dataclass(frozen=True)
class Score:
    """Value of a metric on a task."""

    value: float  # mean of `items` by `weights`; for a perplexity, the exponential of that
    error: float  # standard error from the items. NaN for a single one.
    items: np.ndarray  # value of each item, to pair runs by, float64 [items]; for a perplexity, its logarithm
    weights: np.ndarray  # weight of each item: 1, and in ratios of sums its share of the divisor, with the mean 1
    ties: int = 0  # number of items whose best choice is not the only one; the first one counts


@dataclass(frozen=True)
class TaskScores:
    """Scores of a task."""

    task: str
    digest: str  # version of the task
    primary: str  # metric that the task is usually reported by
    metrics: dict[str, Score]  # score by metric; bits per byte come first
    ids: tuple[str, ...]  # names of the items, in the order of `Score.items`
    chance: float  # accuracy of guessing
    truncated: int  # number of rows with a cut context
    refused: tuple[str, ...]  # items that were not scored, with the reason


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
    task, found = encoded.task, dict[str, Score]()

    def add(name: str, values: np.ndarray, by: np.ndarray | None = None, ties: int = 0) -> None:
        weights = np.ones(len(values)) if by is None else by / by.mean()
        value, error = mean_and_error(values, weights)
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
    ids, left_out = tuple(item.id for item in encoded.items), (encoded.truncated, encoded.refused)
    return TaskScores(task.name, task.digest, task.primary, found, ids, task.chance, *left_out)


def _hits(measure: np.ndarray, gold: np.ndarray) -> tuple[np.ndarray, int]:
    """Whether each item's first best choice is gold, as 0 or 1, or NaN if its measure is; and the number of ties."""
    best = measure.max(axis=1)
    hits = np.take_along_axis(gold, measure.argmax(axis=1)[:, None], axis=1)[:, 0]
    ties = int(((measure == best[:, None]).sum(axis=1) > 1).sum())
    return np.where(np.isnan(best), np.nan, hits), ties


def mean_and_error(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Weighted mean and its standard error, by linearization of the ratio of sums."""
    mean, number = float(np.average(values, weights=weights)), len(values)
    residuals = weights * (values - mean) / weights.sum()
    return mean, math.sqrt(number / (number - 1) * float(residuals @ residuals)) if number > 1 else math.nan


FOLDER = "tasks"  # folder of a run with these files
Evaluated = tuple[int, dict[str, TaskScores]]  # tokens trained on at an evaluation, and its scores by task


def read_evaluation(path: Path) -> Evaluated:
    """Read the scores of an evaluation. Raises UserError if the file is damaged."""
    with placed(path):
        found = parse_json(read_file(path))
        return int(found["tokens"]), {name: _scores(name, one) for name, one in found["tasks"].items()}


def _scores(name: str, one: Mapping[str, Any]) -> TaskScores:
    ids, scores = tuple(map(str, one["ids"])), dict[str, Score]()
    for metric, found in one["metrics"].items():
        items = np.array(found["items"], float)  # null becomes NaN
        weights = np.ones(len(ids)) if found.get("weights") is None else np.array(found["weights"], float)
        if not items.shape == weights.shape == (len(ids),) or not (weights > 0).all():
            raise ValueError(f"{name} has {len(ids)} items, but its {metric} does not have a number for each")
        scores[metric] = Score(float(np.average(items, weights=weights)), math.nan, items, weights)
    if not ids or not {"bits_per_byte", one["primary"]} <= scores.keys() or not 0 <= one["chance"] < 1:
        raise ValueError(f"{name} has no items, no bits_per_byte or {one['primary']}, or a wrong level of chance")
    return TaskScores(name, one["digest"], one["primary"], scores, ids, one["chance"], 0, ())


def values_of(found: Sequence[TaskScores]) -> dict[str, Any]:
    """Scores of tasks as values of JSON, with those of each item; None in place of numbers that are not finite."""
    return {one.task: _plain(vars(one)) for one in found}


def _plain(value: Any) -> Any:
    match value:
        case Score():
            return _plain(vars(value))
        case dict():
            return {name: _plain(one) for name, one in value.items()}
        case np.ndarray() | tuple():
            return [_plain(one) for one in (value.tolist() if isinstance(value, np.ndarray) else value)]
        case float():
            return value if math.isfinite(value) else None
    return value


def metrics_of(tasks: Mapping[str, Any]) -> dict[str, float | None]:
    """Metrics of an evaluation from its `values_of`: means over tasks, then those of each task as `TASK/METRIC`.
    `bits_per_byte` is a mean over all tasks, and `acc_centered` that of (accuracy - chance) / (1 - chance) over the
    tasks whose primary metric is an accuracy that they have. A mean is None if one of its numbers is not finite."""
    values = {name: {metric: one["value"] for metric, one in task["metrics"].items()} for name, task in tasks.items()}
    means = {"bits_per_byte": _mean([one["bits_per_byte"] for one in values.values()])}
    centered = [
        None if (value := values[name][primary]) is None else (value - task["chance"]) / (1 - task["chance"])
        for name, task in tasks.items()
        if (primary := task["primary"]).startswith("acc") and primary in values[name]
    ]
    if centered:
        means["acc_centered"] = _mean(centered)
    return means | {f"{name}/{metric}": value for name, one in values.items() for metric, value in one.items()}


def evaluation_file(folder: Path, step: int) -> Path:
    """File of a run with the scores of a step."""
    return folder / FOLDER / f"step-{step:08d}.json"


def write_evaluation(folder: Path, tasks: Mapping[str, Any], *, step: int, tokens: int) -> None:
    """Write the `values_of` an evaluation into the folder of its run."""
    path = evaluation_file(folder, step)
    mkdir_below(folder, path.parent)
    write_atomically(path, f"{json.dumps({'step': step, 'tokens': tokens, 'tasks': tasks}, ensure_ascii=False)}\n")


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if len(numbers) == len(values) else None
