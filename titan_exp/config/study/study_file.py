"""Study files: lookup by name, and reading with all mistakes reported together."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

from titan_exp.config.errors.user_error import UserError, Violation, did_you_mean, listed
from titan_exp.config.extension import extension_folders, lacking
from titan_exp.config.foreign_file import StudyLoader, read_yaml
from titan_exp.config.schema.typed_config import GapError, typed_values
from titan_exp.config.study.labels import hold, split_override
from titan_exp.config.study.study import Axis, Conditions, Study, StudyFile

_PACKAGE = Path(__file__).resolve().parents[2]
SWEEPS_DIR = next(
    (folder for folder in (_PACKAGE / "sweeps", _PACKAGE.parent / "sweeps") if folder.is_dir()), _PACKAGE / "sweeps"
)
"""Folder of the shipped studies: inside an installed package, next to the package in a checkout."""
OWN_DIR = Path("sweeps")
"""Folder of the user's studies in the current directory; they override shipped studies of the same name."""


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
        what = "this is a folder" if path.is_dir() else "there is no such file"
        if path.stem in study_files():
            what += f". To run the study of this name, type titan-exp sweep {path.stem}"
        raise UserError(f"{name}: {what}. A study is a YAML file, such as those in {SWEEPS_DIR}.")
    files = study_files()
    if name in files:
        return files[name]
    if reason := lacking(f"sweep {name}"):
        raise UserError(f"{name}: {reason}.")
    offer = did_you_mean(name, files)
    raise UserError(
        f"{name}: unknown study. {offer[:1].upper()}{offer[1:]}{' ' if offer else ''}The studies are "
        f"{listed(files or ['none'], 'and')}. Put your own into the folder sweeps/ where you type the command."
    )


def read_study(path: Path) -> Study:
    """Read a study's file. Raises UserError with a violation for every mistake in it."""
    content = read_yaml(path, "a study", StudyLoader)
    if not content:
        raise UserError(f"{path} is empty. A study has {listed([one.name for one in fields(StudyFile)], 'and')}.")
    found, study = typed_values(StudyFile, content)
    for check in (_points, _pairs, _ladder, _metrics, _conditions, _tuned):
        with suppress(GapError):
            found += check(study)
    if found:
        raise UserError(f"{path}: cannot read this study.", found)
    read = Study(path=path, **vars(study))
    search, halving, pairs = read.search, read.halving, read.pairs
    first = next(iter(read.metrics), "validation_loss")
    if search is not None and search.method == "optuna":
        search = replace(search, batch=search.batch or min(8, search.points), metric=search.metric or first)
    return replace(
        read,
        question=" ".join(read.question.split()),
        axes=tuple(one for axis in read.axes for one in _of_one_key(axis)),
        search=search,
        halving=halving and replace(halving, metric=halving.metric or first),
        pairs=pairs and replace(pairs, metric=pairs.metric or first),
        ladder=read.ladder and replace(read.ladder, metric=read.ladder.metric or first),
    )


def _of_one_key(axis: Axis) -> Iterator[Axis]:
    """Axes of a block: one for each key of a grid."""
    yield from (replace(axis, grid={key: values}) for key, values in axis.grid.items())
    if not axis.grid:
        yield axis


def _points(study: StudyFile) -> list[Violation]:
    """Mistakes about where the points come from."""
    search, found = study.search, list[Violation]()
    if search is None:
        if study.axes or study.ladder is not None:
            return []
        remedy = "write them, for example axes: [{grid: {optimizer.lr: [1e-3, 3e-3]}}]"
        return [Violation("axes", "", "a study needs axes or a search", remedy)]
    if study.axes:
        reason = "a study has either axes, of which it runs all points, or a search"
        remedy = "leave out one of the two (a range {choice: [a, b]} takes the values of an axis)"
        found.append(Violation("search", "", reason, remedy))
    if study.baseline is not None:
        reason = "a search draws its points, so no baseline exists before it runs"
        remedy = "leave it out (compare takes the best point, or the one that you name with --baseline)"
        found.append(Violation("baseline", "", reason, remedy))
    for key in ("batch", "metric"):
        if search.method != "optuna" and (value := getattr(search, key)) is not None:
            reason = f"{search.method} draws all points at once and ignores their results"
            found.append(Violation(f"search.{key}", value, reason, "leave it out, or write method: optuna"))
    if search.method == "optuna" and study.halving is not None:
        reason = "Optuna proposes points from the results of whole runs, and halving stops runs early"
        remedy = "write method: sobol or random with halving, or leave halving out"
        found.append(Violation("halving", "", reason, remedy))
    return found


