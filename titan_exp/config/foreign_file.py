"""Files that somebody else wrote, read without following, waiting or growing: JSON by type, YAML by a strict loader."""

import gzip
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, BinaryIO, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

import yaml

from titan_exp.config.errors.user_error import UserError, shown

Kind = TypeVar("Kind")

FILE_BYTES = 2**26
"""Largest file that is read as a whole; records have kilobytes, the study of a thousand points a megabyte."""
LINE_BYTES = 2**24
"""Longest line; 94 layers of 128 experts take 70 kB."""
DEPTH = 64
"""Most brackets inside one another."""
LARGEST = 2.0**53
"""Largest number, to which floats hold every integer; dates, too, can be computed from it."""

_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading without waiting for a writer. Raises FileNotFoundError if there is none, and UserError if
    it is not a file, or cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"Cannot read {path}: {(error.strerror or str(error)).lower()}.") from error
    if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{path} is {'a folder' if stat.S_ISDIR(mode) else 'not a regular file'}. Move it away.")
    return os.fdopen(descriptor, "rb")


def read_file(path: Path) -> bytes:
    """Content of a file. Raises as `open_file`, and UserError if it is larger than `FILE_BYTES`."""
    with open_file(path) as file:
        try:
            content = file.read(FILE_BYTES + 1)
        except OSError as error:
            raise UserError(f"Cannot read {path}: {(error.strerror or str(error)).lower()}.") from error
    if len(content) > FILE_BYTES:
        size = f"{FILE_BYTES // 2**20} MiB"
        raise UserError(f"{path} is larger than {size}, so it cannot be what its name says. Move it away.")
    return content


def read_text(path: Path) -> str:
    """Text of a file, as `read_file`; bytes that are not UTF-8 are replaced."""
    return read_file(path).decode("utf-8-sig", errors="replace")


def read_lines(path: Path) -> Iterator[bytes]:
    """Lines of a file of any size, without their ends; it is unpacked if its name ends in `.gz`. Raises as `open_file`,
    and UserError at a line longer than `LINE_BYTES`."""
    with open_file(path) as file, gzip.open(file) if path.suffix == ".gz" else file as lines:
        for number, line in enumerate(iter(lambda: lines.readline(LINE_BYTES), b""), 1):
            if len(line) == LINE_BYTES:
                size = f"{LINE_BYTES // 2**20} MiB"
                raise UserError(f"{path}, line {number}: this line is longer than {size}. Remove it.")
            yield line.removesuffix(b"\n")


def parse_json(text: bytes | str, kind: type[Kind] | Any = Any) -> Any:
    """Value of a JSON text, of a type as in `of_kind`. Raises ValueError if it is none, or is nested too deeply."""
    text = text if isinstance(text, str) else text.decode("utf-8", errors="replace")
    if text.count("[") + text.count("{") > DEPTH and _depth(text) > DEPTH:
        raise ValueError(f"nested more than {DEPTH} deep")
    return of_kind(kind, json.loads(text))


def of_kind(kind: type[Kind] | Any, value: Any) -> Any:
    """JSON value as a type: a dataclass, a TypedDict, a tuple, a mapping, a union or a scalar. Raises ValueError if it
    is of another. Fields of a dataclass that are unknown are a newer release's, and left out; beside a missing one they
    are damaged names, since every release writes all of its fields and keeps them."""
    if kind is Any:
        return value
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        for one in arguments:
            with suppress(ValueError):
                return of_kind(one, value)
        names = ", ".join(getattr(one, "__name__", str(one)) for one in arguments)
        raise ValueError(f"{str(value)[:40]} is none of {names}")
    if origin is Literal:
        fits = value in arguments
    elif origin in (int, float):
        fits = type(value) in (int, origin) and math.isfinite(value) and abs(value) <= LARGEST
    elif origin in (str, bool, NoneType):
        fits = type(value) is origin
    elif origin in (tuple, list):
        fits = isinstance(value, list)
        value = origin(of_kind(arguments[0], item) for item in value) if fits else value
    elif is_dataclass(kind) or is_typeddict(kind):
        return _record(kind, value)
    else:
        fits = isinstance(value, dict)
        value = {key: of_kind(arguments[1], item) for key, item in value.items()} if fits and arguments else value
    if not fits:
        raise ValueError(f"{str(value)[:40]} is not {getattr(kind, '__name__', kind)}")
    return value


