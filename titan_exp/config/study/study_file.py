"""Study files: found by name, read into a `Study`, with every mistake reported at once."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml

from titan_exp.config.errors.did_you_mean import did_you_mean, listed
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.study.study import Axis, Choice, Condition, Direction, Exclusion, Study

_PACKAGE = Path(__file__).resolve().parents[2]
SWEEPS_DIR = next(
    (folder for folder in (_PACKAGE / "sweeps", _PACKAGE.parent / "sweeps") if folder.is_dir()), _PACKAGE / "sweeps"
)
"""The folder of the shipped studies: inside an installed package, beside the package in a checkout."""
OWN_DIR = Path("sweeps")
"""The user's own, in the current directory; they come before shipped ones of the same name."""

METRICS = ("loss", "validation_loss", "validation_perplexity", "grad_norm", "tokens_per_second")
METRICS += ("tokens_per_second_per_device", "tflops", "mfu", "memory", "memory_reserved")
"""Metrics that runs log. Those of a mixture's source (`validation_loss/NAME`) may be compared as well."""
FIELDS = ("question", "held_fixed", "sizes", "axes", "exclude", "seeds", "baseline", "metrics")
KINDS = ("grid", "zip", "list")
DIRECTIONS: tuple[str, ...] = get_args(Direction)


def study_files() -> dict[str, Path]:
    """The studies there are, by name: those of the current directory's `sweeps/`, then the shipped ones."""
    own = sorted(OWN_DIR.glob("*.yaml")) if OWN_DIR.is_dir() else []
    return {path.stem: path for path in [*sorted(SWEEPS_DIR.glob("*.yaml")), *own]}


def find_study(asked: str) -> Path:
    """File of a study, by its name or path.

    Raises:
        UserError: there is none.
    """
    if asked.endswith((".yaml", ".yml")) or os.sep in asked:
        path = Path(asked).expanduser()
        if path.is_file():
            return path
        raise UserError(f"{asked}: there is no such file. A study is a YAML file, such as those in {SWEEPS_DIR}.")
    files = study_files()
    if asked in files:
        return files[asked]
    offer = did_you_mean(asked, files)
    raise UserError(
        f"{asked}: there is no such study. {offer[:1].upper()}{offer[1:]}{' ' if offer else ''}"
        f"The studies are {listed(files or ['none'], 'and')}; your own go into sweeps/ where you type the command."
    )