def _pairs(study: StudyFile) -> list[Violation]:
    """Mistakes of a study whose two points are tested by pairs."""
    if study.pairs is None:
        return []
    remedy = "baseline: NAME, the name or values of the point to beat"
    missing = [Violation("baseline", "", "pairs test a point against the baseline", remedy)]
    reasons = {
        "seeds": "the pairs draw their seeds, the same for both runs of a pair and others for each pair",
        "search": "pairs test one point against another, and a search draws many",
        "halving": "halving keeps the best of many points, without an error rate",
        "tune": "a point that is tuned on the runs that test it gains by luck",
    }
    return (missing if study.baseline is None else []) + _beside(study, "pairs", reasons)


def _ladder(study: StudyFile) -> list[Violation]:
    """Mistakes of a study whose points are trained at several sizes."""
    reasons = {
        "search": "a ladder takes one point, or a baseline and a candidate, to every size",
        "halving": "a law needs the whole ladder, and halving stops runs early",
        "pairs": "pairs decide at one size, and a ladder has several",
        "tune": "a ladder takes every point to every size as it is",
    }
    if (ladder := study.ladder) is None:
        return []
    metric = ladder.metric or next(iter(study.metrics), "validation_loss")
    reason = "a law is of a loss, and more of this metric is better"
    no_loss = [Violation("ladder.metric", metric, reason, "write metric: validation_loss")]
    return (no_loss if study.better(metric) == "max" else []) + _beside(study, "ladder", reasons)


def _beside(study: StudyFile, block: str, reasons: Mapping[str, str]) -> list[Violation]:
    """Keys that a study cannot have beside a block, each with the reason."""
    taken = [key for key in reasons if getattr(study, key)]
    return [Violation(key, "", reasons[key], f"leave {key} out, or {block}") for key in taken]


def _metrics(study: StudyFile) -> list[Violation]:
    """Metrics of which it is unknown whether more or less is better."""
    by_optuna = study.search is not None and study.search.method == "optuna"
    used = {"search": study.search if by_optuna else None, "halving": study.halving, "pairs": study.pairs}
    used["ladder"] = study.ladder
    named = {key: block.metric for key, block in used.items() if block is not None and block.metric is not None}
    unknown = [(key, metric) for key, metric in named.items() if study.better(metric) is None]
    reason = "titan_exp does not know whether less or more of this metric is better"
    return [Violation(f"{key}.metric", one, reason, f"write metrics: {{{one}: max}}") for key, one in unknown]


def _conditions(study: StudyFile) -> list[Violation]:
    """Conditions on what no point has."""
    above, found = list[Axis](), list[Violation]()
    known = {split_override(text)[0] for texts in (study.held_fixed, *study.sizes.values()) for text in texts}
    for number, axis in enumerate(study.axes, 1):
        for key in ("when", "unless"):
            found += _misfits(f"axes[{number}].{key}", getattr(axis, key), above, known)
        above += _of_one_key(axis)
    for number, exclusion in enumerate(study.exclude, 1):
        found += _misfits(f"exclude[{number}]", exclusion.conditions, above, known)
    if isinstance(study.baseline, dict) and study.search is None:
        found += _misfits("baseline", study.baseline, above, known)
    return found


def _misfits(field: str, conditions: Conditions, axes: Sequence[Axis], fixed: set[str]) -> Iterator[Violation]:
    """Conditions on a key that is neither fixed nor that of an axis, or on a value that its axis lacks."""
    names = {name for axis in axes for name in axis.names}
    known = sorted({*fixed, *names})
    for key, values in conditions.items():
        if key not in known:
            offer = did_you_mean(key, known) or (f"there are {listed(known, 'and')}" if known else "leave it out")
            reason = "no axis above this one varies this key, and the study does not hold it fixed"
            yield Violation(f"{field}.{key}", "", reason, offer)
        there = [axis.facts(choice)[key] for axis in axes if key in axis.names for choice in axis.choices]
        for value in values if key in names else ():
            if not any(hold({key: (value,)}, {key: other}) for other in there):
                offer = did_you_mean(value, there) or f"use {listed(dict.fromkeys(there))}"
                yield Violation(f"{field}.{key}", value, "this axis has no such value", offer)


def _tuned(study: StudyFile) -> list[Violation]:
    """A key to tune that no point varies."""
    varied = sorted(study.search.ranges if study.search else {name for axis in study.axes for name in axis.names})
    if study.tune is None or study.tune in varied:
        return []
    offer = did_you_mean(study.tune, varied) or f"the study varies {listed(varied, 'and')}"
    return [Violation("tune", study.tune, "the study does not vary this key", offer)]
