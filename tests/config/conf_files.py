"""Files of conf/ as `make golden` writes them: a comment above each key from its docstring, and keys that are new.

A file keeps what a person decides: values, order, its header, comments beside a value, and those above a key that an
earlier file of the defaults list explains.
"""

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import CONF_DIR
from titan_exp.config.schema.component import config_class
from titan_exp.config.schema.schema import KeyText, choices_of, hints, texts

WIDTH = 120
LEFT_OUT = ("options",)
"""Keys for classes of the user's own, which options of a component need not have."""


@dataclasses.dataclass(frozen=True)
class Option:
    """Option of a group: its files in the order of composition, and the dataclass that types it."""

    files: tuple[Path, ...]
    kind: Any
    prefix: str
    """Group and a dot; empty for the primary file."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Lines of a key in a file, counted from 0: its own, and the one after its value."""

    line: int
    end: int
    indent: int


@cache
def options() -> tuple[Option, ...]:
    """Options of all groups, and the primary file."""
    found = [Option((CONF_DIR / "config.yaml",), Experiment, "")]
    for group in hints(Experiment):
        for path in sorted((CONF_DIR / group).glob("*.yaml")) if group != "experiment" else ():
            files = composed(path)
            values = {key: value for file in files for key, value in _read(file).items()}
            found.append(Option(files, config_class(group, values), f"{group}."))
    return tuple(found)


def composed(path: Path) -> tuple[Path, ...]:
    """Files of an option's defaults list, in their order, and the option's own last, as everywhere in conf/."""
    names = (name.partition("@")[0] for name in _read(path).get("defaults", ()) if name != "_self_")
    return tuple(dict.fromkeys([*(file for name in names for file in composed(path.parent / f"{name}.yaml")), path]))


def _read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text()) or {}


def places(text: str) -> dict[str, Place]:
    """Places of the dotted keys of a file."""

    def walk(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, Place]]:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            end = value.end_mark.line + (value.end_mark.column > 0)
            yield f"{prefix}{key.value}", Place(key.start_mark.line, end, key.start_mark.column)
            yield from walk(value, f"{prefix}{key.value}.")

    return dict(walk(yaml.compose(text), ""))


@cache
def declared(kind: Any, prefix: str = "") -> dict[str, tuple[dataclasses.Field, Any, KeyText]]:
    """Field, type and text of every dotted key of a dataclass."""
    found = {}
    for field in dataclasses.fields(kind):
        annotation, key = hints(kind)[field.name], f"{prefix}{field.name}"
        found[key] = (field, annotation, texts(kind)[field.name])
        found |= declared(annotation, f"{key}.") if dataclasses.is_dataclass(annotation) else {}
    return found


def allowed(meaning: str, annotation: Any) -> str:
    """Sentence with the words that a key takes; empty if `meaning` has them all."""
    words = [str(word).lower() if isinstance(word, bool) else word for word in choices_of(annotation)]
    said = {word.strip("`.,;:()") for word in meaning.split()}
    return "" if said >= set(words) else f" One of {', '.join(f'`{word}`' for word in words)}."


def comment(text: KeyText, annotation: Any, indent: int) -> list[str]:
    """Lines above a key: its meaning, and overrides to type, which are not broken."""
    start, example = f"{' ' * indent}# ", text.example.replace(" ", "\0")
    words = f"{text.summary}{allowed(text.summary, annotation)} {example}"
    lines = textwrap.wrap(words, WIDTH - len(start), break_long_words=False, break_on_hyphens=False)
    return [f"{start}{line}".replace("\0", " ") for line in lines]


def written(path: Path) -> str:
    """Text of a file with the keys that are new, and the comments of the keys that it is the first to have."""
    lines = path.read_text().splitlines()
    using = [option for option in options() if path in option.files]
    for key in new_keys().get(path, ()):
        _add(lines, key, using[0].kind)
    earlier = {key for option in using for file in option.files[: option.files.index(path)] for key in _keys(file)}
    for key, place in reversed(places("\n".join(lines)).items()):
        if key not in earlier and using and key in (known := declared(using[0].kind)):
            _, annotation, text = known[key]
            first = place.line
            while first > 0 and lines[first - 1].strip().startswith("#"):
                first -= 1
            above = comment(text, annotation, place.indent)
            lines[first : place.line] = [*lines[: place.line], "", *above] if first == 0 else above
    return "\n".join([*lines, ""])


@cache
def _keys(path: Path) -> frozenset[str]:
    return frozenset(places(path.read_text()))


@cache
def new_keys() -> Mapping[Path, list[str]]:
    """Keys with a default that no option of their dataclass has, by the file to add them to."""
    found: dict[Path, list[str]] = {}
    for kind in dict.fromkeys(option.kind for option in options()):
        same = [option for option in options() if option.kind is kind]
        present = {key for option in same for file in option.files for key in _keys(file)} | {*LEFT_OUT}
        for key, (field, *_) in declared(kind).items():
            parent = key.rpartition(".")[0]
            if key in present or (parent and parent not in present) or not _has_default(field):
                continue
            if kind is Experiment and not parent:
                continue  # a group is a folder
            for option in same:
                shared = [file for file in option.files if _all_have(file, key)]
                file = max(shared, key=lambda file: sum(other.rpartition(".")[0] == parent for other in _keys(file)))
                if key not in found.setdefault(file, []):
                    found[file].append(key)
    return found


def _has_default(field: dataclasses.Field) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _all_have(path: Path, key: str) -> bool:
    return all(key in declared(option.kind) for option in options() if path in option.files)


def _add(lines: list[str], key: str, kind: Any) -> None:
    """Add a key and its default after the field before it, or at the end of its group."""
    field, parent, at = declared(kind)[key][0], key.rpartition(".")[0], places("\n".join(lines))
    siblings = [other for other in declared(kind) if other.rpartition(".")[0] == parent]
    before = [other for other in siblings[: siblings.index(key)] if other in at]
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    end = at[before[-1]].end if before else at[parent].line + 1 if parent else len(lines)
    lines[end:end] = _value(field.name, default, at[before[-1]].indent if before else 2 * key.count("."))


def _value(name: str, value: Any, indent: int) -> list[str]:
    start = f"{' ' * indent}{name}:"
    if dataclasses.is_dataclass(value):
        inner = [_value(field.name, getattr(value, field.name), indent + 2) for field in dataclasses.fields(value)]
        return [start, *(line for part in inner for line in part)]
    plain = list(value) if isinstance(value, tuple) else value
    shown = yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
    return [f"{start} {shown}"]
