"""What a comparison says in sentences, the same in every output."""

import math
from collections.abc import Iterator, Sequence

from titan_exp.compare.compared_metrics import Metric
from titan_exp.compare.comparison import Comparison, Row
from titan_exp.compare.layout_check import STEPS, LayoutCheck
from titan_exp.compare.stats.format_numbers import percent, signed
from titan_exp.compare.stats.ttest import LEVEL, Delta
from titan_exp.config.errors.did_you_mean import listed

Verdict = str
"""`better`, `worse`, `different` (no direction is better), `not distinguishable`, `only uncorrected`, `no interval`."""


def heading(comparison: Comparison) -> str:
    """How many rows and runs, and where they are compared."""
    rows, runs = len(comparison.rows), len(comparison.runs)
    counts = f"{_count(rows, 'row')}, {_count(runs, 'run')}"
    return f"{counts} · {token_budget_text(comparison)}"


def token_budget_text(comparison: Comparison) -> str:
    """At how many tokens metrics are taken, and why there."""
    point = comparison.point
    if point.tokens == 0 or math.isinf(point.tokens):
        return point.why
    return f"at {point.tokens:,.0f} tokens, {point.why}"


def verdict(metric: Metric, delta: Delta | None) -> Verdict:
    """What may be said of a difference, all comparisons of its metric counted; empty where there is none."""
    if delta is None:
        return ""
    if delta.is_distinguishable is None:
        return "no interval"
    if not delta.is_distinguishable:
        return "not distinguishable" if delta.holds_zero else "only uncorrected"
    if metric.better is None:
        return "different"
    return "better" if (delta.difference < 0) == (metric.better == "min") else "worse"


def findings(comparison: Comparison) -> list[str]:
    """A sentence for each row against the baseline, in the metric that matters most."""
    metric = comparison.main
    baseline = comparison.rows[comparison.baseline].estimates[metric.name]
    mean = baseline.mean if baseline else None
    return [
        _finding(metric, row, delta, mean)
        for row in comparison.rows
        if (delta := row.deltas.get(metric.name)) is not None
    ]


def remarks(comparison: Comparison, checks: Sequence[LayoutCheck]) -> list[str]:
    """What a reader must know beside the table: seeds, corrections, runs that failed, layouts, differing code."""
    return [
        *_about_statistics(comparison),
        *_about_states(comparison),
        *_about_layouts(checks),
        *_about_surroundings(comparison),
        *comparison.notes,
    ]


def state_text(row: Row) -> str:
    """`done`, or how many are in each state."""
    states = row.states
    if len(states) == 1:
        return next(iter(states))
    return ", ".join(f"{count} {state}" for state, count in states.items())


def stands_for(comparison: Comparison) -> list[str]:
    """A sentence for each column that stands for several keys."""
    return [
        f"{comparison.differing_keys.short[column]} stands for {listed(keys, 'and')}."
        for column, keys in comparison.differing_keys.stands_for.items()
    ]


def _finding(metric: Metric, row: Row, delta: Delta, baseline: float | None) -> str:
    told = verdict(metric, delta)
    size = f"{signed(metric, delta.difference)}{_unit(metric)}"
    if baseline and not metric.is_loss:
        size = f"{percent(1 + delta.difference / baseline)}, {size}"
    if delta.low is not None and delta.high is not None:
        size += f" [{signed(metric, delta.low)}, {signed(metric, delta.high)}]"
    how = {
        "paired": f"{delta.n} seeds, paired",
        "unpaired": f"at least {delta.n} seeds each, not paired",
        "single": "one seed",
    }[delta.pairing]
    said = {
        "better": "better than the baseline",
        "worse": "worse than the baseline",
        "different": "differs from the baseline",
        "not distinguishable": "not distinguishable from the baseline",
        "only uncorrected": "not distinguishable once all comparisons are counted",
        "no interval": "no interval is known",
    }[told]
    return f"{row.label}: {metric.title} {size}, {said} ({how})."


