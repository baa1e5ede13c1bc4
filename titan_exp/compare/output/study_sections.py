"""Sections that outputs share: Pareto frontiers, scaling over devices, tuned groups, ladders and adaptive studies."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from titan_exp.compare import compared_metrics
from titan_exp.compare.comparison import Comparison
from titan_exp.compare.findings import interval, signed, verdict, with_interval
from titan_exp.compare.study_outcome import Cost, LadderOutcome, Learnt, times
from titan_exp.compare.tuning import Group, Reached, Tuning
from titan_exp.config.schema.identity_keys import LAYOUT, flatten, is_among
from titan_exp.tracking.display import format_count, format_duration, format_items

ROUNDING = 1e-4  # relative loss difference that counts as equal, since layouts round differently


@dataclass(frozen=True)
class ParetoPoint:
    """Row of the comparison, by index."""

    row: int
    gpu_hours: float  # mean over seeds; for continued runs, including their parents'
    loss: float  # mean over seeds of the loss metric; lower is better
    is_on_front: bool  # true unless another row is cheaper at no higher loss, or better at no higher cost


def cost_metric(comparison: Comparison) -> compared_metrics.Metric:
    """GPU-hours, including those of parents if a run was continued."""
    continued = any(run.begins for run in comparison.runs)
    return compared_metrics.METRIC_BY_NAME[compared_metrics.WITH_PARENTS if continued else "gpu_hours"]


def loss_metric(comparison: Comparison) -> compared_metrics.Metric | None:
    """First compared metric that is a loss; None if there is none."""
    return next((metric for metric in comparison.metrics if metric.is_loss and metric.better == "min"), None)


def pareto(comparison: Comparison) -> list[ParetoPoint]:
    """Rows with a known loss and cost, cheapest first. Noise between seeds is not considered."""
    metric, metric_hours, budget = loss_metric(comparison), cost_metric(comparison), comparison.budget
    known = list[tuple[float, float, int]]()
    for index, row in enumerate(comparison.rows):
        hours = [metric_hours.read(run, budget.tokens) for run in row.runs if budget.reached(run)]
        costs = [number for number in hours if number is not None]
        loss = row.estimates[metric.name] if metric else None
        if costs and loss is not None:
            known.append((sum(costs) / len(costs), loss.mean, index))
    found = []
    for cost, loss, index in sorted(known, key=lambda point: point[0]):
        margin = ROUNDING * abs(loss)
        no_worse = [other for other in known if other[0] <= cost and other[1] <= loss + margin]
        dominated = any(other[0] < cost or other[1] < loss - margin for other in no_worse)
        found.append(ParetoPoint(index, cost, loss, not dominated))
    return found


GLOBAL_BATCH = "training.global_batch_size"
SPEED = compared_metrics.METRIC_BY_NAME["tokens_per_second"]


@dataclass(frozen=True)
class ScalingPoint:
    """Row of the comparison in a scaling series, by index."""

    label: str  # short names and values of the layout keys
    row: int
    world_size: int
    tokens_per_second: float  # throughput of the whole job: mean over seeds of the median over steps
    speedup: float  # throughput relative to the fastest row at the smallest world size
    efficiency: float  # speedup over the ratio of world sizes; 1 is ideal


@dataclass(frozen=True)
class ScalingSeries:
    """Rows of the same experiment in different layouts."""

    kind: Literal["strong", "weak"]  # global batch that is fixed, or that grows with the world size
    fixed: str  # values that distinguish this series; empty if it is the only one
    points: tuple[ScalingPoint, ...]  # points sorted by world size, the fastest first


def scaling(comparison: Comparison) -> list[ScalingSeries]:
    """Scaling series: rows that differ only in layout, or also in the global batch, with at least two world sizes."""
    groups: dict[str, list[tuple[int, float, int]]] = defaultdict(list)
    budget = comparison.budget.tokens
    for index, row in enumerate(comparison.rows):
        speeds = [speed for run in row.runs if (speed := SPEED.read(run, budget))]
        if not speeds or all(compared_metrics.has_failed(run, budget) for run in row.runs):
            continue
        if size := row.runs[0].world_size:
            outside = {key for key in row.values if key != GLOBAL_BATCH and not is_among(key, LAYOUT)}
            others = repr(sorted((key, row.values[key]) for key in outside))
            groups[others].append((size, sum(speeds) / len(speeds), index))
    return [
        _series(comparison, points, alone=len(groups) == 1)
        for points in groups.values()
        if len({size for size, _, _ in points}) > 1
    ]


def _series(comparison: Comparison, measured: list[tuple[int, float, int]], *, alone: bool) -> ScalingSeries:
    configs = {index: comparison.rows[index].runs[0].config for _, _, index in measured}
    columns, outer = compared_metrics.differing_keys(list(configs.values())), comparison.differing_keys
    first = comparison.rows[measured[0][2]].values
    measured = sorted(measured, key=lambda point: (point[0], -point[1]))
    smallest, reference, _ = measured[0]
    points = [
        ScalingPoint(
            columns.label(flatten(configs[index])),
            index,
            size,
            speed,
            speed / reference,
            speed / reference * smallest / size,
        )
        for size, speed, index in measured
    ]
    batches = {flatten(config).get(GLOBAL_BATCH) for config in configs.values()}
    fixed = "" if alone else outer.label(first, [key for key in outer.keys if key not in columns.keys])
    return ScalingSeries("strong" if len(batches) == 1 else "weak", fixed, tuple(points))


BEST = 8  # number of points of an adaptive study that are listed
NONE = "—"


@dataclass(frozen=True)
class Section:
    """Table with notes."""

    title: str
    heads: tuple[str, ...]
    left: int  # number of left-aligned columns
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    values: Sequence[Mapping[str, Any]] = ()  # plain numbers of each row for CSV and JSON, by one set of names


def sections(comparison: Comparison) -> list[Section]:
    """Sections of a comparison: of tuned runs, of an adaptive study or a ladder, and those of extensions."""
    found = []
    if (tuning := comparison.tuning) is not None:
        heads = ("", f"best {tuning.short}", f"{tuning.short} tried", "n", comparison.main.title)
        heads += ("against the baseline", "steps to its loss", "time to its loss")
        rows = tuple(_group_row(comparison.main, tuning, group) for group in tuning.groups)
        notes = tuple(_tuning_notes(comparison, tuning, rows))
        found.append(Section(f"Each at its best {tuning.short}", heads, 1, rows, notes))
    if comparison.learnt is not None:
        found += [_ranking(comparison.learnt), _marginals(comparison.learnt)]
    if comparison.ladder is not None:
        found.append(_ladder(comparison.ladder))
    found += comparison.added_sections
    return [section for section in found if section.rows]


def _ladder(ladder: LadderOutcome) -> Section:
    with_arms, title = len(ladder.arms) > 1, _title(ladder.metric)
    heads = ("size", "length", "parameters N", "tokens D", "FLOPs C")
    heads += tuple(f"{title}, {arm}" if arm else title for arm in ladder.arms)
    heads += ("n", *["compute multiplier"] * with_arms)
    rows = []
    for row in ladder.rows:
        seeds = [list(row.losses[arm].values()) for arm in ladder.arms]
        cells = [f"{fmean(losses):.4f}" if losses else NONE for losses in seeds]
        multiplier = NONE if row.multiplier is None else times(row.multiplier)
        flops = next(iter(row.flops.values()))
        sizes = [row.scale.partition("=")[2], f"{row.per_parameter}N", f"{row.parameters:,}", f"{row.tokens:,}"]
        counts = " and ".join(dict.fromkeys(str(len(losses)) for losses in seeds))
        rows.append((*sizes, f"{flops:.3g}", *cells, counts, *[multiplier] * with_arms))
    return Section("Ladder of sizes, by final losses", heads, 2, tuple(rows), tuple(ladder.sentences))


def _group_row(metric: compared_metrics.Metric, tuning: Tuning, group: Group) -> tuple[str, ...]:
    best, delta = group.best, group.delta
    found = None if best is None else best.estimate
    change = "baseline" if group.is_baseline else NONE
    if delta is not None:
        change = f"{signed(metric, delta.difference)}{interval(metric, delta)} {verdict(metric, delta)}"
    return (
        group.label,
        NONE if best is None else compared_metrics.value_text(best.value) + (f" ({group.edge})" if group.edge else ""),
        ", ".join(compared_metrics.value_text(point.value) for point in group.points),
        str(0 if found is None else found.n),
        with_interval(metric, found),
        change,
        _reached(group.steps, lambda steps: f"{steps:,.0f}"),
        _reached(group.seconds, format_duration),
    )


def _reached(found: Reached, text: Callable[[float], str]) -> str:
    estimate = found.estimate
    if estimate is None:
        return "not reached"
    some = "" if found.reached == found.of else f", {found.reached} of {found.of} seeds"
    if estimate.low is None or estimate.high is None:
        return f"{text(estimate.mean)}{some}"
    return f"{text(estimate.mean)} [{text(estimate.low)}, {text(estimate.high)}]{some}"


def _tuning_notes(comparison: Comparison, tuning: Tuning, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    base = next(group for group in tuning.groups if group.is_baseline)
    seeds = sorted({len(comparison.rows[point.row].runs) for group in tuning.groups for point in group.points})
    count = format_items(seeds[-1], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    yield (
        f"The best {tuning.short} of a group has the best mean of {comparison.main.title} over its seeds ({count} for "
        f"each value); one that diverged with any seed is left out."
    )
    if seeds[-1] == 1:
        yield "With one seed the best of several values is partly luck, and the group with most values gains by it."
    for group in tuning.groups:
        if group.edge in ("lowest", "highest"):
            more = "lower" if group.edge == "lowest" else "higher"
            yield f"{group.label}: the best {tuning.short} is the {group.edge} that was tried; try {more} ones."
        for point in group.points:
            if point.diverged:
                runs = format_items(len(comparison.rows[point.row].runs), "run")
                value = compared_metrics.value_text(point.value)
                yield f"{group.label} at {tuning.short}={value}: {point.diverged} of {runs} diverged."
    if untuned := [group.label for group in tuning.groups if group.edge == "one value"]:
        yield f"One value of {tuning.short}, so that it is not tuned: {'; '.join(untuned)}."
    brackets = ""
    if any("[" in cell for row in rows for cell in row):
        brackets = " Brackets are 95 % intervals over seeds; those of steps and time end with the longest run."
    yield (
        f"Steps and time to the training loss that {base.label} at its best ends with, seed by seed; time is that of "
        f"training alone, at the run's mean speed.{brackets}"
    )


def _ranking(learnt: Learnt) -> Section:
    heads = ("point", *(["rung"] if learnt.rungs else []), _title(learnt.metric), "n")
    rows = []
    for trial in learnt.trials[:BEST]:
        rung = [f"{trial.round} of {learnt.rungs}"] if learnt.rungs else []
        rows.append((trial.label, *rung, _number(trial.value), str(trial.seeds)))
    cost, notes = learnt.cost, []
    if len(learnt.trials) > BEST:
        notes.append(f"The best {BEST} of {len(learnt.trials)} points.")
    if cost.tokens:
        notes.append(_cost_text(cost))
    return Section("Best points", heads, 1, tuple(rows), tuple(notes))


def _cost_text(cost: Cost) -> str:
    hours, whole_hours = cost.gpu_hours, cost.whole_gpu_hours
    text = f"Cost: {format_count(cost.tokens)} tokens" + ("" if hours is None else f", {hours:.3g} GPU-hours")
    if cost.tokens < cost.whole_tokens:
        about = "" if whole_hours is None else f", about {whole_hours:.3g} GPU-hours"
        share = f"{cost.tokens / cost.whole_tokens:.0%}"
        text += f", {share} of every point to its end ({format_count(cost.whole_tokens)} tokens{about})"
    return f"{text}. On CPU a process counts as a GPU."


def _marginals(learnt: Learnt) -> Section:
    where = " at the first rung" if learnt.rungs else ""
    heads = ("parameter", "values", f"mean {_title(learnt.metric)}", "best", "points")
    rows = []
    for parameter in learnt.parameters:
        for place, marginal in enumerate(parameter.marginals):
            numbers = (_number(marginal.mean), _number(marginal.best))
            points = f"{marginal.points}{f' ({marginal.diverged} diverged)' if marginal.diverged else ''}"
            rows.append((parameter.short if place == 0 else "", marginal.part, *numbers, points))
    notes = [
        f"The best point has {parameter.short}={parameter.best}, at the {parameter.edge} edge of its range: widen it."
        for parameter in learnt.parameters
        if parameter.edge
    ]
    if rows:
        notes.append("A mean is over all points in a part of the range, whatever their other parameters.")
    return Section(f"{_title(learnt.metric).capitalize()} by parameter{where}", heads, 2, tuple(rows), tuple(notes))


def _number(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.4f}" if math.isfinite(value) else "diverged"


def _title(metric: str) -> str:
    known = compared_metrics.METRIC_BY_NAME.get(metric)
    return metric.replace("_", " ") if known is None else known.title


def escape_markdown(text: str) -> str:
    """Text with the marks of Markdown as themselves, on one line."""
    for character in "\\|*_`":
        text = text.replace(character, "\\" + character)
    return text.replace("<", "&lt;").replace("\n", " ")


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Lines of a table whose first `left` columns are left-aligned."""
    lines = ["| " + " | ".join(map(escape_markdown, row)) + " |" for row in (heads, *rows)]
    rule = ["---"] * left + ["--:"] * (len(heads) - left)
    return [lines[0], "|" + "|".join(rule) + "|", *lines[1:]]


def markdown(found: Sequence[Section]) -> list[str]:
    """Sections as lines of Markdown."""
    lines = []
    for section in found:
        rows = markdown_table(section.heads, section.rows, section.left)
        notes = [f"- {escape_markdown(note)}" for note in section.notes]
        lines += [f"### {section.title}", "", *rows, "", *notes, ""]
    return lines
