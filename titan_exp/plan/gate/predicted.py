"""What plan.json says was predicted of a run before it started, in the units of metrics.jsonl."""

from dataclasses import dataclass

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.tracking.run_folder.state import read_json


@dataclass(frozen=True)
class PredictedMetrics:
    """Numbers that are compared with what a run measures; None where nothing was predicted."""

    memory: float | None = None
    """GiB of rank 0 at its peak: of allocated tensors on a GPU, of the whole process on a CPU."""
    tokens_per_second: float | None = None
    """Of the whole job."""


def read_predicted_metrics(folder: RunFolder) -> PredictedMetrics:
    """What was predicted of a run; nothing where no plan.json says it."""
    try:
        found = read_json(folder.plan) or {}
    except UserError:
        return PredictedMetrics()  # a damaged note must not hide the run
    memory, speed = found.get("memory"), found.get("tokens_per_second")
    return PredictedMetrics(
        float(memory) if isinstance(memory, int | float) else None,
        float(speed) if isinstance(speed, int | float) else None,
    )
