"""Predicted metrics of a run, read from its plan.json in the units of metrics.jsonl."""

from dataclasses import dataclass
from typing import TypedDict

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.attempts import read_json
from titan_exp.tracking.run_folder.run_folder import RunFolder


@dataclass(frozen=True)
class PredictedMetrics:
    """Predicted counterparts of measured metrics; None if not predicted."""

    memory: float | None = None
    """Peak of rank 0 in GiB: of allocated tensors on a GPU, of the whole process on a CPU."""
    tokens_per_second: float | None = None
    """Throughput of the whole job."""


def read_predicted_metrics(folder: RunFolder) -> PredictedMetrics:
    """Read the predictions of a run; all None if plan.json is missing or damaged."""
    try:
        found = read_json(folder.plan, _Prediction) or {}
    except UserError:
        return PredictedMetrics()
    return PredictedMetrics(found.get("memory"), found.get("tokens_per_second"))


class _Prediction(TypedDict, total=False):
    memory: float | None
    tokens_per_second: float | None