def _record(kind: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    hints, required = _fields(kind)
    if missing := required - value.keys():
        raise ValueError(f"without {', '.join(sorted(missing))}")
    if is_typeddict(kind):
        return {key: of_kind(hints.get(key, Any), item) for key, item in value.items()}
    if (unknown := value.keys() - hints.keys()) and hints.keys() - value.keys():
        raise ValueError(f"with an unknown {', '.join(sorted(unknown))}")
    return kind(**{key: of_kind(hints[key], item) for key, item in value.items() if key in hints})


@cache
def _fields(kind: Any) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Types of fields, and the fields without a default."""
    if is_typeddict(kind):
        return get_type_hints(kind), kind.__required_keys__
    needed = (field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING)
    return get_type_hints(kind), frozenset(needed)


def _depth(text: str) -> int:
    level = most = 0
    for mark in re.findall(r"[\[\]{}]", _STRING.sub("", text)):
        level += 1 if mark in "[{" else -1
        most = max(most, level)
    return most


def read_object(path: Path) -> dict[str, Any]:
    """Object in a JSON file. Raises UserError if the file cannot be read, or holds anything else, or is too large or
    too deeply nested."""
    try:
        return parse_object(read_file(path), str(path))
    except OSError as error:
        raise UserError(f"Cannot read {path} ({(error.strerror or str(error)).lower()}).") from error


def parse_object(content: bytes | str, name: str) -> dict[str, Any]:
    """Object in JSON text; `name` names it in the UserError about anything else."""
    values = parse_value(content, name)
    if not isinstance(values, dict):
        raise UserError(f"{name} is damaged: it holds {_kind(values)} instead of keys and values.")
    return values


def parse_value(content: bytes | str, name: str) -> Any:
    """Value in JSON text; `name` names it in the UserError about text that is none, or is too deeply nested."""
    try:
        return parse_json(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is damaged: it is not JSON ({error}).") from error


def _kind(value: object) -> str:
    names = {dict: "keys", list: "a list", str: "a text", bool: "a switch", int: "a number", float: "a number"}
    return names.get(type(value), "nothing")


def count(value: object, name: str, most: int = 2**63 - 1) -> int:
    """A whole number from 0 to `most`. Raises UserError that names anything else."""
    if type(value) is not int or not 0 <= value <= most:
        raise UserError(f"{name} is {shown(value)[:60]} instead of a whole number from 0 to {most:,}.")
    return value


def table(value: object, name: str) -> dict[str, Any]:
    """Keys and values. Raises UserError that names anything else."""
    if not isinstance(value, dict):
        raise UserError(f"{name} is {_kind(value)} instead of keys and values.")
    return value


def text(value: object, name: str) -> str:
    """A text. Raises UserError that names anything else."""
    if not isinstance(value, str):
        raise UserError(f"{name} is {_kind(value)} instead of a text.")
    return value


def items(value: object, name: str) -> list[Any]:
    """A list. Raises UserError that names anything else."""
    if not isinstance(value, list):
        raise UserError(f"{name} is {_kind(value)} instead of a list.")
    return value


def digests(value: object, name: str) -> dict[str, str]:
    """Texts by name. Raises UserError that names anything else."""
    return {key: text(one, f"{name}: {key}") for key, one in table(value, name).items()}


def file_name(value: object, name: str) -> str:
    """Name of a file in its folder. Raises UserError that names anything else, a path that leads out of it too."""
    found = text(value, name)
    if not found or Path(found).is_absolute() or ".." in Path(found).parts:
        raise UserError(f"{name} is {found[:60]!r}, which does not name a file in its folder.")
    return found


Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader if PyYAML has it: same values, ten times faster."""
VALUES = 1_000_000
"""Most values of a file, those of an alias (`*name`) counted wherever it stands."""

_TAG = "tag:yaml.org,2002:"
_KEPT = {
    first: [pair for pair in pairs if pair[0] in (f"{_TAG}null", f"{_TAG}merge")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_BOOL = re.compile("true|True|TRUE|false|False|FALSE")
_INT = re.compile("[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)")
_FLOAT = re.compile(
    r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))"
    r"|\.(?:nan|NaN|NAN)"
)
_DOTTED = re.compile(
    r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
)
_SWITCH = re.compile("on|off|yes|no", re.IGNORECASE)


def _resolvers(number: re.Pattern[str]) -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    forms = {"tTfF": ("bool", _BOOL), "-+0123456789": ("int", _INT), "-+.0123456789": ("float", number)}
    found = {first: list(pairs) for first, pairs in _KEPT.items() if pairs}
    for firsts, (tag, form) in forms.items():
        for first in firsts:
            found.setdefault(first, []).append((f"{_TAG}{tag}", re.compile(f"(?:{form.pattern})\\Z")))
    return found


class BoundsError(yaml.YAMLError):
    """YAML of too many values, or nested too deeply."""


class StrictLoader(Loader):
    """YAML loader that rejects repeated keys."""

    yaml_implicit_resolvers = _resolvers(_FLOAT)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Build a dictionary; its keys are different scalars."""
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                problem = "a list or mapping is used as a key"
            elif key.value in seen:
                problem = f"{key.value} occurs twice"
            else:
                seen.add(key.value)
                continue
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


class StudyLoader(StrictLoader):
    """YAML loader of studies, which keeps `1e-3` as typed: points are named by their values."""

    yaml_implicit_resolvers = _resolvers(_DOTTED)


def load_node(text: str, loader: Any = StrictLoader) -> tuple[yaml.Node | None, Any]:
    """Nodes and values of a YAML text. Raises YAMLError."""
    made = loader(text)
    try:
        node = made.get_single_node()
        values = None if node is None else made.construct_document(node)
    except (RecursionError, ValueError) as error:  # a number of thousands of digits
        raise BoundsError("its values are nested too deeply, or are too large") from error
    finally:
        made.dispose()
    left, waiting = VALUES, [(values, 0)]
    while waiting:
        value, depth = waiting.pop()
        left -= 1
        if depth > DEPTH or left < 0:
            raise BoundsError("its values are nested too deeply, or an alias (*name) lies inside what it names")
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        waiting += [(part, depth + 1) for part in parts]
    return node, values


def switch_words(node: yaml.Node) -> Iterator[tuple[list[str], yaml.ScalarNode]]:
    """Values `on`, `off`, `yes` and `no` without quotes, with their keys from the outside in."""
    waiting: list[tuple[list[str], yaml.Node]] = [([], node)]
    while waiting:
        path, each = waiting.pop()
        if isinstance(each, yaml.MappingNode):
            waiting += [([*path, str(key.value)], value) for key, value in each.value]
        elif isinstance(each, yaml.SequenceNode):
            waiting += [(path, value) for value in each.value]
        elif isinstance(each, yaml.ScalarNode) and not each.style and _SWITCH.fullmatch(each.value):
            yield path, each


def read_yaml(path: Path, holds: str, loader: Any = StrictLoader, *, content: bytes | None = None) -> dict[Any, Any]:
    """Read a YAML file of keys; empty if it has none. `holds` describes it, for messages; `content` was read already.
    Raises UserError if the file cannot be read, or is not YAML, or is a list or a single value."""
    try:
        content = read_file(path) if content is None else content
        _, values = load_node(content.decode("utf-8-sig"), loader)
    except OSError as error:
        raise UserError(f"Cannot read {path}: {(error.strerror or str(error)).lower()}.") from error
    except UnicodeDecodeError as error:
        line, byte = error.object.count(b"\n", 0, error.start) + 1, f"byte 0x{error.object[error.start]:02x}"
        raise UserError(f"{path}, line {line}: this is not UTF-8 text ({byte}). Save the file as UTF-8.") from error
    except BoundsError as error:
        raise UserError(f"{path}: {error}.") from error
    except yaml.YAMLError as error:
        raise UserError(_explain(path, error)) from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        found = "a list" if isinstance(values, list) else f"the single value {values!r}"
        raise UserError(f"{path} holds {found} instead of {holds}, which is lines of `key: value`.")
    return values


def _explain(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = str(getattr(error, "problem", None) or getattr(error, "reason", None) or error)
    context = getattr(error, "context", None)
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    line = lines[mark.line] if mark is not None and mark.line < len(lines) else ""
    # libyaml and PyYAML word the same problem differently.
    if "\\t" in problem or "tab" in problem or "\t" in line[: len(line) - len(line.lstrip())]:
        problem, context = "there is a tab, and YAML takes only spaces to indent", None
    where = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark is not None else str(path)
    return f"{where}: this is not YAML: {problem}{f' {context}' if context else ''}."


class NotedKeys(dict[str, Any]):
    """Keys and values; `last` is the key that was read last."""

    last: str = ""

    def __getitem__(self, key: str) -> Any:
        self.last = key
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a key, or the default."""
        self.last = key
        return super().get(key, default)


@contextmanager
def named_errors(values: NotedKeys, name: str, whose: str) -> Iterator[None]:
    """Raise a UserError that names the file and the key for whatever a value of another type breaks; `whose` file has
    the keys that are missing."""
    try:
        yield
    except KeyError as error:
        raise UserError(f"{name} has no {error.args[0]}, which {whose} has.") from error
    except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as error:
        found = shown(values.get(values.last))[:60]
        raise UserError(f"{name}: cannot use {values.last}={found} ({error}).") from error
