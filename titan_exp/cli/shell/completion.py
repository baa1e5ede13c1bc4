"""Shell completion: verbs, names of runs and studies, guides, options of a verb, and Hydra's groups and keys."""

import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path

from titan_exp.cli.shell.hydra_command import command_name

_LINE = re.compile(r"\s*(?P<command>(?:\S*python\S*\s+-m\s+)?\S+)\s+(?P<verb>\S*)(?P<space>\s*)(?P<rest>.*)")


def complete(argv: Sequence[str], verbs: Iterable[str]) -> int:
    """Print completions for COMP_LINE, none after an error; returns 0."""
    line = os.environ.get("COMP_LINE", "")
    typed = _LINE.match(line)
    if typed is None or not typed["space"]:
        print(" ".join(f"{verb} " for verb in verbs if verb.startswith(typed["verb"] if typed else "")))
        return 0
    verb, rest = typed["verb"], typed["rest"]
    _, space, overrides = rest.partition(" ")
    if verb == "sweep" and space:
        print("\n".join(_composed(overrides, argv)))
        return 0
    from titan_exp.config.command_line.help import GROUPS, complete_option, is_override, takes_override

    *before, word = rest.split(" ")
    names, options = _names(verb), complete_option(verb, word)
    if names is not None:
        print(" ".join([*(f"{name} " for name in names if name.startswith(word)), *options]))
        return 0
    if verb in GROUPS:
        line = " ".join([*(typed for typed in before if is_override(verb, typed)), word])
        options += [offer for offer in _composed(line, argv) if takes_override(verb, offer)]
    print("\n".join(options))
    return 0


def _names(verb: str) -> list[str] | None:
    """Names that may follow a verb; None if it takes none."""
    with suppress(Exception):
        if verb == "sweep":
            from titan_exp.config.study.study_file import study_files

            return sorted(study_files())
        if verb == "help":
            from titan_exp.cli.help import guides, tutorials

            return sorted({*guides(), *tutorials()})
        if verb in ("status", "show", "diff", "logs", "cancel", "retry", "compare"):
            from titan_exp.launch.state.run_lookup import run_groups

            return sorted(run_groups(Path("runs")))
        return None
    return []


def _composed(rest: str, argv: Sequence[str]) -> list[str]:
    """Hydra's completions for `titan-exp train`."""
    from titan_exp.cli.train import run

    os.environ["COMP_LINE"] = f"{command_name()} {rest}"
    stderr, sys.stderr = sys.stderr, open(os.devnull, "w")  # noqa: SIM115
    output = io.StringIO()
    try:
        with redirect_stdout(output), suppress(Exception, SystemExit):
            run(argv)
    finally:
        sys.stderr = stderr
    return output.getvalue().split()
