"""Findings and remarks of a comparison as sentences, shared by all outputs."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from titan_exp.compare.compared_metrics import Metric, differing_keys
from titan_exp.compare.comparison import Comparison
from titan_exp.compare.runs import ComparedRun, Row
from titan_exp.compare.statistics import LEVEL, Delta, Estimate
from titan_exp.config.errors.user_error import listed, some_of
from titan_exp.config.schema.data_sets import BITS, DOCUMENTS, LOSS, WHOLE
from titan_exp.config.schema.identity_keys import flatten
from titan_exp.config.study.study import FEWEST_PAIRS
from titan_exp.launch.evidence import Standing
from titan_exp.tracking.display import format_count, format_duration, format_items, format_time

STEPS = 10  # number of first steps that have a tolerance, which is as many as the parity tests train
TOLERANCE = {"fp32": 2e-6, "bf16": 2e-3}
"""Maximum relative loss difference of the parity tests, by `training.mixed_precision`."""

NAMED = 5  # maximum number of runs that a sentence names


@dataclass(frozen=True)
class LayoutCheck:
    """One experiment with one seed in two layouts."""

    experiment_id: str
    seed: int | None
    layouts: tuple[str, str]
    run_ids: tuple[str, str]
    steps: int  # number of the first STEPS steps that both runs logged
    largest: float | None  # maximum relative loss difference over these steps; None without steps
    tolerance: float | None  # maximum accepted difference; None if the precision has none
    last_step: int | None  # last step that both runs logged
    last: float | None  # relative loss difference at `last_step`

    @property
    def holds(self) -> bool | None:
        """True if the difference is within the tolerance; None if unknown."""
        return None if self.largest is None or self.tolerance is None else self.largest <= self.tolerance


def layout_checks(runs: Sequence[ComparedRun]) -> list[LayoutCheck]:
    """Check every run of an experiment against its first layout."""
    groups: dict[tuple[str, int | None], list[ComparedRun]] = defaultdict(list)
    for run in runs:
        if run.experiment_id and run.rows:
            groups[run.experiment_id, run.seed].append(run)
    checks = []
    for members in groups.values():
        first, *others = sorted(members, key=lambda run: run.world_size or 0)
        checks += [_check(first, other) for other in others]
    return checks


def _check(one: ComparedRun, two: ComparedRun) -> LayoutCheck:
    early, late = _losses(one), _losses(two)
    common = sorted(early.keys() & late.keys())
    first = [step for step in common if step <= STEPS]
    last = common[-1] if common else None
    columns = differing_keys([one.config, two.config])
    return LayoutCheck(
        experiment_id=str(one.experiment_id),
        seed=one.seed,
        layouts=(columns.label(flatten(one.config)), columns.label(flatten(two.config))),
        run_ids=(one.run_id, two.run_id),
        steps=len(first),
        largest=max((_relative(early[step], late[step]) for step in first), default=None),
        tolerance=TOLERANCE.get(one.config.get("training", {}).get("mixed_precision")),
        last_step=last,
        last=None if last is None else _relative(early[last], late[last]),
    )


def _losses(run: ComparedRun) -> dict[int, float]:
    steps, losses = run.rows.series("loss", "step", above=-1.0, up_to=math.inf)
    return dict(zip(map(int, steps), losses, strict=True))


def _relative(one: float, two: float) -> float:
    return abs(one - two) / max(abs(one), abs(two), 1e-12)


MINUS = "\N{MINUS SIGN}"
MISSING = "\N{EM DASH}"  # text for an unknown number


def value(metric: Metric, number: float | None, decimals: int | None = None) -> str:
    """Format a metric's value without its unit; `decimals` are those of its column."""
    if number is None:
        return MISSING
    if not math.isfinite(number):
        return "diverged" if metric.is_loss else "not finite"
    if metric.name == "time":
        return format_duration(3600 * number)
    if metric.name == "mfu" or metric.name.endswith("_of_predicted"):
        return f"{100 * number:.1f} %"
    if metric.unit in ("tokens/s", "tokens"):
        return format_count(number)
    text = f"{number:.4f}" if metric.unit == "nats" else f"{number:.4g}" if metric.unit != "h" else f"{number:.3g}"
    return text if decimals is None or "e" in text else f"{number:.{decimals}f}"


