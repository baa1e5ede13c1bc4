"""Plots of runs and studies."""

import io
import math
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from titan_exp.compare.comparison import Comparison
from titan_exp.compare.statistics import moving_average
from titan_exp.compare.study_outcome import LadderOutcome, Learnt, Parameter
from titan_exp.compare.tuning import Tuning
from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.display import format_count, format_items
from titan_exp.tracking.run_folder.metrics_jsonl import MetricRows, last_fiftieth, layer_counts, load_statistics
from titan_exp.tracking.run_folder.run import ancestors, read_history
from titan_exp.tracking.run_folder.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


INK, TRAIN, VALIDATION, QUIET, ALARM = "#222222", "#2b6cb0", "#dd6b20", "#718096", "#c53030"
Series = tuple[list[float], list[float]]


def draw(run_folder: Path) -> Path:
    """Plot the run's curves to `loss.png` in its folder; returns the path. Raises UserError if no step is logged."""
    path = RunFolder(run_folder).metrics
    rows = read_history(path.parent)
    if not rows:
        raise UserError(
            f"{run_folder}: {path.name} is missing or empty. Name a run folder (runs/<name>/<run id>) whose run has "
            "logged a step (tracking.log_every)."
        )
    figure = _new_figure(9, 7, 150)
    loss, grad_norm, lr = figure.subplots(3, 1, sharex=True, height_ratios=(4, 1, 1))
    _draw_loss(loss, rows)
    _draw_small(grad_norm, rows, "grad_norm", "gradient norm")
    _draw_small(lr, rows, "lr", "learning rate")
    lr.set_xlabel("step")
    lr.locator_params(axis="x", integer=True)
    begins = [ancestor.lineage.step for ancestor in ancestors(run_folder)]
    attempts = pairwise(attempt or 0 for attempt in rows.column("attempt"))
    later = zip(list(rows.column("step"))[1:], attempts, strict=True)
    resumes = [float(step) for step, (before, after) in later if before < after]
    _mark((loss, grad_norm, lr), resumes, ":", "resumed")
    _mark((loss, grad_norm, lr), begins, "--", "continued")
    if loss.get_legend_handles_labels()[0]:
        loss.legend(frameon=False, loc="upper right")
    figure.align_ylabels()
    _add_tokens(loss, rows)
    _add_title(figure, run_folder, rows, begins)
    return save_figure(figure, run_folder / "loss.png")


def _new_figure(width: float, height: float, dpi: int) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw_loss(axes: "Axes", rows: MetricRows) -> None:
    steps, losses = _series(rows, "loss")
    if len(losses) < 20:
        axes.plot(steps, losses, color=TRAIN, marker="o", markersize=4, label="train")
    else:
        axes.plot(steps, losses, color=TRAIN, linewidth=0.8, alpha=0.3)
        axes.plot(steps, moving_average(losses), color=TRAIN, linewidth=1.8, label="train, smoothed")
    steps, losses = _series(rows, "validation_loss")
    if losses:
        look = {"marker": "o", "markersize": 5, "linewidth": 0.8, "linestyle": "--"}
        axes.plot(steps, losses, color=VALIDATION, label="validation", **look)
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


def _mark(panels: tuple["Axes", ...], steps: Sequence[float], style: str, label: str) -> None:
    for axes in panels:
        for step in steps:
            axes.axvline(step, color=QUIET, linewidth=0.8, linestyle=style, label=label if step == steps[0] else None)


def _add_tokens(axes: "Axes", rows: MetricRows) -> None:
    last = next((row for row in reversed(rows) if row.get("tokens") and row["step"]), None)
    if last is None:
        return
    per_step = float(last["tokens"] or 0) / float(last["step"] or 1)
    there, back = (lambda steps: np.asarray(steps) * per_step), (lambda tokens: np.asarray(tokens) * (1 / per_step))
    top = axes.secondary_xaxis("top", functions=(there, back))
    top.set_xlabel("tokens", fontsize=9)
    top.tick_params(labelsize=9, color=QUIET)
    top.xaxis.set_major_formatter(lambda tokens, _: format_count(tokens))
    top.spines["top"].set_color("#cccccc")


def _add_title(figure: "Figure", run_folder: Path, rows: MetricRows, begins: Sequence[int]) -> None:
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
    _add_name(figure, run_folder, parts, 0.945)


def _add_name(figure: "Figure", run_folder: Path, parts: Sequence[str], y: float) -> None:
    """Name of a run as the title, in smaller letters if it is long, above some facts."""
    folder = run_folder.resolve()
    name = f"{folder.parent.name} / {folder.name}"
    size = min(13.0, 100 * figure.get_figwidth() / len(name))
    figure.suptitle(f"{name}\n", fontsize=size, fontweight="bold", color=INK)
    figure.text(0.5, y, "   ·   ".join(parts), ha="center", fontsize=10, color=QUIET)


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


