"""YAML files, read by one loader: strictly, within bounds, and a value as the same text on the command line.

YAML 1.1 reads `1:30:00` as 5400, `010` as 8, `off` as false and `2026-11-29` as a date. Here they are text, and the
type of their key says what becomes of it.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.paths.foreign_file import DEPTH, read_file

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
                problem = f"{key.value} stands here twice"
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
            raise BoundsError("its values are nested too deeply, or an alias (*name) stands inside what it names")
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

    Raises:
        UserError: the file cannot be read, or is not YAML, or is a list or a single value.
    """
    try:
        content = read_file(path) if content is None else content
        _, values = load_node(content.decode("utf-8-sig"), loader)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}.") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}, line {line}: not UTF-8 text (byte 0x{error.object[error.start]:02x}). Save the file as UTF-8."
        ) from error
    except BoundsError as error:
        raise UserError(f"{path}: {error}.") from error
    except yaml.YAMLError as error:
        raise UserError(_explain(path, error)) from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        found = "a list" if isinstance(values, list) else f"the single value {values!r}"
        raise UserError(f"{path} holds {found} where {holds} is expected: lines of `key: value`.")
    return values


def _explain(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = str(getattr(error, "problem", None) or getattr(error, "reason", None) or error)
    context = getattr(error, "context", None)
    # libyaml and PyYAML word the same problem differently.
    if "\\t" in problem or "tab" in problem or _has_tab(path, mark):
        problem, context = "a tab; YAML is indented with spaces", None
    where = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark is not None else str(path)
    return f"{where}: not YAML: {problem}{f' {context}' if context else ''}."


def _has_tab(path: Path, mark: Any) -> bool:
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    line = lines[mark.line] if mark is not None and mark.line < len(lines) else ""
    return "\t" in line[: len(line) - len(line.lstrip())]