def column_decimals(metric: Metric, estimates: Iterable[Estimate | None]) -> int:
    """Decimals of a metric's column: the most that one of its values has alone."""
    texts = [value(metric, estimate.mean) for estimate in estimates if estimate is not None]
    return max((len(text.partition(".")[2]) for text in texts if re.fullmatch(r"-?[\d.]+", text)), default=0)


def with_interval(metric: Metric, estimate: Estimate | None, decimals: int | None = None) -> str:
    """Format a mean; a loss with the half-width of its confidence interval, if known."""
    if estimate is None:
        return MISSING
    text = value(metric, estimate.mean, decimals)
    if estimate.high is None or not metric.is_loss:
        return text
    return f"{text} ± {_magnitude(metric, estimate.high - estimate.mean)}"


def signed(metric: Metric, number: float) -> str:
    """Format a difference with its sign."""
    sign = MINUS if number < 0 else "+" if number > 0 else "±"
    return f"{sign}{_magnitude(metric, abs(number))}"


def percent(ratio: float) -> str:
    """Format a ratio as a relative change: +3.1 %."""
    number = 100 * (ratio - 1)
    text = f"{abs(number):.0f}" if abs(number) >= 10 else f"{abs(number):.1f}"
    sign = "±" if float(text) == 0 else MINUS if number < 0 else "+"
    return f"{sign}{text} %"


def change(metric: Metric, delta: Delta | None, baseline: float | None) -> str:
    """Format a difference to the baseline: losses with their interval, costs in per cent."""
    if delta is None:
        return ""
    if not metric.is_loss and baseline:
        return percent(1 + delta.difference / baseline)
    return signed(metric, delta.difference) + interval(metric, delta)


def interval(metric: Metric, delta: Delta) -> str:
    """Format the confidence interval of a difference in brackets; empty if unknown."""
    if delta.low is None or delta.high is None:
        return ""
    return f" [{signed(metric, delta.low)}, {signed(metric, delta.high)}]"


def _magnitude(metric: Metric, number: float) -> str:
    if metric.unit == "nats":
        return f"{number:.4f}" if number >= 0.001 or number == 0 else f"{number:.1e}"
    return value(metric, number)


def heading(comparison: Comparison) -> str:
    """Number of rows and runs, and their token budget."""
    counts = f"{format_items(len(comparison.rows), 'row')}, {format_items(len(comparison.runs), 'run')}"
    return f"{counts} · {token_budget_text(comparison)}"


def token_budget_text(comparison: Comparison) -> str:
    """Token budget with its reason."""
    budget = comparison.budget
    if budget.tokens == 0 or math.isinf(budget.tokens):
        return budget.why
    return f"at {budget.tokens:,.0f} tokens, {budget.why}"


def verdict(metric: Metric, delta: Delta | None, standing: Standing | None = None) -> str:
    """Label of a difference after Holm correction; empty without a difference. `different`, `not distinguishable`,
    `only uncorrected`, `too few seeds` or `no interval`. In the metric of a registered question, whose standing is
    given, it is the outcome if that is `better` or `worse`, else `not distinguishable`: only such a question bounds the
    chance of a wrong verdict."""
    if delta is None:
        return ""
    if standing is not None and metric.name == standing.registration.metric:
        return standing.outcome if standing.outcome in ("better", "worse") else "not distinguishable"
    if delta.is_distinguishable is None:
        return "no interval"
    if delta.n < FEWEST_PAIRS:
        return "too few seeds"
    if not delta.is_distinguishable:
        return "not distinguishable" if delta.holds_zero else "only uncorrected"
    return "different"


def findings(comparison: Comparison) -> list[str]:
    """Sentences of `labelled_findings`."""
    return [sentence for _, sentence in labelled_findings(comparison)]


