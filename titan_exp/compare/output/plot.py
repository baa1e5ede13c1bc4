"""Plot of one run: loss over steps and tokens, gradient norm and learning rate."""

import math
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from titan_exp.compare.stats.moving_average import moving_average
from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.number_format import format_count
from titan_exp.tracking.run_folder.final_value import last_fiftieth
from titan_exp.tracking.run_folder.lineage import ancestors, read_history
from titan_exp.tracking.run_folder.metric_rows import MetricRows
from titan_exp.tracking.run_folder.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

INK, TRAIN, VALIDATION, QUIET, ALARM = "#222222", "#2b6cb0", "#dd6b20", "#718096", "#c53030"

Series = tuple[list[float], list[float]]


def draw(run_folder: Path) -> Path:
    """Plot the run's curves to `loss.png` in its folder; returns the path. Raises UserError if no step is logged."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = _rows(run_folder)
    figure = Figure(figsize=(9, 7), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    loss, grad_norm, lr = figure.subplots(3, 1, sharex=True, height_ratios=(4, 1, 1))
    _draw_loss(loss, rows)
    _draw_small(grad_norm, rows, "grad_norm", "gradient norm")
    _draw_small(lr, rows, "lr", "learning rate")
    lr.set_xlabel("step")
    lr.locator_params(axis="x", integer=True)
    begins = [ancestor.lineage.step for ancestor in ancestors(run_folder)]
    _mark((loss, grad_norm, lr), _resumes(rows), ":", "resumed")
    _mark((loss, grad_norm, lr), begins, "--", "continued")
    if loss.get_legend_handles_labels()[0]:
        loss.legend(frameon=False, loc="upper right")
    figure.align_ylabels()
    _add_tokens(loss, rows)
    _add_title(figure, run_folder, rows, begins)
    return save_figure(figure, run_folder / "loss.png")


def _rows(run_folder: Path) -> MetricRows:
    path = RunFolder(run_folder).metrics
    rows = read_history(path.parent)
    if not rows:
        raise UserError(
            f"{run_folder}: {path.name} is missing or empty. Name a run folder (runs/<name>/<run id>) whose run has "
            "logged a step (tracking.log_every)."
        )
    return rows


def _draw_loss(axes: "Axes", rows: MetricRows) -> None:
    steps, losses = _series(rows, "loss")
    if len(losses) < 20:
        axes.plot(steps, losses, color=TRAIN, marker="o", markersize=4, label="train")
    else:
        axes.plot(steps, losses, color=TRAIN, linewidth=0.8, alpha=0.3)
        axes.plot(steps, moving_average(losses), color=TRAIN, linewidth=1.8, label="train, smoothed")
    steps, losses = _series(rows, "validation_loss")
    if losses:
        axes.plot(
            steps, losses, color=VALIDATION, marker="o", markersize=5, linewidth=0.8, linestyle="--", label="validation"
        )
    pairs = zip(rows.column("step"), rows.column("loss"), strict=True)
    diverged = [float(step) for step, loss in pairs if not math.isfinite(loss or 0.0)]
    for step in diverged:
        axes.axvline(step, color=ALARM, linewidth=1, alpha=0.5, label="not finite" if step == diverged[0] else None)
    axes.set_ylabel("loss (nats per token)")
    style_axes(axes)


def _draw_small(axes: "Axes", rows: MetricRows, key: str, label: str) -> None:
    steps, values = _series(rows, key)
    few = {"marker": "o", "markersize": 3} if len(values) < 20 else {}
    axes.plot(steps, values, color=QUIET, linewidth=1.2, **few)
    axes.set_ylabel(label, fontsize=9)
    if any(value > 0 for value in values):
        axes.set_ylim(bottom=0)
    axes.locator_params(axis="y", nbins=4)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    style_axes(axes)


def style_axes(axes: "Axes") -> None:
    """Set grid, spines and ticks as in every plot."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#000000", alpha=0.08)
    axes.tick_params(labelsize=9, color=QUIET)
    axes.margins(x=0.02)


def _resumes(rows: MetricRows) -> list[float]:
    """First steps of later attempts."""
    attempts = pairwise(attempt or 0 for attempt in rows.column("attempt"))
    steps = list(rows.column("step"))
    return [float(step) for step, (before, after) in zip(steps[1:], attempts, strict=True) if before < after]


def _mark(panels: tuple["Axes", ...], steps: Sequence[float], style: str, label: str) -> None:
    for axes in panels:
        for step in steps:
            axes.axvline(step, color=QUIET, linewidth=0.8, linestyle=style, label=label if step == steps[0] else None)


def _add_tokens(axes: "Axes", rows: MetricRows) -> None:
    """Add a secondary x axis in tokens."""
    last = next((row for row in reversed(rows) if row.get("tokens") and row["step"]), None)
    if last is None:
        return
    per_step = float(last["tokens"] or 0) / float(last["step"] or 1)
    top = axes.secondary_xaxis("top", functions=(_scaled(per_step), _scaled(1 / per_step)))
    top.set_xlabel("tokens", fontsize=9)
    top.tick_params(labelsize=9, color=QUIET)
    top.xaxis.set_major_formatter(lambda tokens, _: format_count(tokens))
    top.spines["top"].set_color("#cccccc")


def _scaled(factor: float) -> Callable[["ArrayLike"], "ArrayLike"]:
    return lambda places: np.asarray(places) * factor


def _add_title(figure: "Figure", run_folder: Path, rows: MetricRows, begins: Sequence[int]) -> None:
    folder = run_folder.resolve()
    losses, validation = (_series(rows, key)[1] for key in ("loss", "validation_loss"))
    begin = max(begins, default=-1)
    speeds = [speed for step, speed in zip(*_series(rows, "tokens_per_second"), strict=True) if step > begin]
    parts = [f"step {rows[-1]['step']}"]
    if tokens := rows[-1].get("tokens"):
        parts.append(f"{format_count(tokens)} tokens")
    if losses:
        parts.append(f"train loss {fmean(last_fiftieth(losses)):.4g}")
    if validation:
        parts.append(f"validation loss {validation[-1]:.4g}")
    if speeds:
        parts.append(f"{format_count(sorted(speeds)[len(speeds) // 2])} tokens/s")
    figure.suptitle(f"{folder.parent.name} / {folder.name}\n", fontsize=13, fontweight="bold", color=INK)
    figure.text(0.5, 0.945, "   ·   ".join(parts), ha="center", fontsize=10, color=QUIET)


def save_figure(figure: "Figure", path: Path) -> Path:
    """Replace the PNG file at `path`; returns it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, format="png")
    temporary.replace(path)
    return path


def _series(rows: MetricRows, key: str) -> Series:
    """Steps and values of a metric; infinity becomes NaN, which leaves a gap."""
    steps, values = rows.series(key, "step", above=-1, up_to=math.inf)
    return steps, [value if math.isfinite(value) else math.nan for value in values]
