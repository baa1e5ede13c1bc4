"""The README says what each file of the house is; the sentence is the file's own."""

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
BEGIN, END = "<!-- house: written by `make golden` -->\n", "<!-- end of house -->\n"


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    # "et al." ends no sentence.
    return re.split(r"(?<=[.])(?<!al\.) ", text, maxsplit=1)[0]


def house() -> str:
    """A list for every room, a line for every file."""
    lines = []
    package = REPOSITORY / "titan_exp"
    for room in [*sorted(path for path in package.iterdir() if (path / "__init__.py").exists()), package]:
        if room != package:
            lines += ["", f"**`titan_exp/{room.name}/`** — {first_sentence(room / '__init__.py')}", ""]
        else:
            lines += ["", "**At the top**", ""]
        files = sorted(room.rglob("*.py") if room != package else room.glob("*.py"))
        lines += [
            f"- `{path.relative_to(room)}` — {first_sentence(path)}" for path in files if path != room / "__init__.py"
        ]
    return "\n".join(lines).lstrip("\n") + "\n"


def test_the_house_is_described_as_it_is(request: pytest.FixtureRequest):
    readme = REPOSITORY / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    written, _, after = rest.partition(END)
    if request.config.getoption("--update-golden"):
        readme.write_text(f"{before}{BEGIN}{house()}{END}{after}")
        return
    assert written == house(), "make golden writes it anew"


def test_every_file_says_what_it_is():
    for path in [*(REPOSITORY / "titan_exp").rglob("*.py"), *(REPOSITORY / "hydra_plugins").rglob("*.py")]:
        assert first_sentence(path).endswith((".", ":")), path