def labelled_findings(comparison: Comparison) -> list[tuple[str, str]]:
    """Label and sentence: the verdict of a registered question, else each row's difference in the main metric."""
    metric, standing = comparison.main, comparison.standing
    if standing is not None:
        return [(standing.outcome, standing.sentence)]
    baseline = comparison.rows[comparison.baseline].estimates[metric.name]
    mean = baseline.mean if baseline else None
    return [
        (verdict(metric, delta), _finding(metric, row, delta, mean))
        for row in comparison.rows
        if (delta := row.deltas.get(metric.name)) is not None
    ]


def remarks(comparison: Comparison, checks: Sequence[LayoutCheck]) -> list[str]:
    """Sentences about statistics, failed runs, layouts, and differing code or devices."""
    names = dict.fromkeys(metric.name.removeprefix("best_") for metric in comparison.metrics)
    validations = [name for name in names if name.partition("/")[0] in (LOSS, BITS)]
    return [
        *_about_statistics(comparison),
        *_about_next_look(comparison),
        *chain.from_iterable(_about_documents(comparison, name) for name in validations),
        *_about_states(comparison),
        *_about_lineage(comparison),
        *_about_layouts(checks),
        *_about_environment(comparison),
        *comparison.notes,
    ]


def state_text(row: Row) -> str:
    """`done`, or the number of runs in each other state."""
    states = row.shown_states
    if len(states) == 1:
        return next(iter(states))
    return ", ".join(f"{count} {state}" for state, count in states.items() if state != "done")


def stands_for(comparison: Comparison) -> list[str]:
    """One sentence per column that stands for several keys."""
    columns = comparison.differing_keys
    return [f"{columns.short[one]} stands for {listed(keys, 'and')}." for one, keys in columns.stands_for.items()]


def _finding(metric: Metric, row: Row, delta: Delta, baseline: float | None) -> str:
    unit = "" if metric.unit in ("", "nats") else f" {metric.unit}"
    size = f"{signed(metric, delta.difference)}{unit}"
    if baseline and not metric.is_loss:
        size = f"{percent(1 + delta.difference / baseline)}, {size}"
    size += interval(metric, delta)
    how = {
        "paired": f"{delta.n} seeds, paired",
        "unpaired": f"at least {delta.n} seeds each, not paired",
        "single": "one seed",
    }[delta.pairing]
    outcome = {
        "different": "differs from the baseline",
        "not distinguishable": "not distinguishable from the baseline",
        "only uncorrected": "not distinguishable after Holm's correction",
        "too few seeds": "too few seeds to tell it from the baseline",
        "no interval": "without an interval",
    }[verdict(metric, delta)]
    return f"{row.label}: {metric.title} {size}, {outcome} ({how})."


def _about_statistics(comparison: Comparison) -> Iterator[str]:
    deltas = [row.deltas.get(comparison.main.name) for row in comparison.rows]
    known = [delta for delta in deltas if delta is not None]
    with_interval = [delta for delta in known if delta.low is not None]
    if not known:
        return
    yield _about_evidence(comparison, known)
    if with_interval:
        pairings = {delta.pairing for delta in with_interval}
        how = "differences between equal seeds where two or more are common, else of means (Welch)"
        if pairings == {"paired"}:
            how = "differences between equal seeds (paired)"
        elif pairings == {"unpaired"}:
            how = "differences of means (Welch; no seeds are common)"
        yield f"Intervals are {100 * LEVEL:.0f} % by Student's t, over {how}."
    if len(with_interval) > 1 and any(delta.n >= FEWEST_PAIRS for delta in with_interval):
        comparisons = f"all {len(with_interval)} comparisons of a metric"
        yield f"Significance is corrected for {comparisons} (Holm); intervals are not."
    if len(with_interval) < len(known):
        rows = "one seed" if not with_interval else "at most one common seed in some rows"
        yield f"{rows.capitalize()}: no interval, and a difference may be chance."


