"""Print a guide or a tutorial: titan-exp help TOPIC."""

import sys
from collections.abc import Sequence
from pathlib import Path

import titan_exp
from titan_exp.config.errors.user_error import UserError, did_you_mean, listed
from titan_exp.config.extension import extension_folders, lacking, provided


def run(argv: Sequence[str]) -> int:
    """Print the page of a topic, formatted on a terminal; returns the exit code."""
    topic = argv[0] if len(argv) == 1 else " ".join(argv)
    found = guides() | tutorials()
    if topic not in found:
        if reason := lacking(f"help {topic}"):
            raise UserError(f"titan-exp help {topic}: {reason}.")
        verbs = [*(path.stem for path in Path(__file__).parent.glob("*.py")), *provided("verbs")]
        help_of_verb = f"To read about the verb, type titan-exp {topic} --help." if topic in verbs else ""
        known = f"The guides are {listed(sorted(guides()), 'and')}, the tutorials {listed(sorted(tutorials()), 'and')}."
        offer = help_of_verb or did_you_mean(topic, found) or known
        raise UserError(f"titan-exp help {topic}: there is no such page. {offer[:1].upper()}{offer[1:]}")
    text = found[topic].read_text(encoding="utf-8")
    if not sys.stdout.isatty():
        print(text, end="")
        return 0
    from rich.markdown import Markdown

    from titan_exp.config.command_line.terminal import Terminal

    Terminal().print(Markdown(text))
    return 0


def guides() -> dict[str, Path]:
    """Guides by topic, those of extensions included."""
    return _pages("guides", *extension_folders("guides"))


def tutorials() -> dict[str, Path]:
    """Tutorials by topic."""
    return _pages("tutorials")


def _pages(kind: str, *more: Path) -> dict[str, Path]:
    """Pages by name in docs/KIND of a checkout, or inside an installed package, and in further folders."""
    package = Path(titan_exp.__file__).resolve().parent
    folders = [package / "docs" / kind, package.parent / "docs" / kind, *more]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.md"))}
