"""Parser of `search:`, `halving:` and `tune:` of a study file."""

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, get_args

from titan_exp.config.errors.did_you_mean import did_you_mean, listed
from titan_exp.config.study.search import METHODS, RANGE_KINDS, Halving, Range, Search
from titan_exp.config.study.study import Direction

Report = Callable[[str, Any, str, str], None]
"""Adds a mistake: field, value, reason, remedy."""

SEARCH_KEYS = ("method", "points", "seed", "ranges", "batch", "metric")
HALVING_KEYS = ("metric", "rungs", "keep")
MOST_POINTS = 10_000
"""Largest number of points of a search; a larger one is a typo."""
RANGES = "ranges:\n        optimizer.lr: {log_uniform: [1e-4, 1e-1]}"
RUNGS = "rungs: [100, 300, 900], or fractions of training.steps: [1/9, 1/3, 1]"


def read_search(content: Any, metrics: Mapping[str, Direction], text: Callable[[Any], str], report: Report) -> Search:
    """Read `search:`; `text` formats a value as an override's. Mistakes are reported, and the result is then of no
    use."""
    block = _block(
        "search", content, SEARCH_KEYS, f"search:\n      method: sobol\n      points: 16\n      {RANGES}", report
    )
    method = block.get("method")
    if method not in METHODS:
        offer = did_you_mean(str(method), METHODS) or f"method: {METHODS[1]}"
        report("search.method", method or "", f"a search is one of {listed(METHODS)}", offer)
    points = _whole("search.points", block.get("points"), 1, MOST_POINTS, report)
    seed = _whole("search.seed", block.get("seed", 0), 0, 2**31, report)
    found = block.get("ranges")
    if not isinstance(found, dict) or not found:
        report("search.ranges", "" if found is None else found, "must be keys with a range each", RANGES)
        found = {}
    ranges = tuple(_range(str(key), value, text, report) for key, value in found.items())
    batch, metric, better = 0, "", "min"
    if method == "optuna":
        batch = _whole("search.batch", block.get("batch", min(8, points)), 1, MOST_POINTS, report)
        metric, better = _metric("search", block.get("metric"), metrics, report)
    else:
        for key in ("batch", "metric"):
            if key in block:
                reason = f"{method} draws all points at once, whatever their results"
                report(f"search.{key}", block[key], reason, "leave it out, or method: optuna")
    return Search(method or "random", points, seed, ranges, batch, metric, better)  # type: ignore[arg-type]


def read_halving(content: Any, metrics: Mapping[str, Direction], report: Report) -> Halving:
    """Read `halving:`; mistakes are reported."""
    example = "halving: {metric: validation_loss, rungs: [100, 300, 900], keep: 1/3}"
    block = _block("halving", content, HALVING_KEYS, example, report)
    metric, better = _metric("halving", block.get("metric"), metrics, report)
    found = block.get("rungs")
    rungs = [_fraction(rung) for rung in found] if isinstance(found, list) else []
    known = [rung for rung in rungs if rung is not None]
    if len(known) != len(rungs) or len(known) < 2 or known[0] <= 0:
        report("halving.rungs", found or "", "must be two or more steps above 0, in their order", RUNGS)
    elif any(later <= earlier for earlier, later in pairwise(known)):
        report("halving.rungs", found, "rungs are not increasing", f"rungs: {_texts(sorted(set(known)))}")
    elif known[-1] != 1 and any(rung.denominator != 1 for rung in known):
        report("halving.rungs", found, "fractions of training.steps end at 1, and steps are whole", RUNGS)
    keep = _fraction(block.get("keep", "1/3"))
    if keep is None or not 0 < keep < 1:
        report("halving.keep", block.get("keep"), "must be a fraction between 0 and 1", "keep: 1/3")
        keep = Fraction(1, 3)
    return Halving(metric, better, tuple(known), keep)


def direction_of(metric: str, metrics: Mapping[str, Direction]) -> Direction | None:
    """Better direction of a metric: the study's, or `min` for a loss; None if neither says."""
    return metrics.get(metric) or ("min" if "loss" in metric or "perplexity" in metric else None)


def _metric(field: str, value: Any, metrics: Mapping[str, Direction], report: Report) -> tuple[str, Direction]:
    name = value if value is not None else next(iter(metrics), "validation_loss")
    better = direction_of(str(name), metrics)
    if not isinstance(name, str) or better is None:
        ways = listed(get_args(Direction), "or")
        report(
            f"{field}.metric", name, f"neither direction is known to be better ({ways})", f"metrics: {{{name}: max}}"
        )
    return str(name), better or "min"


def _block(field: str, value: Any, keys: Sequence[str], example: str, report: Report) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not value:
        report(field, value or "", f"must have {listed(keys, 'and')}", example)
        return {}
    for key in value:
        if key not in keys:
            report(f"{field}.{key}", "", "unknown key", did_you_mean(str(key), keys) or f"it has {listed(keys, 'and')}")
    return value


def _range(key: str, value: Any, text: Callable[[Any], str], report: Report) -> Range:
    field, example = f"search.ranges.{key}", f"{key}: {{log_uniform: [1e-4, 1e-1]}}"
    kind = next(iter(value), None) if isinstance(value, dict) and len(value) == 1 else None
    if kind not in RANGE_KINDS:
        offer = did_you_mean(str(kind), RANGE_KINDS) if kind else ""
        report(field, "" if kind else value, f"a range is one of {listed(RANGE_KINDS)}", offer or example)
        return Range(key, "choice", choices=("",))
    values = value[kind]
    if kind == "choice":
        if not isinstance(values, list) or len(values) < 2:
            report(f"{field}.choice", values, "must be a list of two values or more", f"{key}: {{choice: [a, b]}}")
            values = [""]
        return Range(key, kind, choices=tuple(map(text, values)))
    numbers = [_number(bound) for bound in values] if isinstance(values, list) else []
    low, high = numbers if len(numbers) == 2 else (None, None)
    if low is None or high is None or low >= high:
        report(f"{field}.{kind}", values, "must be a lower and a higher number", example)
    elif kind == "log_uniform" and low <= 0:
        report(f"{field}.{kind}", values, "a logarithm has no value at 0 or below", "a lower bound above 0, or uniform")
    elif kind == "integer" and not (low.is_integer() and high.is_integer()):
        report(f"{field}.{kind}", values, "must be whole numbers", f"{key}: {{integer: [2, 8]}}")
    return Range(key, kind, low or 1.0, high or 2.0) if kind == "log_uniform" else Range(key, kind, low or 0, high or 1)


def _whole(field: str, value: Any, least: int, most: int, report: Report) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    name = field.rpartition(".")[2]
    report(
        field,
        "" if value is None else value,
        f"must be a whole number from {least} to {most}",
        f"{name}: {max(16 * least, least)}",
    )
    return least


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and not isinstance(value, bool) else None


def _fraction(value: Any) -> Fraction | None:
    try:
        return None if isinstance(value, bool) else Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        return None


def _texts(rungs: Sequence[Fraction]) -> str:
    return f"[{', '.join(map(str, rungs))}]"
