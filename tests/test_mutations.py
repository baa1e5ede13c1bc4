"""What mutations break is there: a list that runs by night must not rot by day."""

import ast
import pkgutil
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LISTS = sorted(path.relative_to(TESTS).as_posix() for path in TESTS.rglob("*mutations.py") if path.name[:5] != "test_")


def targets(path: Path) -> list[str]:
    """Names that calls of `patch` give as text; parts in braces are constants of the file."""
    tree = ast.parse(path.read_text())
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "patch" and node.args:
            parts = node.args[0].values if isinstance(node.args[0], ast.JoinedStr) else [node.args[0]]
            texts = [
                str(part.value) if isinstance(part, ast.Constant) else constants.get(ast.unparse(part.value))
                for part in parts
                if isinstance(part, ast.Constant | ast.FormattedValue)
            ]
            if texts and None not in texts:
                found.append("".join(map(str, texts)))
    return found


@pytest.mark.parametrize("path", LISTS)
def test_every_target_exists(path: str):
    for target in targets(TESTS / path):
        pkgutil.resolve_name(target)


def test_targets_are_found():
    assert sum(len(targets(TESTS / path)) for path in LISTS) > 120
