"""Study points: product of the applicable axes and the seeds, without excluded points."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from hydra.core.override_parser.types import Override

from titan_exp.config.errors.user_error import UserError, did_you_mean, listed
from titan_exp.config.study.labels import described, hold, names_all, spelled, split_override, text_override, words_of
from titan_exp.config.study.ladder import LadderRung
from titan_exp.config.study.study import Axis, Choice, Study

SEED = "experiment.seed"
NAME = "experiment.name"


@dataclass(frozen=True)
class Point:
    """Point of a study or sweep before composition."""

    overrides: tuple[str, ...]
    """Overrides, one per key."""
    label: str
    """Name of the point: its varied overrides, including the seed."""
    variant: str = ""
    """Varied overrides of a study without the seed; runs of one variant are repetitions."""
    seed: int | None = None
    """Seed, if the study lists seeds."""
    facts: dict[str, str] = field(default_factory=dict, hash=False)
    """Values by key of all fixed and varied overrides."""
    excluded: str | None = None
    """Reason for excluding the point; None if included."""
    round: int = 1
    """Rung of successive halving, or batch of Optuna, from 1."""
    rung: LadderRung | None = None
    """Size and length of a point of a ladder."""


def values_of(override: Override) -> list[str]:
    """Expand an override, which may be a sweep, to overrides `key=value`. Raises UserError if the override is an
    interval, with infinitely many values."""
    key = override.get_key_element()
    if not override.is_sweep_override():
        return [override.input_line or ""]
    if override.is_discrete_sweep():
        return [f"{key}={value}" for value in override.sweep_string_iterator()]
    reason = "an interval has infinitely many values, and this sweep tries all values"
    raise UserError(f"{override.input_line}: {reason}. List them: {key}=1,2,3 or {key}=range(1,4).")


def require_swept_once(typed: Sequence[Override]) -> None:
    """Raise UserError if a key that is swept is swept again, or set afterwards, which would undo the sweep. Objects
    are merged, as in one run."""
    swept: dict[str, str] = {}
    for change in typed:
        key, text = change.get_key_element().lstrip("+~"), change.input_line or ""
        merges = not change.is_sweep_override() and isinstance(change.value(), dict)
        if key in swept and not merges:
            values = f"{swept[key]},{text.partition('=')[2]}" if change.is_sweep_override() else swept[key]
            raise UserError(f"{text}: {swept[key]} already sweeps this key. Give all its values at once: {values}")
        if change.is_sweep_override():
            swept[key] = text


def chosen_size(study: Study, size: str | None) -> str:
    """Requested size, or the first; empty if the study has none."""
    if size is None:
        return next(iter(study.sizes), "")
    if size in study.sizes:
        return size
    known = f"{study.name} has {listed(study.sizes, 'and')}" if study.sizes else f"{study.path} has no sizes"
    raise UserError(f"size={size}: the study has no such size ({did_you_mean(size, study.sizes) or known})")


def folder_name(study: Study, size: str) -> str:
    """Folder of the study's runs under `paths.runs`; each size except the first has a separate one."""
    return study.name if size == next(iter(study.sizes), "") else f"{study.name}_{size}"


