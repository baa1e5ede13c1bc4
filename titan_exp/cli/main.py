"""Command line entry point: dispatches `titan-exp VERB ...` to the module of the verb; and completion in a shell.

A verb is a module of this package with a function `run(argv) -> int`; the first line of its docstring is its help
line. No heavy imports here: help, completion and `--cfg` are fast.
"""

import ast
import importlib
import io
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from functools import cache
from pathlib import Path

from titan_exp import __version__
from titan_exp.cli.help import guides, tutorials
from titan_exp.cli.hydra_command import command_name
from titan_exp.config.command_line.output import FLAGS, json_output, safe_output
from titan_exp.config.errors.explained_errors import explain_os_error
from titan_exp.config.errors.user_error import UserError, listed, nearest
from titan_exp.config.extension import extensions, help_line, lacking, load, provided

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
            return sorted({*guides(), *tutorials()})
        if verb in ("status", "show", "diff", "logs", "cancel", "retry", "compare"):
            from titan_exp.launch.run_lookup import run_groups

            return sorted(run_groups(Path("runs")))
        return None
    return []


def _composed(rest: str, argv: Sequence[str]) -> list[str]:
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


USAGE = """\
titan-exp: pretraining experiments, from a composed configuration to a finished run.

  titan-exp VERB ...

Verbs
{verbs}

Start here
  titan-exp train +experiment=smoke      a test of the installation, in seconds
  titan-exp train                        a small language model on this machine, in minutes
  titan-exp train --help                 the groups, their options, and how to set any key
  titan-exp sweep                        list the studies and their questions
  titan-exp help TOPIC                   a tutorial or a guide

Tutorials
{tutorials}

Guides
{guides}

Exit codes
{codes}
"""

EXIT_CODES = {
    0: "done, or submitted; a study with `pairs:` has its answer, whatever that is",
    1: "a run failed; of several runs, one failed, hung or was refused. With a traceback, titan-exp itself failed",
    2: "refused, or something is unknown: the message says what to type. A run that reports such an error ends so, too",
    3: "a plan that does not fit its device, or a check of doctor that fails (--coordinates, --layout)",
    85: "stopped after saving, by cancel, a time limit or the scheduler: the same command continues",
    86: "hung, and ended by the watchdog: its log has the stacks",
    130: "stopped by Ctrl-C or another signal: the same command continues",
}
"""Exit codes of all verbs. Of several runs, the worst counts: 130, then 1, then 85, then 0."""

OTHER_VERBS = {
    "train": ("run", "start", "launch", "pretrain", "submit"),
    "status": ("list", "ls", "ps", "runs", "top"),
    "cancel": ("stop", "kill", "abort"),
    "retry": ("resume", "continue", "restart"),
    "logs": ("log", "tail"),
    "sweep": ("study", "studies", "grid"),
    "evaluate": ("eval", "validate", "test"),
    "convert": ("export",),
    "compare": ("plot", "report", "table"),
}
"""Words for a verb in other tools."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns one of `EXIT_CODES`."""
    typed = list(sys.argv[1:] if argv is None else argv)
    with_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    code = 0
    safe_output()
    os.umask(os.umask(0o077) | 0o002)  # no user outside the group may write code that a run executes
    try:
        # A verb of an extension prints its own JSON.
        asked = bool(FLAGS & {*typed}) and not {"--help", "-h"} & {*typed}
        asked = asked and not typed[0].startswith("-") and typed[0] not in provided("verbs")
        with json_output() if asked else nullcontext():
            code = _dispatch(typed)
        print(end="", flush=True)  # Python's own flush at exit would print its errors
        return code
    except UserError as error:
        if with_traceback:
            raise
        from titan_exp.config.schema.foreign_code import Untrusted

        print(error, file=sys.stderr)
        if isinstance(error, Untrusted):
            print(f"  titan-exp {shlex.join([*typed, '--trust'])}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader closed the pipe (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except (OSError, RuntimeError) as error:
        message = explain_os_error(error)
        if message is None or with_traceback:
            raise
        print(message, file=sys.stderr)
        return UserError.exit_code


@cache
def verbs() -> dict[str, str]:
    """One-line help of every verb, parsed from source without importing the modules; no flags that are verbs."""
    found: dict[str, str] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        module = ast.parse(path.read_bytes())
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in module.body):
            found[path.stem] = (ast.get_docstring(module) or "").partition("\n")[0]
    added = {verb: help_line(path) for verb, path in provided("verbs").items() if " " not in verb}
    return dict(sorted((added | found).items()))


def run_verb(verb: str, argv: Sequence[str]) -> int:
    """Run a verb, or print its `HELP_TEXT`; returns its exit code."""
    added, is_own = provided("verbs"), Path(__file__).with_name(f"{verb}.py").is_file()
    names = (f"{verb} {flag}" for flag in argv) if is_own else (verb,)
    if name := next((name for name in names if name in added), None):
        return _explained(load(added[name]), argv)
    module = importlib.import_module(f"titan_exp.cli.{verb}")
    if {"--help", "-h"} & set(argv) and hasattr(module, "HELP_TEXT"):
        print(module.HELP_TEXT, end="")
        return 0
    return _explained(module.run, argv)


def _explained(run: Callable[[list[str]], int], argv: Sequence[str]) -> int:
    """Run a verb. Overrides that Hydra cannot compose are explained, whichever verb composes them."""
    try:
        return run(list(argv))
    except Exception as error:
        if "hydra" not in sys.modules or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        from titan_exp.config.command_line.options import read_arguments
        from titan_exp.config.errors.explain_hydra import explain, is_composition_error

        if not is_composition_error(error):
            raise
        # Flags are the verb's own.
        raise explain(error, read_arguments([word for word in argv if not word.startswith("-")])) from error


def _indented(names: Iterable[str]) -> str:
    return textwrap.fill(", ".join(names), 112, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def _dispatch(argv: Sequence[str]) -> int:
    if argv and argv[0] in ("--shell-completion", "-sc"):
        return complete(argv, verbs())
    verb, *rest = argv or ["--help"]
    if verb in ("--help", "-h") or argv == ["help"]:
        lines = "\n".join(f"  {name:<10} {text}" for name, text in verbs().items())
        codes = "\n".join(f"  {code:<4} {text}" for code, text in EXIT_CODES.items())
        pages = {"tutorials": _indented(tutorials()), "guides": _indented(guides())}
        print(USAGE.format(verbs=lines, codes=codes, **pages), end="")
        return 0
    if verb == "--version":
        print(f"titan-exp {__version__}")
        for extension in extensions().values():
            print(f"  extension {extension.name}: {extension.summary}")
        return 0
    if verb in verbs():
        return run_verb(verb, rest)
    known = f"The verbs are {listed(verbs(), 'and')}."
    if verb.startswith("-") or "=" in verb:
        raise UserError(f"Begin with a verb: titan-exp train {' '.join(argv)}\n  {known}")
    if reason := lacking(verb):
        raise UserError(f"titan-exp {verb}: {reason}.")
    offer = [meant for meant, others in OTHER_VERBS.items() if verb in others][:1] or nearest(verb, verbs(), 1)
    suggestion = f"Did you mean titan-exp {' '.join([*offer, *rest])}? " if offer else ""
    raise UserError(f"{verb}: there is no such verb.\n  {suggestion}{known}")
