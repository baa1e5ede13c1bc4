"""YAML files of a user: read strictly, with one error that names the file and the line."""

import json
from pathlib import Path
from typing import Any

import yaml

from titan_exp.config.errors.user_error import UserError

Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader if PyYAML has it: same values, ten times faster."""


class StrictLoader(Loader):
    """YAML loader that rejects repeated keys."""

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


def read_yaml(path: Path, holds: str, loader: Any = None, *, content: bytes | None = None) -> dict[Any, Any]:
    """Read a YAML file of keys; empty if it has none. `holds` describes it, for messages; `content` was read already.

    Raises:
        UserError: the file cannot be read, or is not YAML, or is a list or a single value.
    """
    try:
        text = (path.read_bytes() if content is None else content).decode("utf-8-sig")
        values = yaml.load(text, loader or StrictLoader)
        json.dumps(values, default=str, skipkeys=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}.") from error
    except UnicodeDecodeError as error:
        line = path.read_bytes().count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}, line {line}: not UTF-8 text (byte 0x{error.object[error.start]:02x}). Save the file as UTF-8."
        ) from error
    except yaml.YAMLError as error:
        raise UserError(_explain(path, error)) from error
    except RecursionError as error:
        raise UserError(f"{path}: its values are nested too deeply.") from error
    except ValueError as error:
        raise UserError(f"{path}: an alias (*name) stands inside what it names. Write the value out.") from error
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
