"""The points of a study: the product of its axes where they apply, once with every seed, less what is excluded."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hydra.core.override_parser.types import Override

from titan_exp.config.errors.did_you_mean import did_you_mean, listed
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.study.study import Axis, Choice, Condition, Study
from titan_exp.config.study.study_file import facts_of, override

SEED = "experiment.seed"
NAME = "experiment.name"


@dataclass(frozen=True)
class Point:
    """One point of a study or sweep, before it is composed."""

    overrides: tuple[str, ...]
    """All overrides, one per key."""
    label: str
    """Varied overrides, the seed included: the point's name."""
    variant: str = ""
    """In a study, varied overrides without the seed: runs of one variant are repetitions."""
    seed: int | None = None
    """Seed, if the study gives seeds."""
    facts: dict[str, str] = field(default_factory=dict, hash=False)
    """Values by key of everything that the study fixes or varies."""
    excluded: str | None = None
    """Reason for which the study excludes the point; None if it does not."""


def values_of(override: Override) -> list[str]:
    """The values of an override, which may be swept over, each as an override `key=value`.

    Raises:
        UserError: it is an interval, which has no end of values.
    """
    key = override.get_key_element()
    if not override.is_sweep_override():
        return [override.input_line or ""]
    if override.is_discrete_sweep():
        return [f"{key}={value}" for value in override.sweep_string_iterator()]
    raise UserError(
        f"{override.input_line}: an interval has no end of values, and this sweep tries all. "
        f"List them: {key}=1,2,3 or {key}=range(1,4)."
    )


def chosen_size(study: Study, asked: str | None) -> str:
    """Requested size, or the first; empty if the study has none.

    Raises:
        UserError: the study has no such size.
    """
    if asked is None:
        return next(iter(study.sizes), "")
    if asked in study.sizes:
        return asked
    has = f"{study.name} has {listed(study.sizes, 'and')}" if study.sizes else f"{study.path} has no sizes"
    raise UserError(f"size={asked}: there is no such size. {did_you_mean(asked, study.sizes) or has}")


def folder_name(study: Study, size: str) -> str:
    """The folder of the study's runs under `paths.runs`: each size but the first has its own."""
    return study.name if size == next(iter(study.sizes), "") else f"{study.name}_{size}"


def narrowed(study: Study, typed: Sequence[Override]) -> tuple[Study, tuple[str, ...]]:
    """The study with overrides laid over it that were typed: those of an axis' key replace its values, those that list
    values are further axes, and the others, which are returned, hold for every point.

    Raises:
        UserError: an override would tear apart values that the study gives together.
    """
    fixed: list[str] = []
    for one in typed:
        key, texts = one.key_or_group, values_of(one)
        axis = next((axis for axis in study.axes if key in _keys_of(axis)), None)
        choices = tuple(Choice((text,), text) for text in texts)
        if key == SEED and all(text.partition("=")[2].isdigit() for text in texts):
            study = replace(study, seeds=tuple(int(text.partition("=")[2]) for text in texts))
        elif axis is not None and axis.keys == (axis.name,):
            axes = tuple(replace(it, choices=choices) if it is axis else it for it in study.axes)
            study = replace(study, axes=axes)
        elif axis is not None:
            together = listed(_keys_of(axis), "and")
            raise UserError(
                f"{one.input_line}: this study varies {key} together with others ({together}). "
                f"Change it in {study.path}, or in a copy of your own: sweeps/{study.name}.yaml."
            )
        elif one.is_sweep_override():
            study = replace(study, axes=(*study.axes, Axis(key, (key,), choices)))
        else:
            fixed += texts
    return study, tuple(fixed)


