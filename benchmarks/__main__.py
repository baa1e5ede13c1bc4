"""Command line of all benchmarks: `python -m benchmarks NAME [options]`.

A benchmark is a function marked `@benchmark` in a file of this folder; its options are the fields of a dataclass. The
list is read from the files, none of which is imported for it.
"""

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from benchmarks.bench import ROOT, CannotRun, Output, benchmark, tool

MARKS = (benchmark.__name__, tool.__name__)


@dataclass(frozen=True)
class Command:
    """Marked function, not imported yet."""

    name: str
    module: str
    function: str
    sentence: str
    """First sentence of its docstring."""
    measures: bool
    """False for a tool."""

    def load(self) -> Callable[..., int | None]:
        """Import the function."""
        return getattr(importlib.import_module(self.module), self.function)


def commands() -> dict[str, Command]:
    """Marked functions of this folder by name."""
    found = {}
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            marks = [mark.id for mark in node.decorator_list if isinstance(mark, ast.Name) and mark.id in MARKS]
            if marks:
                name, sentence = node.name.replace("_", "-"), (ast.get_docstring(node) or "").partition("\n\n")[0]
                text = " ".join(sentence.split())
                found[name] = Command(name, module, node.name, text, marks == [benchmark.__name__])
    return found


def listed() -> str:
    """Text of `--help`."""
    lines = ["usage: python -m benchmarks NAME [options]", "       python -m benchmarks NAME --help", ""]
    found = commands().values()
    width = max(len(command.name) for command in found)
    for heading, measures in (("Benchmarks:", True), ("\nTools:", False)):
        lines.append(heading)
        lines += [f"  {it.name:{width}}  {it.sentence}" for it in found if it.measures == measures]
    return "\n".join(lines)


def parser_of(command: Command, function: Callable[..., Any]) -> argparse.ArgumentParser:
    """Parser of a benchmark's options and the shared ones."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {command.name}",
        description=inspect.getdoc(function),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kind = get_type_hints(function)["options"]
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        add_option(parser, field, hints[field.name])
    if command.measures:
        parser.add_argument("--smallest", action="store_true", help="run at the smallest size")
        parser.add_argument(
            "--write", type=Path, metavar="FILE", help="what it prints; tables with all digits if .json"
        )
    return parser


def add_option(parser: argparse.ArgumentParser, field: "dataclasses.Field[Any]", hint: Any) -> None:
    """Declare the option of a field by its annotation."""
    known, flag = field.metadata, f"--{field.name.replace('_', '-')}"
    text = f"{known['help']} (default: {shown})" if (shown := shown_default(field.default)) else known["help"]
    if hint is bool:
        parser.add_argument(flag, action="store_true", help=text)
        return
    several = get_origin(hint) is tuple
    kinds = [kind for kind in get_args(hint) if kind not in (NoneType, Ellipsis)] or [hint]
    words: dict[str, Any] = {"type": known["parse"] or kinds[0], "default": field.default, "help": text}
    words |= {"choices": known["choices"]} if known["choices"] else {}
    if known["positional"]:
        words["nargs"] = argparse.REMAINDER if known["positional"] == "rest" else "*"
    elif several and not known["parse"]:
        words["nargs"] = "+"
    parser.add_argument(field.name if known["positional"] else flag, **words)


def shown_default(value: Any) -> str:
    """Default for the help, of which % signs are doubled; empty where there is nothing to say."""
    if value in (None, "", (), False):
        return ""
    return (" ".join(map(str, value)) if isinstance(value, tuple) else str(value)).replace("%", "%%")


def options_of(command: Command, function: Callable[..., Any], words: Sequence[str]) -> tuple[Any, Path | None]:
    """Options of a command line, and the file to write."""
    parser = parser_of(command, function)
    kind = get_type_hints(function)["options"]
    if getattr(parser.parse_args(words), "smallest", False):
        small = {it.name: it.metadata["smallest"] for it in dataclasses.fields(kind) if "smallest" in it.metadata}
        parser.set_defaults(**{name: value() if callable(value) else value for name, value in small.items()})
    given = vars(parser.parse_args(words))
    write = given.pop("write", None)
    given.pop("smallest", None)
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}), write


def call(function: str, arguments: str) -> int:
    """Call a function of a benchmark in this process; its result is the last line of JSON."""
    module, _, name = function.partition(":")
    print(json.dumps(getattr(importlib.import_module(module), name)(**json.loads(arguments))), flush=True)
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Run a benchmark; returns its exit code, 2 if it cannot run here."""
    name, *rest = words if words is not None else sys.argv[1:] or ["--help"]
    if name == "call":
        return call(*rest)
    if words is None:
        # An end by SIGTERM, too, ends what a benchmark has started.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    found = commands()
    if name not in found:
        known = name in ("-h", "--help")
        print(
            listed() if known else f"unknown benchmark {name}\n\n{listed()}", file=sys.stdout if known else sys.stderr
        )
        return 0 if known else 2
    function = found[name].load()
    options, write = options_of(found[name], function, rest)
    output = Output(write)
    try:
        return function(options, output) or 0
    except CannotRun as reasons:
        print(f"{name} cannot run here:", *(f"  {reason}" for reason in reasons.args), sep="\n", file=sys.stderr)
        return 2
    finally:
        output.close()


if __name__ == "__main__":
    sys.exit(main())