def narrowed(study: Study, typed: Sequence[Override]) -> tuple[Study, tuple[str, ...]]:
    """Apply typed overrides to a study; returns it, and the overrides common to all points.

    An override of an axis' key replaces its values, of which those of the study keep its spelling; one of a `list`
    axis' name keeps the named choices; several values of another key add an axis. A value for a range of a search fixes
    its key.
    Raises UserError if an override would separate values that the study sets together, names no choice of a list, or
    gives a search another axis."""
    fixed: list[str] = []
    require_swept_once(typed)
    for change in typed:
        key, texts = change.key_or_group, values_of(change)
        axis = next((axis for axis in study.axes if key in (axis.name, *axis.keys)), None)
        values = tuple(split_override(text)[1] for text in texts)
        if key == SEED and all(map(str.isdigit, values)):
            study = replace(study, seeds=tuple(map(int, values)))
        elif study.search is not None and (change.is_sweep_override() or key in study.search.ranges):
            study = _fixed_range(study, change, key)
            fixed += texts
        elif axis is not None and (key == axis.name or axis.set_keys == (key,)):
            if axis.list:
                for name in values:
                    if name not in axis.list:
                        offer = did_you_mean(name, axis.list) or f"it has {listed(axis.list, 'and')}"
                        raise UserError(f"{axis.name}={name}: this axis has no such choice ({offer})")
                chosen = {"list": {name: axis.list[name] for name in values}}
            else:
                (own,) = (axis.grid or axis.zip).values()
                known = {spelled(value): value for value in own}
                values = tuple(known.get(spelled(value), value) for value in values)
                chosen = {"grid": {change.get_key_element(): values}, "zip": {}}
            narrow = [replace(one, **chosen) if key in (one.name, *one.keys) else one for one in study.axes]
            study = replace(study, axes=tuple(narrow))
        elif axis is not None:
            raise UserError(
                f"{change.input_line}: this study varies several keys together ({listed(axis.keys, 'and')}), so you "
                f"cannot change one alone. Change them in {study.path}, or in a copy of your own: "
                f"sweeps/{study.name}.yaml."
            )
        elif change.is_sweep_override():
            study = replace(study, axes=(*study.axes, Axis(grid={change.get_key_element(): values})))
        else:
            fixed += texts
    return study, tuple(fixed)


def _fixed_range(study: Study, change: Override, key: str) -> Study:
    """Study whose search does not vary a key."""
    assert study.search is not None
    left = {other: one for other, one in study.search.ranges.items() if other != key}
    if change.is_sweep_override() or not left:
        reason = "this leaves the search no range" if not left else "a search draws the values of its keys itself"
        remedy = "Give one value to fix a key, give several seeds (experiment.seed=0,1), or write a study with axes."
        raise UserError(f"{change.input_line}: {reason}. {remedy}")
    return replace(study, search=replace(study.search, ranges=left))


def study_points(study: Study, size: str, fixed: Sequence[str] = (), proposed: Sequence[Choice] = ()) -> list[Point]:
    """Points of a study, including excluded ones; the seed varies fastest, then the last axis. The size may be empty;
    `fixed` overrides take precedence over the study's. `proposed` are the points of a search so far. Raises UserError
    if no point is left, or two points have the same label."""
    base = [text_override(NAME, folder_name(study, size)), *study.held_fixed, *study.sizes.get(size, ())]
    combinations: list[tuple[tuple[Choice, ...], dict[str, str]]] = [((), dict(map(split_override, [*base, *fixed])))]
    axes = study.axes
    if study.search is not None:
        drawn = [[split_override(text)[1] for text in choice.overrides] for choice in proposed]
        axes = (Axis(zip=dict(zip(study.search.ranges, map(tuple, zip(*drawn, strict=True)), strict=True))),)
    for axis in axes:
        combinations = [
            combination
            for choices, facts in combinations
            for combination in (
                [((*choices, choice), facts | axis.facts(choice)) for choice in axis.choices]
                if axis.applies(facts)
                else [(choices, facts)]
            )
        ]
    found = []
    leaves = Counter(key.rpartition(".")[2] for key in {key for axis in axes for key in axis.keys})
    for choices, facts in combinations:
        variant = " ".join(_shortened(choice, leaves) for choice in choices) or "(nothing varies)"
        excluded = next((one for one in study.exclude if hold(one.conditions, facts)), None)
        reason = excluded and f"the study excludes it: {excluded.reason or described(excluded.conditions)}"
        varied = [text for choice in choices for text in choice.overrides]
        _require_set_once(study, varied)
        for seed in study.seeds or (None,):
            seeded = [] if seed is None else [f"{SEED}={seed}"]
            overrides = last_wins([*base, *varied, *seeded, *fixed])
            label = variant if seed is None else f"{variant} seed={seed}"
            found.append(Point(overrides, label, variant, seed, facts, reason))
    label, count = Counter(point.label for point in found).most_common(1)[0]
    if count > 1:
        raise UserError(f"{study.path}: two points have the label {label!r}. Give their axes different names.")
    if all(point.excluded for point in found):
        raise UserError(f"{study.path}: the study excludes all of its {len(found)} points.")
    return found


