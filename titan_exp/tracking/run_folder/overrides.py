"""Overrides of a run: in its folder a YAML list with one JSON string per line, in text as a shell reads them."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path


def overrides_text(overrides: Sequence[str]) -> str:
    """Content of a file of overrides."""
    return "".join(f"- {json.dumps(override, ensure_ascii=False)}\n" for override in overrides) or "[]\n"


def read_overrides(path: Path) -> tuple[str, ...] | None:
    """Overrides in a file; None if it is missing or was edited by hand."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return tuple(str(json.loads(line[2:])) for line in lines if line.startswith("- "))
    except (OSError, ValueError):
        return None


def for_shell(override: str) -> str:
    """Override as typed in a shell, in double quotes if its value has single ones."""
    return f'"{override}"' if "'" in override and not re.search(r'["$`\\!\n]', override) else shlex.quote(override)
