"""Plots of studies: loss against the tuned key by group, and the metric against each parameter of a search."""

import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from titan_exp.compare.comparison import Comparison
from titan_exp.compare.learnt import Learnt, Parameter
from titan_exp.compare.output.plot import ALARM, QUIET, TRAIN, style_axes
from titan_exp.compare.tuning import Tuning

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#2b6cb0", "#dd6b20", "#2f855a", "#9f3a9f", "#b7791f", "#2c7a7b", "#718096", "#c53030", "#553c9a", "#1a202c")
SPREAD = 5.0
"""Ratio of the largest to the smallest value above which an axis is logarithmic."""


def study_plots(comparison: Comparison) -> list[tuple[str, bytes]]:
    """Title and PNG of each plot."""
    found = []
    if (tuning := comparison.tuning) is not None and any(len(group.points) > 1 for group in tuning.groups):
        title = f"{tuning.metric} against {tuning.short}"
        found.append((title, _png(lambda figure: draw_tuning(figure.subplots(), comparison, tuning), 8, 5)))
    if (learnt := comparison.learnt) is not None and learnt.parameters:
        count = len(learnt.parameters)
        title = f"{learnt.metric.replace('_', ' ')} against each parameter"
        found.append((title, _png(lambda figure: draw_parameters(figure, learnt), max(8, 4 * min(3, count)), 3.6)))
    return found


def draw_tuning(axes: "Axes", comparison: Comparison, tuning: Tuning) -> None:
    """Draw a curve for each group, with intervals over seeds and its best value as a filled dot."""
    values = [point.value for group in tuning.groups for point in group.points]
    place = _scale(axes, values)
    for number, group in enumerate(tuning.groups):
        color = COLORS[number % len(COLORS)]
        known = [(place(point.value), point, point.estimate) for point in group.points if point.estimate is not None]
        means = [found.mean for *_, found in known]
        axes.plot([x for x, *_ in known], means, color=color, linewidth=1.6, label=group.label)
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
    axes.legend(frameon=False, fontsize=9)
    style_axes(axes)


def draw_parameters(figure: "Figure", learnt: Learnt) -> None:
    """Draw every point against each parameter; the best point is filled, diverged ones are marks at the top."""
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
    """Set the x axis, and return the place of a value: numbers as they are, other values side by side."""
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(values):
        names = list(dict.fromkeys(map(str, values)))
        axes.set_xticks(range(len(names)), names)
        return lambda value: float(names.index(str(value)))
    spread = min(numbers) > 0 and max(numbers) / min(numbers) > SPREAD
    if (spread if logarithmic is None else logarithmic) and min(numbers) > 0:
        axes.set_xscale("log")
    return float


def _png(draw: "Callable[[Figure], None]", width: float, height: float) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()