def read_study(path: Path) -> Study:
    """Read a study's file.

    Raises:
        UserError: it cannot be read, with a violation for every mistake in it.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no study. A study has {listed(FIELDS, 'and')}.")
    reader = _Reader()
    study = reader.study(path, content)
    if reader.found:
        raise UserError(f"{path}: this study cannot be read.", reader.found)
    return study


def override(key: str, value: Any) -> str:
    """The override that gives a key a value from YAML. Text stands as it is where Hydra reads it as text or number."""
    return f"{key}={_text(value)}"


def facts_of(axis: Axis, choice: Choice) -> dict[str, str]:
    """The values that a choice gives, by key."""
    facts = {text.partition("=")[0].lstrip("+"): text.partition("=")[2] for text in choice.overrides}
    if axis.keys:
        return facts
    # A point of a list also goes by its name.
    return facts | {axis.name or choice.label: choice.label.removeprefix(f"{axis.name}=")}


class _Loader(yaml.SafeLoader):
    """YAML, but a key that stands twice is an error (the last one would win without a word), and `off` is a word."""

    yaml_implicit_resolvers = {  # noqa: RUF012  # PyYAML's own name, read when the class is used
        first: [(tag, form) for tag, form in pairs if not tag.endswith(":bool") or first in "tTfF"]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} stands here twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Reader:
    """Reads the parts of a study and collects what is wrong with them."""

    def __init__(self) -> None:
        self.found: list[Violation] = []

    def wrong(self, field: str, value: Any, reason: str, remedy: str) -> None:
        self.found.append(Violation(field, "" if isinstance(value, dict | list) else value, reason, remedy))

    def study(self, path: Path, content: Mapping[Any, Any]) -> Study:
        self._only(content, FIELDS, "", "a study")
        question = content.get("question")
        if not isinstance(question, str) or not question.strip():
            self.wrong("question", question or "", "a study asks something", "question: Which learning rate is best?")
        fixed = self._overrides("held_fixed", content.get("held_fixed"))
        sizes = self._mapping("sizes", content.get("sizes"), "laptop: [training.steps=100]")
        sizes = {str(name): self._overrides(f"sizes.{name}", value) for name, value in sizes.items()}
        axes = tuple(self._axes(content.get("axes")))
        known = {
            text.partition("=")[0].lstrip("+~") for text in [*fixed, *(it for size in sizes.values() for it in size)]
        }
        self._check_conditions(axes, known)
        known |= _names(axes)
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
            metrics=self._metrics(content.get("metrics")),
        )

    def _only(self, content: Mapping[Any, Any], names: Sequence[str], prefix: str, what: str) -> None:
        for key in content:
            if key not in names:
                offer = did_you_mean(str(key), names) or f"{what} has {listed(names, 'and')}"
                self.wrong(f"{prefix}{key}", "", "there is no such key", offer)

    def _mapping(self, field: str, value: Any, example: str) -> Mapping[Any, Any]:
        if value is None or isinstance(value, dict):
            return value or {}
        self.wrong(field, value, "must be names with values", f"{field}:\n      {example}")
        return {}

    def _overrides(self, field: str, value: Any) -> tuple[str, ...]:
        if value is None:
            return ()
        if not isinstance(value, list):
            self.wrong(
                field, value, "a list of overrides is meant", f"{field}: [model=llama_debug, training.steps=100]"
            )
            return ()
        for entry in value:
            if not isinstance(entry, str) or ("=" not in entry and not entry.startswith("~")):
                said = override(*next(iter(entry.items()))) if isinstance(entry, dict) and entry else f"{entry}=..."
                self.wrong(field, str(entry), "an override is key=value, as on the command line", f"write {said}")
        return tuple(entry for entry in value if isinstance(entry, str))

    def _axes(self, value: Any) -> Iterator[Axis]:
        example = "axes:\n      - grid: {optimizer.lr: [1e-3, 3e-3]}"
        if not isinstance(value, list) or not value:
            self.wrong("axes", "" if value is None else value, "a list of axes is meant", example)
            return
        for place, block in enumerate(value, 1):
            field = f"axes[{place}]"
            kinds = [kind for kind in KINDS if isinstance(block, dict) and kind in block]
            if len(kinds) != 1:
                keys = [str(key) for key in block] if isinstance(block, dict) else []
                offer = next((found for key in keys if (found := did_you_mean(key, KINDS))), "")
                self.wrong(field, "" if keys else block, f"an axis is one of {listed(KINDS)}", offer or example)
                continue
            self._only(block, (kinds[0], "name", "when", "unless"), f"{field}.", f"an axis of kind {kinds[0]}")
            yield from self._block(field, kinds[0], block)

    def _block(self, field: str, kind: str, block: Mapping[str, Any]) -> Iterator[Axis]:
        content = self._mapping(f"{field}.{kind}", block[kind], "optimizer.lr: [1e-3, 3e-3]")
        when, unless = (self._conditions(f"{field}.{word}", block.get(word)) for word in ("when", "unless"))
        name = str(block.get("name") or "")
        if kind == "list":
            points = {str(label): self._overrides(f"{field}.list.{label}", its) for label, its in content.items()}
            choices = tuple(Choice(its, f"{name}={label}" if name else label) for label, its in points.items())
            yield Axis(name, (), choices, when, unless)
            return
        if name:
            self.wrong(f"{field}.name", name, f"the axes of a {kind} are named by their keys", "leave the name out")
        for key, values in content.items():
            if not isinstance(values, list) or not values:
                self.wrong(f"{field}.{kind}.{key}", values, "a list of values is meant", f"{key}: [{_text(values)}]")
                content = {other: its for other, its in content.items() if other != key}
        if kind == "grid":
            for key, values in content.items():
                texts = [override(str(key), value) for value in values]
                yield Axis(str(key), (str(key),), tuple(Choice((text,), text) for text in texts), when, unless)
        elif content:
            lengths = {str(key): len(values) for key, values in content.items()}
            if len(set(lengths.values())) > 1:
                said = listed([f"{key} has {count}" for key, count in lengths.items()], "and")
                self.wrong(
                    f"{field}.zip", "", f"values are taken side by side, and {said}", "give each the same number"
                )
            rows = zip(*content.values(), strict=False)
            sides = [tuple(map(override, map(str, content), row)) for row in rows]
            yield Axis("", tuple(lengths), tuple(Choice(side, " ".join(side)) for side in sides), when, unless)

    def _conditions(self, field: str, value: Any) -> tuple[Condition, ...]:
        content = self._mapping(field, value, "parallelism.cp: [2, 4]")
        return tuple(
            Condition(str(key), tuple(_text(it) for it in (values if isinstance(values, list) else [values])))
            for key, values in content.items()
        )

    def _check_conditions(self, axes: Sequence[Axis], known: set[str]) -> None:
        """A condition looks at what is held fixed and at the axes above."""
        for place, axis in enumerate(axes):
            above = known | _names(axes[:place])
            for word in ("when", "unless"):
                for condition in getattr(axis, word):
                    self._known(f"{word}.{condition.key}", condition, axes[:place], above)

    def _known(self, field: str, condition: Condition, axes: Sequence[Axis], known: set[str]) -> None:
        if condition.key not in known:
            offer = did_you_mean(condition.key, sorted(known)) or f"there are {listed(sorted(known), 'and')}"
            self.wrong(field, "", "neither an axis (above this one) nor held fixed", offer)
            return
        axis = next((axis for axis in axes if condition.key in (axis.name, *axis.keys)), None)
        if axis is None:
            return
        values = [facts_of(axis, choice).get(condition.key, "") for choice in axis.choices]
        for value in condition.values:
            if not any(Condition(condition.key, (value,)).holds({condition.key: its}) for its in values):
                self.wrong(field, value, "this axis has no such value", did_you_mean(value, values) or listed(values))

    def _exclusions(self, value: Any, axes: Sequence[Axis], known: set[str]) -> Iterator[Exclusion]:
        if value is not None and not isinstance(value, list):
            self.wrong("exclude", value, "must be a list", "exclude:\n      - {parallelism.tp: 4, parallelism.pp: 4}")
            return
        for place, entry in enumerate(value or [], 1):
            content = dict(self._mapping(f"exclude[{place}]", entry, "parallelism.tp: 4"))
            reason = content.pop("reason", None)
            conditions = self._conditions(f"exclude[{place}]", content)
            for condition in conditions:
                self._known(f"exclude[{place}].{condition.key}", condition, axes, known)
            said = " ".join(map(str, conditions))
            yield Exclusion(conditions, f"excluded by the study: {reason or said}")

    def _seeds(self, value: Any) -> tuple[int, ...]:
        seeds = list(range(value)) if isinstance(value, int) and not isinstance(value, bool) else value
        if seeds is None:
            return ()
        if not isinstance(seeds, list) or not all(isinstance(it, int) and it >= 0 for it in seeds) or not seeds:
            self.wrong(
                "seeds", value, "a number of seeds, or a list of them, is meant", "seeds: 3, or seeds: [0, 1, 2]"
            )
            return ()
        return tuple(dict.fromkeys(seeds))

    def _baseline(self, value: Any, axes: Sequence[Axis], known: set[str]) -> tuple[Condition, ...] | str | None:
        if value is None or isinstance(value, str):
            return value
        conditions = self._conditions("baseline", value)
        for condition in conditions:
            self._known(f"baseline.{condition.key}", condition, axes, known)
        return conditions

    def _metrics(self, value: Any) -> dict[str, Any]:
        metrics = dict(self._mapping("metrics", value, "validation_loss: min"))
        for name, direction in metrics.items():
            if name not in METRICS and "/" not in str(name):
                offer = did_you_mean(str(name), METRICS) or f"runs log {listed(METRICS, 'and')}"
                self.wrong(f"metrics.{name}", "", "no run logs this", offer)
            if direction not in DIRECTIONS:
                self.wrong(f"metrics.{name}", direction, "which end is better: min or max", f"{name}: min")
        return metrics


def _names(axes: Sequence[Axis]) -> set[str]:
    return {name for axis in axes for name in (axis.name, *axis.keys) if name}


def _text(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return str(value)
        case list():
            return f"[{','.join(map(_text, value))}]"
        case dict():
            return f"{{{','.join(f'{key}:{_text(part)}' for key, part in value.items())}}}"
        case _:
            return _quoted(str(value))


def _quoted(text: str) -> str:
    """Text as an override's value: in quotes where it holds what Hydra would read otherwise."""
    if text and not set(text) & set(" ,()[]{}'\"\\=#\t\n"):
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
