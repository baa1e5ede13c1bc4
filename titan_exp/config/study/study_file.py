"""Study files: lookup by name and parsing into a `Study`, with all mistakes reported together."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from titan_exp.config.errors.user_error import UserError, Violation, did_you_mean, in_quotes, listed, shown
from titan_exp.config.extension import extension_folders, extensions, lacking
from titan_exp.config.paths.foreign_file import StudyLoader, read_yaml
from titan_exp.config.study.study import (
    METHODS,
    RANGE_KINDS,
    Axis,
    Choice,
    Condition,
    Direction,
    Exclusion,
    Halving,
    Range,
    Search,
    Study,
    split_override,
)

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


_PACKAGE = Path(__file__).resolve().parents[2]
SWEEPS_DIR = next(
    (folder for folder in (_PACKAGE / "sweeps", _PACKAGE.parent / "sweeps") if folder.is_dir()), _PACKAGE / "sweeps"
)
"""Folder of the shipped studies: inside an installed package, next to the package in a checkout."""
OWN_DIR = Path("sweeps")
"""Folder of the user's studies in the current directory; they override shipped studies of the same name."""

METRICS = ("loss", "validation_loss", "validation_perplexity", "grad_norm", "tokens_per_second")
METRICS += ("tokens_per_second_per_device", "tflops", "mfu", "memory", "memory_reserved")
METRICS += tuple(name for one in extensions().values() for name in one.metrics)
"""Metrics logged by runs, and by those of extensions. Metrics of a mixture's source (`validation_loss/NAME`) are also
comparable."""
FIELDS = ("question", "held_fixed", "sizes", "axes", "search", "exclude", "seeds", "halving", "baseline", "metrics")
FIELDS += ("tune",)
KINDS = ("grid", "zip", "list")
MOST_SEEDS = 10_000
"""Largest number of seeds of a study; a larger one is a typo."""
DIRECTIONS: tuple[str, ...] = get_args(Direction)


def study_files() -> dict[str, Path]:
    """Files of the user's and the shipped studies, by name."""
    own = sorted(OWN_DIR.glob("*.yaml")) if OWN_DIR.is_dir() else []
    folders = (*extension_folders("sweeps"), SWEEPS_DIR)
    shipped = {path.stem: path for folder in folders for path in folder.glob("*.yaml")}
    return dict(sorted(shipped.items())) | {path.stem: path for path in own}


def find_study(name: str) -> Path:
    """Path of a study file, by name or path."""
    if name.endswith((".yaml", ".yml")) or os.sep in name:
        path = Path(name).expanduser()
        if path.is_file():
            return path
        known = f"titan-exp sweep {path.stem} is the study of this name. " if path.stem in study_files() else ""
        what = "this is a folder" if path.is_dir() else "no such file"
        raise UserError(f"{name}: {what}. {known}A study is a YAML file, such as those in {SWEEPS_DIR}.")
    files = study_files()
    if name in files:
        return files[name]
    if reason := lacking(f"sweep {name}"):
        raise UserError(f"{name}: {reason}.")
    offer = did_you_mean(name, files)
    raise UserError(
        f"{name}: unknown study. {offer[:1].upper()}{offer[1:]}{' ' if offer else ''}"
        f"The studies are {listed(files or ['none'], 'and')}; your own go into sweeps/ where you type the command."
    )


def read_study(path: Path) -> Study:
    """Read a study's file.

    Raises:
        UserError: with a violation for every mistake in it.
    """
    content = read_yaml(path, "a study", StudyLoader)
    if not content:
        raise UserError(f"{path} contains no study. A study has {listed(FIELDS, 'and')}.")
    reader = _Reader()
    study = reader.study(path, content)
    if reader.found:
        raise UserError(f"{path}: this study cannot be read.", reader.found)
    return study


