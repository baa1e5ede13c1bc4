"""Print a guide: titan-exp help TOPIC."""

import sys
from collections.abc import Sequence
from pathlib import Path

import titan_exp
from titan_exp.config.errors.user_error import UserError, did_you_mean, listed
from titan_exp.config.extension import extension_folders, lacking, provided


def run(argv: Sequence[str]) -> int:
    """Print the guide of a topic, formatted on a terminal; returns the exit code."""
    topic = argv[0] if len(argv) == 1 else " ".join(argv)
    found = guides()
    if topic not in found:
        if reason := lacking(f"help {topic}"):
            raise UserError(f"titan-exp help {topic}: {reason}.")
        verbs = [*(path.stem for path in Path(__file__).parent.glob("*.py")), *provided("verbs")]
        help_of_verb = f"The verb is described by titan-exp {topic} --help." if topic in verbs else ""
        offer = help_of_verb or did_you_mean(topic, found) or f"The guides are {listed(sorted(found), 'and')}."
        raise UserError(f"titan-exp help {topic}: unknown guide. {offer[:1].upper()}{offer[1:]}")
    text = found[topic].read_text(encoding="utf-8")
    if not sys.stdout.isatty():
        print(text, end="")
        return 0
    from rich.markdown import Markdown

    from titan_exp.config.command_line.terminal import Terminal

    Terminal().print(Markdown(text))
    return 0


def guides() -> dict[str, Path]:
    """Guides by topic: docs/guides in a checkout, or inside an installed package, and those of extensions."""
    package = Path(titan_exp.__file__).resolve().parent
    folders = [package / "docs" / "guides", package.parent / "docs" / "guides", *extension_folders("guides")]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.md"))}