COLORS = ("#2b6cb0", "#dd6b20", "#2f855a", "#9f3a9f", "#b7791f", "#2c7a7b", "#718096", "#c53030", "#553c9a", "#1a202c")
STYLES = ("-", "--", ":", "-.")  # line styles; each style runs through all colours
LINE, SIDE = 90, 30  # number of letters in a line of the legend, and below an axis of a third of the width
DPI = 110
SPREAD = 5.0  # ratio of the largest to the smallest value above which an axis becomes logarithmic


def study_plots(comparison: Comparison) -> Iterator[tuple[str, bytes]]:
    """Title and PNG of each plot."""
    if (tuning := comparison.tuning) is not None and any(len(group.points) > 1 for group in tuning.groups):
        lost = any(point.diverged for group in tuning.groups for point in group.points)
        lines = sum(len(_wrapped(group.label)) for group in tuning.groups)
        height = 4.6 + 0.2 * lines + _room([point.value for group in tuning.groups for point in group.points])
        figure = _new_figure(8, height, DPI)
        draw_tuning(figure.subplots(), comparison, tuning)
        marks = f"filled: the best{', dotted: diverged' * lost}"
        yield f"{tuning.metric} against {tuning.short} ({marks})", _png(figure, DPI)
    if (learnt := comparison.learnt) is not None and learnt.parameters:
        height = 3.6 + max(_room([value for value, _ in parameter.points]) for parameter in learnt.parameters)
        figure = _new_figure(max(8, 4 * min(3, len(learnt.parameters))), height, DPI)
        draw_parameters(figure, learnt)
        values = [value for parameter in learnt.parameters for _, value in parameter.points if value is not None]
        marks = f"filled: the best{', ×: diverged' * (not all(map(math.isfinite, values)))}"
        yield f"{learnt.metric.replace('_', ' ')} against each parameter ({marks})", _png(figure, DPI)
    if (ladder := comparison.ladder) is not None:
        figure = _new_figure(8, 5, DPI)
        draw_ladder(figure.subplots(), ladder)
        law = f" (curves: {ladder.law.form})" if ladder.law is not None else ""
        yield f"{ladder.metric.replace('_', ' ')} over FLOPs{law}", _png(figure, DPI)


def draw_ladder(axes: "Axes", ladder: LadderOutcome) -> None:
    """Draw final losses over FLOPs, log-log: a colour for each number of tokens per parameter, with the law."""
    lengths = list(dict.fromkeys(row.per_parameter for row in ladder.rows))
    for row in ladder.rows:
        color = COLORS[lengths.index(row.per_parameter) % len(COLORS)]
        for arm, face in zip(ladder.arms, (color, "white"), strict=False):
            for loss in row.losses[arm].values():
                axes.plot([row.flops[arm]], [loss], "o", color=color, markersize=6, markerfacecolor=face)
    for number, per in enumerate(lengths):
        color, curve = COLORS[number % len(COLORS)], ladder.curves.get(per, ())
        name = f"{per} tokens per parameter"
        line = zip(*curve, strict=True) if curve else ([], [], "o")
        axes.plot(*line, color=color, label=name)
    if len(ladder.arms) > 1:
        for arm, face in zip(ladder.arms, (QUIET, "white"), strict=True):
            axes.plot([], [], "o", color=QUIET, markerfacecolor=face, label=arm)
    if (beyond := ladder.extrapolated) is not None:
        axes.plot([beyond.flops] * 2, [beyond.low, beyond.high], color=QUIET)
        axes.plot([beyond.flops], [beyond.loss], "D", color=QUIET, markersize=5, label="extrapolated, not run")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:.3g}")
    axes.set_xlabel("FLOPs")
    axes.set_ylabel(ladder.metric.replace("_", " "))
    axes.legend(frameon=False, fontsize=9)
    style_axes(axes)


