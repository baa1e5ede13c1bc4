"""Plot of expert load over layers and steps: the imbalance of the layers, and a heat map of every expert's load."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from titan_exp.compare.output.plot import INK, QUIET, TRAIN, save_figure, style_axes
from titan_exp.tracking.expert_load import layer_counts, load_statistics
from titan_exp.tracking.number_format import format_items
from titan_exp.tracking.run_folder.lineage import read_history
from titan_exp.tracking.run_folder.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_ROWS = 512
"""Rows of the heat map; above, neighbours in the order of load are averaged."""

OCTAVES = 2.0
"""Range of the colours: from a quarter of the mean load to four times of it."""


class LoadHistory(NamedTuple):
    """Token counts of a run's record."""

    steps: np.ndarray
    """Steps [steps]."""
    counts: dict[str, np.ndarray]
    """Tokens by layer, [steps, experts]."""


def draw_expert_load(run_folder: Path) -> Path | None:
    """Plot the load to `experts.png` in the run folder; returns the path, or None without a record of load."""
    history = read_load(run_folder)
    return None if history is None else save_figure(_figure(run_folder, history), run_folder / "experts.png")


def expert_load_png(run_folder: Path) -> bytes | None:
    """The same plot as the bytes of a PNG file, for a page."""
    history = read_load(run_folder)
    if history is None:
        return None
    data = io.BytesIO()
    _figure(run_folder, history).savefig(data, format="png", dpi=80)
    return data.getvalue()


def read_load(run_folder: Path) -> LoadHistory | None:
    """Token counts of a run and of those it was continued from, on the layers of the last; None without any."""
    rows = [row for row in read_history(run_folder, RunFolder(run_folder).expert_load.name) if layer_counts(row)]
    if not rows:
        return None
    sizes = {layer: len(counts) for layer, counts in layer_counts(rows[-1]).items()}
    alike = [row for row in rows if {layer: len(counts) for layer, counts in layer_counts(row).items()} == sizes]
    steps = np.array([row["step"] for row in alike], dtype=float)
    return LoadHistory(steps, {layer: np.array([row[layer] for row in alike], dtype=float) for layer in sizes})


def heat_map(history: LoadHistory) -> tuple[np.ndarray, list[int]]:
    """Load over the mean, [rows, steps], and the row at which each layer ends.

    In each layer experts are ordered by their load over the whole run, the busiest first.
    """
    most = max(4, MAX_ROWS // len(history.counts))
    layers = []
    for counts in history.counts.values():
        load = counts / np.maximum(counts.mean(1, keepdims=True), 1e-9)
        load = load[:, np.argsort(-load.mean(0), kind="stable")]
        groups = np.array_split(np.arange(load.shape[1]), min(load.shape[1], most))
        layers.append(np.stack([load[:, group].mean(1) for group in groups]))
    return np.concatenate(layers), np.cumsum([len(layer) for layer in layers]).tolist()


def _figure(run_folder: Path, history: LoadHistory) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 3))
    _draw_imbalance(top, history)
    _draw_heat_map(figure, below, history)
    folder = run_folder.resolve()
    figure.suptitle(f"{folder.parent.name} / {folder.name}\n", fontsize=13, fontweight="bold", color=INK)
    figure.text(0.5, 0.95, "   ·   ".join(_facts(history)), ha="center", fontsize=10, color=QUIET)
    return figure


def _draw_imbalance(axes: "Axes", history: LoadHistory) -> None:
    """Busiest expert over the mean: of the worst layer, and the median over layers."""
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
    edges = _edges(history.steps)
    mesh = axes.pcolormesh(
        edges, np.arange(len(loads) + 1), colours, cmap=colormap, vmin=-OCTAVES, vmax=OCTAVES, rasterized=True
    )
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


def _edges(steps: np.ndarray) -> np.ndarray:
    """Borders of the columns, half-way between steps."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middle = (steps[1:] + steps[:-1]) / 2
    return np.concatenate(([2 * steps[0] - middle[0]], middle, [2 * steps[-1] - middle[-1]]))


def _facts(history: LoadHistory) -> Sequence[str]:
    last = {layer: load_statistics(counts[-1].astype(int).tolist()) for layer, counts in history.counts.items()}
    worst = max(last, key=lambda layer: last[layer].load_max)
    experts = sorted({counts.shape[1] for counts in history.counts.values()})
    return [
        f"{format_items(len(last), 'layer')} of {' or '.join(map(str, experts))} experts",
        f"at step {history.steps[-1]:.0f}: busiest {last[worst].load_max:.2f} × mean ({worst.replace('_', ' ')})",
        f"entropy {sum(load.entropy for load in last.values()) / len(last):.3f}",
        f"{sum(load.dead for load in last.values())} dead (black)",
    ]