def _about_evidence(comparison: Comparison, deltas: Sequence[Delta]) -> str:
    if (standing := comparison.standing) is not None:
        one, pairs = standing.registration, standing.verdict.pairs
        verdict = f"the verdict is of {format_items(pairs, 'pair')}, and its interval holds at every look"
        when = format_time(one.time) + ("" if one.changed else ", before the first run")
        return (
            f"Registered at {when}: {one.candidate} against {one.baseline} in {one.metric} ({one.validation}), looks "
            f"{one.when}. The unit is a pair of runs with one seed for weights and data order; "
            f"{verdict if pairs else 'no look has been reached'}."
        )
    counts = sorted({delta.n for delta in deltas if delta.pairing == "paired"})
    unit = f"a pair of runs with one seed: {listed([str(n) for n in counts])} pairs" if counts else "a run"
    return (
        "Exploratory: no question was registered before the runs (pairs: in a study), so that nothing here is a "
        f"verdict. The unit is {unit}."
    )


def _about_documents(comparison: Comparison, name: str) -> Iterator[str]:
    """Sentence about a validation metric of different documents: in the keys that choose them or, after a change of
    files that no key shows, in the size of the runs' own sets."""
    kind, _, part = name.partition("/")
    runs = [run for run in comparison.runs if run.series(name)[1]]
    group, data = "data", [_mapping(run.config.get("data")) for run in runs]
    if part:
        of_set = part.partition("/")[0]
        sets = [_mapping(_mapping(_mapping(run.config.get("evaluation")).get("sets")).get(of_set)) for run in runs]
        if any(sets):
            group = f"evaluation.sets.{of_set}.data"
            own = [_mapping(one.get("data")) for one in sets]
            # Other keys that a set does not have are those of the run, unless its source is another one.
            data = [{**({} if "source" in one else run), **WHOLE, **one} for run, one in zip(data, own, strict=True)]
        # Text may lie in other places, and a store of a mixture is known by its name.
        data = [one | {"paths": [Path(path).name for path in one.get("paths") or ()] * any(sets)} for one in data]
    keys = (*DOCUMENTS, *["tokenizer"][: kind == LOSS])
    differing = [key for key in keys if len({repr(one[key]) for one in data if key in one}) > 1]
    counts = [tokens for run in runs if not part and (tokens := run.series("validation_tokens")[1])]
    sizes = sorted({int(tokens[-1]) for tokens in counts}) if "tokenizer" in keys else []
    if len(sizes) < 2 and differing == ["paths"] and counts and len(counts) == len(runs):
        return  # the same text in other places
    if len(sizes) < 2 and not differing:
        return
    tokens = [f"of {listed([f'{size:,}' for size in sizes[:NAMED]], 'and')} tokens"] if len(sizes) > 1 else []
    why = "; ".join([*[f"{group}.{key} differs" for key in differing], *tokens])
    remedy = "Evaluate all runs on one set (evaluation.sets), and compare its validation_loss/NAME."
    what = "documents"
    if differing == ["tokenizer"]:
        what, remedy = "tokens", f"Compare {name.replace(LOSS, BITS)}."
    title = {LOSS: "The validation loss", BITS: "The validation's bits per byte"}.get(name, name)
    yield f"{title} is of different {what} ({why}), so that it ranks nothing. {remedy}"


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _about_next_look(comparison: Comparison) -> Iterator[str]:
    """Command that looks at the pairs which have ended, while the question is open."""
    standing, study = comparison.standing, comparison.study
    if standing is None or study is None or standing.outcome != "continue":
        return
    ended = [run for run in comparison.runs if run.state == "done" and run.run_id in study.by_run]
    done = {(study.by_run[run.run_id].variant, run.seed) for run in ended}
    arms = (standing.registration.candidate, standing.registration.baseline)
    pairs = sum(all((arm, seed) in done for arm in arms) for seed in standing.registration.seeds)
    if pairs:
        yield f"{format_items(pairs, 'pair')} complete: {study.command} looks at them, or trains what they lack."


