"""Summary of a run, shown at its end."""

import statistics
from dataclasses import dataclass
from itertools import pairwise

from titan_exp.tracking.run_folder.attempts import read_json
from titan_exp.tracking.run_folder.metrics_jsonl import MetricRows, read_metrics
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.tracking.sinks.sink import Value


@dataclass(frozen=True)
class Summary:
    """Final state and metrics of a run; None if unknown."""

    state: str
    """`done`, `failed`, `preempted`, ..."""
    step: int
    loss: Value
    """Last logged training loss, in nats per token."""
    validation_loss: Value
    """Last validation loss."""
    tokens_per_second: Value
    """Median over rows, excluding the first of each attempt (compilation and warm-up)."""
    roofline: str | None = None
    """Roofline note of the newest finished attempt."""


def summarize(folder: RunFolder) -> Summary:
    """Read a run's summary from its folder."""
    state = folder.read_state()
    rows = read_metrics(folder.metrics)
    attempts, speeds = list(rows.column("attempt")), list(rows.column("tokens_per_second"))
    warm = [speed for pair, speed in zip(pairwise(attempts), speeds[1:], strict=True) if pair[0] == pair[1]]
    speeds = [speed for speed in warm or speeds if speed is not None]
    step = state.step if state else 0
    if state and rows and rows[-1].get("attempt") == state.attempt:
        step = max(step, int(rows[-1]["step"] or 0))  # ahead of state.json if the disk is full
    return Summary(
        state=state.state if state else "pending",
        step=step,
        loss=_last(rows, "loss"),
        validation_loss=_last(rows, "validation_loss"),
        tokens_per_second=statistics.median(speeds) if speeds else None,
        roofline=str((read_json(folder.roofline) or {}).get("short") or "") or None,
    )


def describe(summary: Summary, total_steps: int) -> str:
    """Format the known fields as one line."""
    parts = [
        f"{summary.state} after step {summary.step} of {total_steps}",
        *known_metrics(summary.loss, summary.validation_loss, summary.tokens_per_second),
    ]
    if summary.roofline is not None and summary.state == "done":
        parts.append(summary.roofline)
    return ", ".join(parts)


def known_metrics(loss: Value, validation_loss: Value, tokens_per_second: Value) -> list[str]:
    """Format those metrics that are known, each by itself."""
    texts = {"loss {:.4f}": loss, "validation loss {:.4f}": validation_loss, "{:,.0f} tokens/s": tokens_per_second}
    return [text.format(value) for text, value in texts.items() if value is not None]


def _last(rows: MetricRows, key: str) -> Value:
    return next((value for value in reversed(list(rows.column(key))) if value is not None), None)