def override(key: str, value: Any) -> str:
    """Override for a key and a YAML value, quoted if Hydra would parse the text differently."""
    return f"{key}={shown(value, _quoted)}"


def facts_of(axis: Axis, choice: Choice) -> dict[str, str]:
    """Values set by a choice, by key; for a list's point also by the list's name, or its own."""
    facts = dict(map(split_override, choice.overrides))
    return facts if axis.keys else facts | {axis.name or choice.label: choice.label.removeprefix(f"{axis.name}=")}


class _Reader:
    """Parser of a study's parts that collects violations."""

    def __init__(self) -> None:
        self.found: list[Violation] = []

    def report(self, field: str, value: Any, reason: str, remedy: str) -> None:
        self.found.append(Violation(field, "" if isinstance(value, dict | list) else value, reason, remedy))

    def study(self, path: Path, content: Mapping[Any, Any]) -> Study:
        self._check_keys(content, FIELDS, "", "a study")
        question = content.get("question")
        if not isinstance(question, str) or not question.strip():
            self.report("question", question or "", "a study asks something", "question: Which learning rate is best?")
        fixed = self._overrides("held_fixed", content.get("held_fixed"))
        sizes = self._mapping("sizes", content.get("sizes"), "laptop: [training.steps=100]")
        sizes = {str(name): self._overrides(f"sizes.{name}", value) for name, value in sizes.items()}
        metrics = self._metrics(content.get("metrics"))
        search, halving = self._search(content, metrics), self._halving(content, metrics)
        axes = () if search else tuple(self._axes(content.get("axes")))
        known = {split_override(text)[0] for texts in (fixed, *sizes.values()) for text in texts}
        for index, axis in enumerate(axes):
            for field, conditions in (("when", axis.when), ("unless", axis.unless)):
                for condition in conditions:
                    self._check_condition(field, condition, axes[:index], known | _names(axes[:index]))
        known |= _names(axes)
        varied = {one.key for one in search.ranges} if search else _names(axes)
        return Study(
            name=path.stem,
            path=path,
            question=" ".join(str(question).split()),
            held_fixed=fixed,
            sizes=sizes,
            axes=axes,
            exclude=tuple(self._exclusions(content.get("exclude"), axes, known)),
            seeds=self._seeds(content.get("seeds")),
            baseline=self._baseline(content.get("baseline"), axes, known),
            metrics=metrics,
            search=search,
            halving=halving,
            tune=self._tune(content.get("tune"), varied),
        )

    def _search(self, content: Mapping[Any, Any], metrics: Mapping[str, Direction]) -> Search | None:
        if "search" not in content:
            return None
        if "axes" in content:
            remedy = "one of the two; a range {choice: [a, b]} takes the values of an axis"
            self.report("search", "", "a study has either axes, all of whose points are run, or a search", remedy)
        if "baseline" in content:
            reason = "points of a search are drawn, so that none is known before"
            self.report("baseline", "", reason, "leave it out; compare takes the best point, or --baseline")
        return read_search(content["search"], metrics, lambda value: shown(value, _quoted), self.report)

    def _halving(self, content: Mapping[Any, Any], metrics: Mapping[str, Direction]) -> Halving | None:
        if "halving" not in content:
            return None
        search = content.get("search")
        if isinstance(search, dict) and search.get("method") == "optuna":
            reason = "Optuna proposes points from the results of whole runs"
            self.report("halving", "", reason, "search.method: sobol or random with halving, or optuna without it")
        return read_halving(content["halving"], metrics, self.report)

    def _tune(self, value: Any, varied: set[str]) -> str:
        if value is None:
            return ""
        if value not in varied:
            offer = did_you_mean(str(value), sorted(varied)) or f"the study varies {listed(sorted(varied), 'and')}"
            self.report("tune", value, "the study varies no such key", offer)
        return str(value)

    def _check_keys(self, content: Mapping[Any, Any], names: Sequence[str], prefix: str, what: str) -> None:
        for key in content:
            if key not in names:
                offer = did_you_mean(str(key), names) or f"{what} has {listed(names, 'and')}"
                self.report(f"{prefix}{key}", "", "unknown key", offer)

    def _mapping(self, field: str, value: Any, example: str) -> Mapping[Any, Any]:
        if value is None or isinstance(value, dict):
            return value or {}
        self.report(field, value, "must be names with values", f"{field}:\n      {example}")
        return {}

    def _overrides(self, field: str, value: Any) -> tuple[str, ...]:
        if value is not None and not isinstance(value, list):
            example = f"{field}: [model=llama_debug, training.steps=100]"
            self.report(field, value, "must be a list of overrides", example)
            return ()
        for entry in value or ():
            if not isinstance(entry, str) or ("=" not in entry and not entry.startswith("~")):
                correct = override(*next(iter(entry.items()))) if isinstance(entry, dict) and entry else f"{entry}=..."
                self.report(field, str(entry), "an override is key=value, as on the command line", f"write {correct}")
        return tuple(entry for entry in value or () if isinstance(entry, str))

    def _axes(self, value: Any) -> Iterator[Axis]:
        example = "axes:\n      - grid: {optimizer.lr: [1e-3, 3e-3]}"
        if not isinstance(value, list) or not value:
            self.report("axes", "" if value is None else value, "must be a list of axes", example)
            return
        for number, block in enumerate(value, 1):
            field = f"axes[{number}]"
            keys = [str(key) for key in block] if isinstance(block, dict) else []
            kinds = [kind for kind in KINDS if kind in keys]
            if len(kinds) != 1:
                offer = next((found for key in keys if (found := did_you_mean(key, KINDS))), "")
                self.report(field, "" if keys else block, f"an axis is one of {listed(KINDS)}", offer or example)
                continue
            self._check_keys(block, (kinds[0], "name", "when", "unless"), f"{field}.", f"an axis of kind {kinds[0]}")
            yield from self._block(field, kinds[0], block)

    def _block(self, field: str, kind: str, block: Mapping[str, Any]) -> Iterator[Axis]:
        content = self._mapping(f"{field}.{kind}", block[kind], "optimizer.lr: [1e-3, 3e-3]")
        when, unless = (self._conditions(f"{field}.{key}", block.get(key)) for key in ("when", "unless"))
        name = str(block.get("name") or "")
        if kind == "list":
            points = {str(label): self._overrides(f"{field}.list.{label}", texts) for label, texts in content.items()}
            choices = tuple(Choice(texts, f"{name}={label}" if name else label) for label, texts in points.items())
            yield Axis(name, (), choices, when, unless)
            return
        if name:
            self.report(f"{field}.name", name, f"the axes of a {kind} are named by their keys", "leave the name out")
        values_of: dict[str, list[Any]] = {}
        for key, values in content.items():
            if isinstance(values, list) and values:
                values_of[str(key)] = values
            else:
                example = f"{key}: [{shown(values, _quoted)}]"
                self.report(f"{field}.{kind}.{key}", values, "must be a list of values", example)
        if kind == "grid":
            for key, values in values_of.items():
                texts = [override(key, value) for value in values]
                yield Axis(key, (key,), tuple(Choice((text,), text) for text in texts), when, unless)
        elif values_of:
            if len({len(values) for values in values_of.values()}) > 1:
                counts = listed([f"{key} has {len(values)}" for key, values in values_of.items()], "and")
                reason = f"values are taken side by side, and {counts}"
                self.report(f"{field}.zip", "", reason, "give each the same number")
            rows = [tuple(map(override, values_of, row)) for row in zip(*values_of.values(), strict=False)]
            yield Axis("", tuple(values_of), tuple(Choice(row, " ".join(row)) for row in rows), when, unless)

    def _conditions(self, field: str, value: Any) -> tuple[Condition, ...]:
        content = self._mapping(field, value, "parallelism.cp: [2, 4]")
        lists = {str(key): values if isinstance(values, list) else [values] for key, values in content.items()}
        return tuple(Condition(key, tuple(shown(value, _quoted) for value in values)) for key, values in lists.items())

    def _check_condition(self, field: str, condition: Condition, axes: Sequence[Axis], known: set[str]) -> None:
        """Report a condition on a key that is neither `known` nor an axis, or on a value missing on its axis."""
        field = f"{field}.{condition.key}"
        if condition.key not in known:
            offer = did_you_mean(condition.key, sorted(known)) or (
                f"there are {listed(sorted(known), 'and')}" if known else "leave it out"
            )
            self.report(field, "", "neither an axis (above this one) nor held fixed", offer)
            return
        axis = next((axis for axis in axes if condition.key in (axis.name, *axis.keys)), None)
        values = [facts_of(axis, choice).get(condition.key, "") for choice in axis.choices] if axis else []
        for value in condition.values if axis else ():
            if not any(Condition(condition.key, (value,)).holds({condition.key: other}) for other in values):
                self.report(field, value, "this axis has no such value", did_you_mean(value, values) or listed(values))

    def _exclusions(self, value: Any, axes: Sequence[Axis], known: set[str]) -> Iterator[Exclusion]:
        if value is not None and not isinstance(value, list):
            self.report("exclude", value, "must be a list", "exclude:\n      - {parallelism.tp: 4, parallelism.pp: 4}")
            return
        for number, entry in enumerate(value or [], 1):
            content = dict(self._mapping(f"exclude[{number}]", entry, "parallelism.tp: 4"))
            reason = content.pop("reason", None)
            conditions = self._conditions(f"exclude[{number}]", content)
            for condition in conditions:
                self._check_condition(f"exclude[{number}]", condition, axes, known)
            yield Exclusion(conditions, f"excluded by the study: {reason or ' '.join(map(str, conditions))}")

    def _seeds(self, value: Any) -> tuple[int, ...]:
        count = value if isinstance(value, int) and not isinstance(value, bool) else 0
        seeds: Any = list(range(min(count, MOST_SEEDS))) if count else value
        if seeds is None:
            return ()
        valid = count <= MOST_SEEDS and isinstance(seeds, list) and seeds
        if not valid or not all(isinstance(seed, int) and seed >= 0 for seed in seeds):
            reason = f"must be a number of seeds up to {MOST_SEEDS}, or a list of them"
            self.report("seeds", value, reason, "seeds: 3, or seeds: [0, 1, 2]")
            return ()
        return tuple(dict.fromkeys(seeds))

    def _baseline(self, value: Any, axes: Sequence[Axis], known: set[str]) -> tuple[Condition, ...] | str | None:
        if value is None or isinstance(value, str):
            return value
        conditions = self._conditions("baseline", value)
        for condition in conditions:
            self._check_condition("baseline", condition, axes, known)
        return conditions

    def _metrics(self, value: Any) -> dict[str, Any]:
        metrics = dict(self._mapping("metrics", value, "validation_loss: min"))
        for name, direction in metrics.items():
            if name not in METRICS and "/" not in str(name):
                offer = did_you_mean(str(name), METRICS) or f"runs log {listed(METRICS, 'and')}"
                self.report(f"metrics.{name}", "", "no run logs this metric", offer)
            if direction not in DIRECTIONS:
                self.report(f"metrics.{name}", direction, "the better direction is min or max", f"{name}: min")
        return metrics


def _names(axes: Sequence[Axis]) -> set[str]:
    return {name for axis in axes for name in (axis.name, *axis.keys) if name}


def _quoted(text: str) -> str:
    """Text as an override's value, quoted if Hydra would parse it differently."""
    if text and not set(text) & set(" ,()[]{}'\"\\=#\t\n"):
        return text
    return in_quotes(text)