def draw_tuning(axes: "Axes", comparison: Comparison, tuning: Tuning) -> None:
    """Draw a curve for each group, with intervals over seeds and its best value as a filled dot."""
    values = [point.value for group in tuning.groups for point in group.points]
    place = _scale(axes, values)
    for number, group in enumerate(tuning.groups):
        color = COLORS[number % len(COLORS)]
        known = [(place(point.value), point, point.estimate) for point in group.points if point.estimate is not None]
        means = [found.mean for *_, found in known]
        style = STYLES[number // len(COLORS) % len(STYLES)]
        label = "\n".join(_wrapped(group.label))
        axes.plot([x for x, *_ in known], means, style, color=color, linewidth=1.6, label=label)
        for x, point, found in known:
            if found.low is not None and found.high is not None:
                axes.plot([x, x], [found.low, found.high], color=color, linewidth=1, alpha=0.6)
            filled = point is group.best
            axes.plot([x], [found.mean], "o", color=color, markersize=7, markerfacecolor=color if filled else "white")
        for point in group.points:
            if point.diverged:
                axes.axvline(place(point.value), color=color, linewidth=0.8, linestyle=":")
    axes.set_xlabel(tuning.short)
    axes.set_ylabel(comparison.main.title)
    axes.figure.legend(frameon=False, fontsize=9, loc="outside lower left")
    style_axes(axes)


def draw_parameters(figure: "Figure", learnt: Learnt) -> None:
    """Draw every point against each parameter. The best point is filled, and diverged points are marks at the top."""
    count = len(learnt.parameters)
    panels = figure.subplots(-(-count // 3), min(3, count), squeeze=False).flat
    for parameter, axes in zip(learnt.parameters, panels, strict=False):
        _draw_parameter(axes, learnt, parameter)
    for axes in list(panels):
        axes.set_visible(False)


def _draw_parameter(axes: "Axes", learnt: Learnt, parameter: Parameter) -> None:
    place = _scale(axes, [value for value, _ in parameter.points], logarithmic=parameter.kind == "log_uniform")
    for number, (value, metric) in enumerate(parameter.points):
        if metric is None:
            continue
        if math.isfinite(metric):
            face = TRAIN if number == 0 else "white"
            axes.plot([place(value)], [metric], "o", color=TRAIN, markersize=6, markerfacecolor=face)
        else:
            axes.plot([place(value)], [0.98], "x", color=ALARM, transform=axes.get_xaxis_transform())
    axes.set_xlabel(parameter.short)
    where = ", first rung" if learnt.rungs else ""
    axes.set_ylabel(f"{learnt.metric.replace('_', ' ')}{where}", fontsize=9, color=QUIET)
    style_axes(axes)
    axes.margins(x=0.08)


def _scale(axes: "Axes", values: Sequence[Any], *, logarithmic: bool | None = None) -> Callable[[Any], float]:
    """Set the x axis; returns a function that places a value: numbers at their value, other values side by side."""
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(values):
        names = list(dict.fromkeys(map(str, values)))
        labels = ["\n".join(_wrapped(name, SIDE)) for name in names]
        axes.set_xticks(range(len(names)), labels, rotation=90 if _room(values) else 0)
        return lambda value: float(names.index(str(value)))
    spread = min(numbers) > 0 and max(numbers) / min(numbers) > SPREAD
    if (spread if logarithmic is None else logarithmic) and min(numbers) > 0:
        axes.set_xscale("log")
    return float


def _wrapped(name: str, width: int = LINE) -> list[str]:
    return textwrap.wrap(name, width, break_on_hyphens=False) or [name]


def _room(values: Sequence[Any]) -> float:
    """Height in inches below an axis for names that do not fit side by side; 0 if they fit."""
    names = {value for value in values if isinstance(value, str)}
    return 0.08 * min(SIDE, max(map(len, names))) if sum(map(len, names)) > SIDE else 0.0


def _png(figure: "Figure", dpi: int) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=dpi)
    return data.getvalue()


MAX_ROWS = 512  # maximum number of rows in the heat map; beyond it, neighbours in the order of load are averaged
OCTAVES = 2.0  # range of the colours: from a quarter of the mean load to four times the mean


class LoadHistory(NamedTuple):
    """Token counts of a run's record."""

    steps: np.ndarray  # logged steps, [steps]
    counts: dict[str, np.ndarray]  # tokens by layer, [steps, experts]


def draw_expert_load(run_folder: Path) -> Path | None:
    """Plot the load to `experts.png` in the run folder; returns the path, or None without a record of load."""
    history = read_load(run_folder)
    return None if history is None else save_figure(_figure(run_folder, history), run_folder / "experts.png")


def expert_load_png(run_folder: Path) -> bytes | None:
    """Same plot as bytes of a PNG file, for a page."""
    history = read_load(run_folder)
    return None if history is None else _png(_figure(run_folder, history), 80)


def read_load(run_folder: Path) -> LoadHistory | None:
    """Token counts of a run and its ancestors, for the layers of the run itself; None if there are none."""
    rows = [row for row in read_history(run_folder, RunFolder(run_folder).expert_load.name) if layer_counts(row)]
    if not rows:
        return None
    sizes = {layer: len(counts) for layer, counts in layer_counts(rows[-1]).items()}
    alike = [row for row in rows if {layer: len(counts) for layer, counts in layer_counts(row).items()} == sizes]
    steps = np.array([row["step"] for row in alike], dtype=float)
    return LoadHistory(steps, {layer: np.array([row[layer] for row in alike], dtype=float) for layer in sizes})


def heat_map(history: LoadHistory) -> tuple[np.ndarray, list[int]]:
    """Load over the mean, [rows, steps], and the row at which each layer ends. In each layer, experts are ordered by
    their load over the whole run, busiest first."""
    most = max(4, MAX_ROWS // len(history.counts))
    layers = []
    for counts in history.counts.values():
        load = counts / np.maximum(counts.mean(1, keepdims=True), 1e-9)
        load = load[:, np.argsort(-load.mean(0), kind="stable")]
        groups = np.array_split(np.arange(load.shape[1]), min(load.shape[1], most))
        layers.append(np.stack([load[:, group].mean(1) for group in groups]))
    return np.concatenate(layers), np.cumsum([len(layer) for layer in layers]).tolist()


def _figure(run_folder: Path, history: LoadHistory) -> "Figure":
    figure = _new_figure(9, 8, 150)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 3))
    _draw_imbalance(top, history)
    _draw_heat_map(figure, below, history)
    last = {layer: load_statistics(counts[-1].astype(int).tolist()) for layer, counts in history.counts.items()}
    worst = max(last, key=lambda layer: last[layer].load_max)
    experts = sorted({counts.shape[1] for counts in history.counts.values()})
    facts = [
        f"{format_items(len(last), 'layer')} of {' or '.join(map(str, experts))} experts",
        f"at step {history.steps[-1]:.0f}: busiest {last[worst].load_max:.2f} × mean ({worst.replace('_', ' ')})",
        f"entropy {sum(load.entropy for load in last.values()) / len(last):.3f}",
        f"{sum(load.dead for load in last.values())} dead (black)",
    ]
    _add_name(figure, run_folder, facts, 0.95)
    return figure


def _draw_imbalance(axes: "Axes", history: LoadHistory) -> None:
    """Draw the busiest expert's load over the mean: for the worst layer, and the median over layers."""
    layers = [counts.max(1) * counts.shape[1] / np.maximum(counts.sum(1), 1e-9) for counts in history.counts.values()]
    few = {"marker": "o", "markersize": 3} if len(history.steps) < 20 else {}
    axes.plot(history.steps, np.max(layers, 0), color=TRAIN, linewidth=1.4, label="worst layer", **few)
    axes.plot(history.steps, np.median(layers, 0), color=QUIET, linewidth=1.2, label="median layer", **few)
    axes.axhline(1, color=INK, linewidth=0.6)
    axes.set_ylabel("busiest expert ÷ mean", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper right", fontsize=9)
    style_axes(axes)


def _draw_heat_map(figure: "Figure", axes: "Axes", history: LoadHistory) -> None:
    from matplotlib import colormaps

    loads, ends = heat_map(history)
    # An expert without a token has no logarithm: black.
    with np.errstate(divide="ignore"):
        colours = np.ma.masked_invalid(np.log2(loads))
    colormap = colormaps["RdBu_r"].with_extremes(bad="black")
    steps = history.steps
    gaps = np.diff(steps) if len(steps) > 1 else np.ones(1)
    middle = (steps[1:] + steps[:-1]) / 2
    borders = np.concatenate(([steps[0] - gaps[0] / 2], middle, [steps[-1] + gaps[-1] / 2]))
    look = {"cmap": colormap, "vmin": -OCTAVES, "vmax": OCTAVES, "rasterized": True}
    mesh = axes.pcolormesh(borders, np.arange(len(loads) + 1), colours, **look)
    axes.invert_yaxis()
    for end in ends[:-1]:
        axes.axhline(end, color=INK, linewidth=1.2 if len(ends) < 40 else 0.4)
    begins, names = [0, *ends[:-1]], [layer.removeprefix("layer_") for layer in history.counts]
    shown = range(0, len(names), -(-len(names) // 32))
    axes.set_yticks([(begins[place] + ends[place]) / 2 for place in shown], [names[place] for place in shown])
    axes.tick_params(labelsize=9, color=QUIET)
    axes.set_ylabel("experts by layer, busiest first")
    axes.set_xlabel("step")
    bar = figure.colorbar(mesh, ax=axes, location="bottom", shrink=0.5, aspect=40, extend="both")
    bar.set_ticks([-2, -1, 0, 1, 2], labels=["¼", "½", "mean load", "2", "4"])
    bar.ax.tick_params(labelsize=9)


def draw_run(run_folder: Path) -> Iterator[str]:
    """Draw the loss curve and the load of experts; yields a line for each. Raises UserError if no step is logged."""
    yield f"loss curve: {draw(run_folder)}"
    if (path := draw_expert_load(run_folder)) is not None:
        yield f"load of experts: {path}"
