"""Files of conf/ as `make golden` writes them: a comment above each key from its docstring, and keys that are new.

A file keeps what a person decides: values, order, its header, comments beside a value, and those above a key that an
earlier file of the defaults list explains.
"""

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from titan_exp.config.extension import CONF_DIR, added_keys, shipped_options
from titan_exp.config.groups.experiment import Experiment
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
        for path in shipped_options(group).values() if group != "experiment" else ():
            files = composed(path)
            values = {key: value for file in files for key, value in _read(file).items()}
            found.append(Option(files, config_class(group, values), f"{group}."))
    return tuple(found)


def composed(path: Path) -> tuple[Path, ...]:
    """Files of an option's defaults list, in their order, and the option's own last, as everywhere in conf/."""
    names = (name.partition("@")[0] for name in _read(path).get("defaults", ()) if name != "_self_")
    folders = (path.parent, CONF_DIR / path.parent.name)  # an extension's option may begin with one of the core
    first = (next(file for folder in folders if (file := folder / f"{name}.yaml").is_file()) for name in names)
    return tuple(dict.fromkeys([*(file for option in first for file in composed(option)), path]))


@cache
def _read(path: Path) -> dict[str, Any]:
    return yaml.load(path.read_text(), yaml.CSafeLoader) or {}  # ten times as fast as safe_load, for each collection


def places(text: str) -> dict[str, Place]:
    """Places of the dotted keys of a file."""

    def walk(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, Place]]:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            yield f"{prefix}{key.value}", Place(key.start_mark.line, _end(value), key.start_mark.column)
            yield from walk(value, f"{prefix}{key.value}.")

    return dict(walk(yaml.compose(text), ""))


def _end(node: yaml.Node) -> int:
    """Line after a node: a block's own mark is behind the comments that follow it."""
    if isinstance(node, yaml.CollectionNode) and node.value and not node.flow_style:
        return _end(node.value[-1][1] if isinstance(node, yaml.MappingNode) else node.value[-1])
    return node.end_mark.line + (node.end_mark.column > 0)


@cache
def declared(kind: Any, prefix: str = "") -> dict[str, tuple[dataclasses.Field, Any, KeyText]]:
    """Field, type and text of every dotted key of a dataclass."""
    found = {}
    for field in dataclasses.fields(kind):
        annotation, key = hints(kind)[field.name], f"{prefix}{field.name}"
        found[key] = (field, annotation, texts(kind).get(field.name, KeyText("", "", "")))
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
    for key in new_keys().get(path, ()):
        _add(lines, key, using(path)[0].kind)
    at = places("\n".join(lines))
    for key, (_, annotation, text) in reversed(first_here(path, at).items()):
        first = at[key].line
        while first > 0 and lines[first - 1].strip().startswith("#"):
            first -= 1
        above = comment(text, annotation, at[key].indent)
        lines[first : at[key].line] = [*lines[: at[key].line], "", *above] if first == 0 else above
    return "\n".join([*lines, ""])


def first_here(path: Path, keys: Iterable[str]) -> dict[str, tuple[dataclasses.Field, Any, KeyText]]:
    """Those of the keys that no earlier file of a defaults list has, by the first dataclass that types the file."""
    earlier = {
        key for option in using(path) for file in option.files[: option.files.index(path)] for key in _keys(file)
    }
    known = declared(using(path)[0].kind)
    return {key: known[key] for key in keys if key in known and key not in earlier}


@cache
def using(path: Path) -> list[Option]:
    """Options that a file is part of."""
    return [option for option in options() if path in option.files]


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
        present |= {*added_keys(same[0].prefix.rstrip("."))} if same[0].files[0].is_relative_to(CONF_DIR) else set()
        for key, (field, *_) in declared(kind).items():
            parent = key.rpartition(".")[0]
            if key in present or (parent and parent not in present) or default_of(field) is dataclasses.MISSING:
                continue
            if kind is Experiment and not parent:
                continue  # a group is a folder
            for option in same:
                shared = [file for file in option.files if _all_have(file, key)]
                file = max(shared, key=lambda file: sum(other.rpartition(".")[0] == parent for other in _keys(file)))
                if key not in found.setdefault(file, []):
                    found[file].append(key)
    return found


def default_of(field: dataclasses.Field) -> Any:
    """Default of a field as YAML has it; MISSING without one."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return list(default) if isinstance(default, tuple) else default


def _all_have(path: Path, key: str) -> bool:
    return all(key in declared(option.kind) for option in using(path))


def _add(lines: list[str], key: str, kind: Any) -> None:
    """Add a key and its default after the field before it, or at the end of its group."""
    field, parent, at = declared(kind)[key][0], key.rpartition(".")[0], places("\n".join(lines))
    siblings = [other for other in declared(kind) if other.rpartition(".")[0] == parent]
    before = [other for other in siblings[: siblings.index(key)] if other in at]
    end = at[before[-1]].end if before else at[parent].line + 1 if parent else len(lines)
    lines[end:end] = _value(field.name, default_of(field), at[before[-1]].indent if before else 2 * key.count("."))


def _value(name: str, value: Any, indent: int) -> list[str]:
    start = f"{' ' * indent}{name}:"
    if dataclasses.is_dataclass(value):
        inner = [_value(field.name, getattr(value, field.name), indent + 2) for field in dataclasses.fields(value)]
        return [start, *(line for part in inner for line in part)]
    shown = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
    return [f"{start} {shown}"]