class FilePoints:
    """Points that a study's file has, for runs of earlier calls."""

    def __init__(self, points: Iterable[Point]) -> None:
        self._by_keys: dict[frozenset[str], dict[frozenset[str], set[_Values]]] = {}
        for point in points:
            if point.excluded is None:
                values = _values(point.overrides)
                keys = frozenset(key for key, _ in values)
                self._by_keys.setdefault(keys, {}).setdefault(keys, set()).add(values)

    def has(self, overrides: Sequence[str], typed: Set[str] = frozenset()) -> bool:
        """True if the file has the point of a run, whose other overrides the command line added, as it set the `typed`
        keys to values that the file does not have."""
        values = _values(overrides)
        for keys, points in self._by_keys.items():
            left = keys - typed
            if left not in points:
                points[left] = {_restricted(each, left) for each in points[keys]}
            if _restricted(values, left) in points[left]:
                return True
        return False


_Values = frozenset[tuple[str, str]]


def _values(overrides: Sequence[str]) -> _Values:
    """Keys with their values in one spelling, without the name of the folder."""
    found = map(split_override, overrides)
    return frozenset((key, spelled(value)) for key, value in found if key != NAME)


def _restricted(values: _Values, keys: Set[str]) -> _Values:
    return frozenset(pair for pair in values if pair[0] in keys)


def baseline_of(study: Study, points: Sequence[Point]) -> str | None:
    """Baseline variant of a study; None without one. Raises UserError if the baseline matches no point, or several."""
    baseline = study.baseline
    if baseline is None:
        return None
    variants = {point.variant: point for point in points}
    if isinstance(baseline, str):
        words = words_of(baseline)
        matching = [name for name in variants if names_all(baseline, words_of(name)) and names_all(name, words)]
        matching = matching or [name for name, point in variants.items() if baseline in point.facts.values()]
        text = baseline
    else:
        matching = [name for name, point in variants.items() if hold(baseline, point.facts)]
        text = described(baseline)
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise UserError(
            f"{study.path}: the baseline {text} fits {len(matching)} points ({listed(matching[:4], 'and')}). Name one "
            f"of them: write baseline: {json.dumps(matching[0], ensure_ascii=False)}."
            + (f" As the study tunes {study.tune}, its whole group is the baseline then." if study.tune else "")
        )
    offer = did_you_mean(text, variants) or f"The points are {listed(list(variants)[:8], 'and')}."
    raise UserError(f"{study.path}: no point of the study fits the baseline {text}. {offer[:1].upper()}{offer[1:]}")


def _shortened(choice: Choice, leaves: Mapping[str, int]) -> str:
    """Label of a choice; keys omit their groups if no other axis has a key of that name."""
    if choice.label != " ".join(choice.overrides):
        return choice.label
    pairs = [text.partition("=") for text in choice.overrides]
    short = {key: leaf for key, _, _ in pairs if leaves[leaf := key.rpartition(".")[2]] == 1}
    return " ".join(f"{short.get(key, key)}={value}" for key, _, value in pairs)


def last_wins(overrides: Sequence[str]) -> tuple[str, ...]:
    """Overrides, keeping the last of each key, and objects before it, with which it is merged."""
    kept, final = list[str](), set[str]()
    for text in reversed(overrides):
        key, _, value = text.partition("=")
        if (key := key.lstrip("+")) not in final:
            kept.append(text)
        if not value.startswith("{"):
            final.add(key)
    return tuple(reversed(kept))


def _require_set_once(study: Study, varied: Sequence[str]) -> None:
    """Raise UserError if two axes of a point set one key."""
    texts: dict[str, str] = {}
    for text in varied:
        key, value = split_override(text)
        if key in texts and not value.startswith("{"):
            remedy = "Put its values into one axis, or let the axes exclude each other with when and unless."
            raise UserError(f"{study.path}: two axes set {key} in one point: {texts[key]} and {text}. {remedy}")
        texts[key] = text
