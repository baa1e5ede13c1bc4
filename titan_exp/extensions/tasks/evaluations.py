"""Files of a run with the scores of each item, one for each evaluation: written, and read as those of others."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from titan_exp.config.foreign_file import parse_json, read_file
from titan_exp.extensions.tasks.items import placed
from titan_exp.extensions.tasks.scores import Score, TaskScores
from titan_exp.tracking.run_folder.files import mkdir_below, write_atomically

FOLDER = "tasks"
"""Folder of a run with these files."""

Evaluated = tuple[int, dict[str, TaskScores]]
"""Tokens trained on at an evaluation, and its scores by task."""


def read_evaluation(path: Path) -> Evaluated:
    """Read the scores of an evaluation. Raises UserError if the file is damaged."""
    content = read_file(path)
    with placed(path):
        found = parse_json(content)
        return int(found["tokens"]), {name: _scores(name, one) for name, one in found["tasks"].items()}


def _scores(name: str, one: Mapping[str, Any]) -> TaskScores:
    """Scores of a task with their items; raises ValueError, and others, for damaged ones."""
    ids, scores = tuple(map(str, one["ids"])), dict[str, Score]()
    clusters = tuple(map(str, one.get("clusters") or ids))
    for metric, found in one["metrics"].items():
        items = np.array(found["items"], float)  # null becomes NaN
        weights = np.ones(len(ids)) if found.get("weights") is None else np.array(found["weights"], float)
        if not items.shape == weights.shape == (len(clusters),) == (len(ids),) or not (weights > 0).all():
            raise ValueError(f"{name} has {len(ids)} items, but its {metric} does not have a number for each")
        scores[metric] = Score(float(np.average(items, weights=weights)), math.nan, items, weights)
    if not ids or not {"bits_per_byte", one["primary"]} <= scores.keys() or not 0 <= one["chance"] < 1:
        raise ValueError(f"{name} has no items, no bits_per_byte or {one['primary']}, or a wrong level of chance")
    return TaskScores(name, one["digest"], one["primary"], scores, ids, clusters, one["chance"], 0, ())


def values_of(found: Sequence[TaskScores]) -> dict[str, Any]:
    """Scores of tasks as values of JSON, with those of each item; None in place of numbers that are not finite."""
    return {
        one.task: {
            "digest": one.digest,
            "primary": one.primary,
            "chance": one.chance,
            "truncated": one.truncated,
            "refused": list(one.refused),
            "ids": list(one.ids),
            "clusters": list(one.clusters) if len({*one.clusters}) < len(one.clusters) else None,
            "metrics": {
                metric: {
                    "value": _number(value.value),
                    "error": _number(value.error),
                    "ties": value.ties,
                    "weights": None if (value.weights == 1).all() else value.weights.tolist(),
                    "items": [_number(item) for item in value.items.tolist()],
                }
                for metric, value in one.scores.items()
            },
        }
        for one in found
    }


def metrics_of(tasks: Mapping[str, Any]) -> dict[str, float | None]:
    """Metrics of an evaluation from its `values_of`: means over tasks, then those of each task as `TASK/METRIC`.

    `bits_per_byte` is a mean over all tasks, and `acc_centered` that of (accuracy - chance) / (1 - chance) over the
    tasks whose primary metric is an accuracy that they have. A mean is None if one of its numbers is not finite.
    """
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
    about = {"step": step, "tokens": tokens, "tasks": tasks}
    write_atomically(path, f"{json.dumps(about, ensure_ascii=False)}\n")


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if len(numbers) == len(values) else None


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