def _about_statistics(comparison: Comparison) -> Iterator[str]:
    deltas = [row.deltas.get(comparison.main.name) for row in comparison.rows]
    known = [delta for delta in deltas if delta is not None]
    with_interval = [delta for delta in known if delta.low is not None]
    if not known:
        return
    if with_interval:
        ways = {delta.pairing for delta in with_interval}
        how = (
            "differences between equal seeds (paired)"
            if ways == {"paired"}
            else (
                "differences of means (Welch; no seeds are common)"
                if ways == {"unpaired"}
                else "differences between equal seeds where two or more are common, else of means (Welch)"
            )
        )
        yield f"Intervals are {100 * LEVEL:.0f} % by Student's t, over {how}."
    if len(with_interval) > 1:
        yield (
            f"Verdicts count all {len(with_interval)} comparisons of a metric (Holm's correction); the intervals, "
            "each by itself, do not."
        )
    if len(with_interval) < len(known):
        rows = "one seed" if not with_interval else "one common seed in some rows"
        yield f"{rows.capitalize()}: no interval is known there, and a difference may be chance."


def _about_states(comparison: Comparison) -> Iterator[str]:
    behind = 0
    for run in comparison.runs:
        if run.state in ("failed", "lost", "preempted"):
            reason = f": {run.reason.strip().splitlines()[-1]}" if run.reason and run.reason.strip() else ""
            yield f"{run.run_id} ({_of(comparison, run.run_id)}) {_IS[run.state]} after step {run.step}{reason}."
        elif not comparison.point.reached(run):
            behind += 1
    if behind:
        has = "has" if behind == 1 else "have"
        yield f"{_count(behind, 'run')} {has} not come so far and {has} no number here."
    for row in comparison.rows:
        for metric in comparison.metrics:
            if metric.is_loss and (count := row.diverged(metric.name)):
                runs = _count(len(row.runs), "run")
                yield f"{row.label}: {count} of {runs} diverged in {metric.title}, left out of its mean."


_IS = {"failed": "failed", "lost": "was lost", "preempted": "was stopped"}


def _about_layouts(checks: Sequence[LayoutCheck]) -> Iterator[str]:
    """A sentence for each; where more than two are as they should be, one for all of these."""
    held = [check for check in checks if check.holds]
    if len(held) > 2:
        largest = max(held, key=lambda check: check.largest or 0.0)
        yield (
            f"Same experiment in several layouts, {len(held)} pairs: loss differs by {largest.largest or 0:.1e} "
            f"relative at most over the first {STEPS} steps (expected: {largest.tolerance:.0e}), as it should be."
        )
    for check in checks:
        if len(held) <= 2 or not check.holds:
            yield _about_layout(check)


def _about_layout(check: LayoutCheck) -> str:
    start = f"Same experiment in two layouts ({check.layouts[0]} and {check.layouts[1]}, seed {check.seed})"
    if check.largest is None:
        return f"{start}: they have logged no step in common among the first ones, so nothing is checked."
    expected = "" if check.tolerance is None else f", expected at most {check.tolerance:.0e}"
    judged = {True: "as it should be", False: "MORE THAN ROUNDING", None: "no tolerance is known for this precision"}
    return (
        f"{start}: loss differs by {check.largest:.1e} relative over the first {check.steps} logged steps{expected}: "
        f"{judged[check.holds]}; by {check.last or 0:.1e} at step {check.last_step}."
    )


def _about_surroundings(comparison: Comparison) -> Iterator[str]:
    runs = comparison.runs
    commits = {run.commit for run in runs if run.commit}
    if len(commits) > 1:
        yield f"The runs are of {len(commits)} different commits: {listed(sorted(it[:10] for it in commits), 'and')}."
    dirty = sum(bool(run.dirty) for run in runs)
    if dirty:
        yield f"{_count(dirty, 'run')} ran code that differed from its commit (diff.patch in the run folder)."
    devices = {run.device for run in runs if run.device}
    if len(devices) > 1:
        yield f"The runs were on different devices ({listed(sorted(devices), 'and')}): their speeds do not compare."


def _of(comparison: Comparison, run_id: str) -> str:
    for row in comparison.rows:
        for run in row.runs:
            if run.run_id == run_id:
                return f"{row.label}, seed {run.seed}"
    return run_id


def _unit(metric: Metric) -> str:
    return "" if metric.unit in ("", "nats") else f" {metric.unit}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
