"""The language of the house: docstrings begin with the field's noun, and pages are written as people talk."""

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "titan_exp"
OPENING = re.compile(r"(What|Which|Whether|How|Where|Of|As|That)\b")
GUIDES = sorted(
    [
        *REPOSITORY.glob("docs/guides/*.md"),
        *REPOSITORY.glob("docs/tutorials/*.md"),
        *PACKAGE.glob("extensions/*/guides/*.md"),
    ]
)
PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted(REPOSITORY.glob("docs/*.md")), *GUIDES]
PAGES += sorted(REPOSITORY.glob("docs/tutorials/*.md"))
GENERATED = {"reference.md", "models.md", "huggingface_models.md"}
LIMITS = {"semicolons": (r";", 3.0), "passives": (r"\b(?:is|are|was|were|be|been)\s+\w+ed\b", 7.0)}
"""Patterns with their most occurrences in 1,000 words: torchtitan's, OLMo-core's and nanochat's pages have fewer."""
YOU, YOURS = r"\byou(?:rs?)?\b", 8.0
"""Pattern of words to the reader, and their least occurrences in 1,000 words of the guides."""


def docstrings(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [text for node in ast.walk(tree) if isinstance(node, kinds) and (text := ast.get_docstring(node))]


def prose(markdown: str) -> str:
    """Sentences of a page: without code, tables, headings and the targets of links."""
    text = re.sub(r"^```.*?^```|^(?: {4}|[|#%]).*?$", " ", markdown, flags=re.S | re.M)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", " x ", text)


def rate(pattern: str, texts: list[str]) -> float:
    """Occurrences of a pattern in 1,000 words."""
    words = sum(len(re.findall(r"[A-Za-z']+", text)) for text in texts)
    return 1000 * sum(len(re.findall(pattern, text, re.I)) for text in texts) / max(words, 1)


def test_docstrings_begin_with_the_noun():
    found = [(path, text) for path in PACKAGE.rglob("*.py") for text in docstrings(path)]
    bad = [f"{path.relative_to(REPOSITORY)}: {text.splitlines()[0]}" for path, text in found if OPENING.match(text)]
    assert len(bad) < 0.03 * len(found), "\n".join(bad)


@pytest.mark.parametrize("name", LIMITS)
def test_pages_are_written_as_people_talk(name: str):
    pattern, limit = LIMITS[name]
    pages = {path: prose(path.read_text()) for path in PAGES if path.name not in GENERATED}
    rates = {str(path.relative_to(REPOSITORY)): round(rate(pattern, [text]), 1) for path, text in pages.items()}
    assert {page: found for page, found in rates.items() if found > limit} == {}


def test_guides_speak_to_you():
    for pages in ([REPOSITORY / "README.md"], GUIDES):
        assert rate(YOU, [prose(page.read_text()) for page in pages]) > YOURS


def test_readme_stays_short():
    assert (REPOSITORY / "README.md").read_text().count("\n") < 250


def test_the_counts_notice_what_they_should():
    assert OPENING.match("Which ranks hold what.")
    assert not OPENING.match("Ranks that hold a shard.")
    page = "# It is coded; no\n\n```bash\na; b\n```\n| is shared; |\n"
    page += "You see `a; b` and [it](a;b). It is saved; so it was moved.\n"
    text = prose(page)
    assert {name: len(re.findall(pattern, text)) for name, (pattern, _) in LIMITS.items()} == {
        "semicolons": 1,
        "passives": 2,
    }
    assert len(re.findall(YOU, text, re.I)) == 1