def _about_states(comparison: Comparison) -> Iterator[str]:
    behind: list[str] = []
    for run in comparison.runs:
        if run.state in ("failed", "lost", "preempted"):
            reason = f": {run.reason.strip().splitlines()[-1]}" if run.reason and run.reason.strip() else ""
            verb = "failed" if run.state == "failed" else f"was {run.shown}"
            yield f"{run.run_id} ({_row_of(comparison, run.run_id)}) {verb} after step {run.step}{reason}."
        elif not comparison.budget.reached(run):
            behind.append(_row_of(comparison, run.run_id))
    if behind:
        has, names = "has" if len(behind) == 1 else "have", some_of(behind, NAMED)
        yield f"{format_items(len(behind), 'run')} {has} not seen so many tokens and {has} no number here: {names}."
    for row in comparison.rows:
        for metric in comparison.metrics:
            if metric.is_loss and (count := row.diverged(metric.name)):
                runs, numbers = format_items(len(row.runs), "run"), row.numbers[metric.name].items()
                seeds = listed([str(seed) for seed, number in numbers if not math.isfinite(number)], "and")
                who = f" (seed {seeds})" if len(row.runs) > 1 else ""
                yield f"{row.label}: {count} of {runs} diverged in {metric.title}{who}, left out of its mean."


def _about_lineage(comparison: Comparison) -> Iterator[str]:
    continued = [run for run in comparison.runs if run.lineage is not None]
    halved = comparison.learnt is not None and comparison.learnt.rungs
    for run in [] if halved else continued:
        yield f"{run.run_id} was continued from {run.lineage}."
    if continued:
        yield (
            "The curve of a continued run begins with its parent's; its speed, memory, time and GPU-hours are its own, "
            "and `GPU-hours with parents` adds its parents'."
        )


def _about_layouts(checks: Sequence[LayoutCheck]) -> Iterator[str]:
    """One sentence per check; more than two passing checks share one."""
    held = [check for check in checks if check.holds]
    if len(held) > 2:
        largest = max(held, key=lambda check: check.largest or 0.0)
        yield (
            f"Same experiment in several layouts, {len(held)} pairs: the loss differs by at most "
            f"{largest.largest or 0:.1e} relative over the first {STEPS} steps, within the tolerance "
            f"({largest.tolerance:.0e})."
        )
    for check in checks:
        if len(held) <= 2 or not check.holds:
            yield _about_layout(check)


def _about_layout(check: LayoutCheck) -> str:
    start = f"Same experiment in two layouts ({check.layouts[0]} and {check.layouts[1]}, seed {check.seed})"
    if check.largest is None:
        return f"{start}: not checked, since they share none of the first {STEPS} logged steps."
    expected = "" if check.tolerance is None else f" (tolerance {check.tolerance:.0e})"
    outcome = {True: "within the tolerance", False: "MORE THAN ROUNDING", None: "this precision has no tolerance"}
    return (
        f"{start}: the loss differs by {check.largest:.1e} relative over the first {check.steps} logged "
        f"steps{expected}, {outcome[check.holds]}; by {check.last or 0:.1e} at step {check.last_step}."
    )


def _about_environment(comparison: Comparison) -> Iterator[str]:
    runs = comparison.runs
    commits = {run.commit for run in runs if run.commit}
    if len(commits) > 1:
        names = listed(sorted(commit[:10] for commit in commits), "and")
        yield f"The runs are of {len(commits)} different commits: {names}."
    dirty = sum(bool(run.dirty) for run in runs)
    if dirty:
        yield f"{format_items(dirty, 'run')} ran code that differed from its commit (diff.patch in the run folder)."
    devices = {run.device for run in runs if run.device}
    if len(devices) > 1:
        yield f"The runs used different devices ({listed(sorted(devices), 'and')}): do not compare their speeds."


def _row_of(comparison: Comparison, run_id: str) -> str:
    return next((row.name_of(run) for row in comparison.rows for run in row.runs if run.run_id == run_id), run_id)
