"""Overrides of a run: in its folder a YAML list with one JSON string per line, in text as a shell reads them."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from yaml import YAMLError

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.paths.foreign_file import of_kind, read_text
from titan_exp.config.paths.yaml_file import load_node


def overrides_text(overrides: Sequence[str]) -> str:
    """Content of a file of overrides."""
    return "".join(f"- {json.dumps(override, ensure_ascii=False)}\n" for override in overrides) or "[]\n"


def read_overrides(path: Path) -> tuple[str, ...] | None:
    """Overrides in a file; None if it is missing or holds something else."""
    try:
        _, lines = load_node(read_text(path))
        return of_kind(tuple[str, ...], lines)
    except (OSError, ValueError, YAMLError, UserError):
        return None


def for_shell(override: str) -> str:
    """Override as typed in a shell, in double quotes if its value has single ones."""
    return f'"{override}"' if "'" in override and not re.search(r'["$`\\!\n]', override) else shlex.quote(override)
