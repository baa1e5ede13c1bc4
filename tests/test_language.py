"""The language of the house: docstrings begin with the field's noun, and coy words do not come back."""

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "titan_exp"
OPENING = re.compile(r"(What|Which|Whether|How|Where|Of|As|That)\b")
BANNED = re.compile(
    r"(?<![a-zA-Z])(greatest|rubble|nobody|in (our|plain) words|(said|refused|answered|known|given|longer) in words|"
    r"goes on|gone on|told|born|dies|woven|weaves?|story|stories|seats?|standings?|foretells?|foretold|foreseen|"
    r"rehearse[ds]?|rehearsals?|pretend(s|ed|ing)?|whereabouts|beforehand)(?![a-zA-Z])",
    re.I,
)
TEXTS = sorted(
    path
    for pattern in (
        "titan_exp/**/*.py",
        "hydra_plugins/**/*.py",
        "conf/**/*.yaml",
        "sweeps/*.yaml",
        "docs/**/*.md",
        "titan_exp/extensions/*/**/*.yaml",
        "titan_exp/extensions/*/guides/*.md",
        "*.md",
    )
    for path in REPOSITORY.glob(pattern)
)


def docstrings(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [text for node in ast.walk(tree) if isinstance(node, kinds) and (text := ast.get_docstring(node))]


def test_docstrings_begin_with_the_noun():
    found = [(path, text) for path in PACKAGE.rglob("*.py") for text in docstrings(path)]
    bad = [f"{path.relative_to(REPOSITORY)}: {text.splitlines()[0]}" for path, text in found if OPENING.match(text)]
    assert len(bad) < 0.03 * len(found), "\n".join(bad)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_no_banned_word_comes_back(path: Path):
    lines = enumerate(path.read_text().splitlines(), 1)
    assert [f"{number}: {line.strip()}" for number, line in lines if BANNED.search(line)] == []


def test_the_language_test_notices_what_it_should():
    assert OPENING.match("Which ranks hold what.")
    assert not OPENING.match("Ranks that hold a shard.")
    for text in ("the greatest value", "def rehearse(", "a storage dies", "what nobody knows", "refused in words"):
        assert BANNED.search(text), text
    assert not BANNED.search("a history of studies, standard; bidirectional")