def study_points(study: Study, size: str, fixed: Sequence[str] = ()) -> list[Point]:
    """Every point, the last axis varying fastest and the seed faster still; the excluded ones too, with the reason.

    Args:
        study: the study.
        size: the name of a size, or empty.
        fixed: further overrides of every point, which win over those of the study.

    Raises:
        UserError: no point is left, or two have the same label.
    """
    base = [override(NAME, folder_name(study, size)), *study.held_fixed, *study.sizes.get(size, ())]
    combinations: list[tuple[Choice, ...]] = [()]
    facts: list[dict[str, str]] = [_facts([*base, *fixed])]
    for axis in study.axes:
        grown: list[tuple[tuple[Choice, ...], dict[str, str]]] = []
        for chosen, known in zip(combinations, facts, strict=True):
            if _applies(axis, known):
                grown += [((*chosen, choice), known | facts_of(axis, choice)) for choice in axis.choices]
            else:
                grown.append((chosen, known))
        combinations, facts = [chosen for chosen, _ in grown], [known for _, known in grown]
    found = []
    leaves = Counter(key.rpartition(".")[2] for axis in study.axes for key in axis.keys)
    for chosen, known in zip(combinations, facts, strict=True):
        variant = " ".join(_shortened(choice, leaves) for choice in chosen) or "(nothing varies)"
        excluded = next((it.reason for it in study.exclude if all(one.holds(known) for one in it.conditions)), None)
        varied = [text for choice in chosen for text in choice.overrides]
        for seed in study.seeds or (None,):
            seeded = [] if seed is None else [f"{SEED}={seed}"]
            overrides = _last_wins([*base, *varied, *seeded, *fixed])
            label = variant if seed is None else f"{variant} seed={seed}"
            found.append(Point(overrides, label, variant, seed, known, excluded))
    _require_different(study, found)
    return found


def baseline_of(study: Study, points: Sequence[Point]) -> str | None:
    """Variant that the study names as its baseline; None if it names none.

    Raises:
        UserError: no point is meant, or several are.
    """
    asked = study.baseline
    if asked is None:
        return None
    variants = {point.variant: point for point in points}
    if isinstance(asked, str):
        if asked in variants:
            return asked
        meant = [name for name, point in variants.items() if asked in point.facts.values()]
        said = asked
    else:
        meant = [name for name, point in variants.items() if all(one.holds(point.facts) for one in asked)]
        said = " ".join(map(str, asked))
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise UserError(
            f"{study.path}: the baseline {said} means {len(meant)} points ({listed(meant[:4], 'and')}). Say more of it."
        )
    offer = did_you_mean(said, variants) or f"The points are {listed(list(variants)[:8], 'and')}."
    raise UserError(f"{study.path}: the baseline {said} is none of the study's points. {offer[:1].upper()}{offer[1:]}")


def _shortened(choice: Choice, leaves: Mapping[str, int]) -> str:
    """A choice's label, keys without their groups where no other axis has a key of that name."""
    if choice.label != " ".join(choice.overrides):
        return choice.label
    parts = []
    for text in choice.overrides:
        key, _, value = text.partition("=")
        leaf = key.rpartition(".")[2]
        parts.append(f"{leaf if leaves[leaf] == 1 else key}={value}")
    return " ".join(parts)


def _applies(axis: Axis, facts: dict[str, str]) -> bool:
    def holds(condition: Condition) -> bool:
        return condition.holds(facts)

    return all(map(holds, axis.when)) and not any(map(holds, axis.unless))


def _keys_of(axis: Axis) -> list[str]:
    inside = [key for choice in axis.choices for key in _facts(choice.overrides)]
    return list(dict.fromkeys([*axis.keys, *inside]))


def _facts(overrides: Iterable[str]) -> dict[str, str]:
    pairs = (text.partition("=") for text in overrides)
    return {key.lstrip("+~"): value for key, _, value in pairs}


def _last_wins(overrides: Sequence[str]) -> tuple[str, ...]:
    """Overrides without those that a later one of the same key replaces."""
    last = {text.partition("=")[0].lstrip("+"): place for place, text in enumerate(overrides)}
    return tuple(text for place, text in enumerate(overrides) if last[text.partition("=")[0].lstrip("+")] == place)


def _require_different(study: Study, points: Sequence[Point]) -> None:
    seen: set[str] = set()
    for point in points:
        if point.label in seen:
            raise UserError(f"{study.path}: two points are called {point.label!r}. Give the axes names that differ.")
        seen.add(point.label)
    if all(point.excluded for point in points):
        raise UserError(f"{study.path}: the study excludes every one of its {len(points)} points.")
