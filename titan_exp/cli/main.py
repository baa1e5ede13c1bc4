"""Command line entry point: dispatches `titan-exp VERB ...` to the module of the verb.

A verb is a module of this package with a function `run(argv) -> int`; the first line of its docstring is its help
line. Heavy imports are avoided here, so that help, completion and `--cfg` are fast.
"""

import ast
import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from titan_exp import __version__
from titan_exp.cli.help import guides
from titan_exp.config.command_line.safe_output import safe_output
from titan_exp.config.errors.explained_errors import explain_os_error
from titan_exp.config.errors.user_error import UserError, listed, nearest
from titan_exp.config.extension import extensions, help_line, lacking, load, provided

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
  titan-exp help TOPIC                   a guide: {guides}
"""

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
"""Words that other tools use for a verb."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code: 0 done, 2 for a UserError, else the run's own."""
    typed = list(sys.argv[1:] if argv is None else argv)
    with_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    code = 0
    safe_output()
    os.umask(os.umask(0o077) | 0o002)  # what a run executes is no user's to write whom no group includes
    try:
        code = _dispatch(typed)
        print(end="", flush=True)  # Python's own flush at the exit prints its errors
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
    """One-line help of every verb, parsed from source without importing the modules. Flags that make a verb of the core
    another one are not listed."""
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
        return load(added[name])(list(argv))
    module = importlib.import_module(f"titan_exp.cli.{verb}")
    if {"--help", "-h"} & set(argv) and hasattr(module, "HELP_TEXT"):
        print(module.HELP_TEXT, end="")
        return 0
    return module.run(list(argv))


def _dispatch(argv: Sequence[str]) -> int:
    if argv and argv[0] in ("--shell-completion", "-sc"):
        from titan_exp.cli.shell.completion import complete

        return complete(argv, verbs())
    verb, *rest = argv or ["--help"]
    if verb in ("--help", "-h") or argv == ["help"]:
        lines = "\n".join(f"  {name:<10} {text}" for name, text in verbs().items())
        print(USAGE.format(verbs=lines, guides=", ".join(guides())), end="")
        return 0
    if verb == "--version":
        print(f"titan-exp {__version__}")
        for extension in extensions().values():
            print(f"  extension {extension.name}: {extension.summary}")
        return 0
    if verb in verbs():
        return run_verb(verb, rest)
    if verb.startswith("-") or "=" in verb:
        raise UserError(
            f"A verb comes first: titan-exp train {' '.join(argv)}\n  The verbs are {listed(verbs(), 'and')}."
        )
    offer = next(([meant] for meant, others in OTHER_VERBS.items() if verb in others), None) or nearest(
        verb, verbs(), 1
    )
    suggestion = f"Did you mean titan-exp {' '.join([*offer, *rest])}? " if offer else ""
    if reason := lacking(verb):
        raise UserError(f"titan-exp {verb}: {reason}.")
    raise UserError(f"{verb}: unknown verb.\n  {suggestion}The verbs are {listed(verbs(), 'and')}.")
