"""Option parser of all verbs: `--name value`, `--name=value` and `name=value`, parsed into a dataclass."""

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from titan_exp.config.errors.user_error import UserError, Violation, did_you_mean, listed, nearest, shown
from titan_exp.config.extension import lacking
from titan_exp.config.schema.schema import docstrings, hints, other_names, takes_switch, value_keys

Options = TypeVar("Options")

RUNS = "paths.runs="
"""Spelling of the option `runs` of every verb that reads runs, as in `train`; without its group it is read too."""

HELP = ("--help", "-h", "help")
"""Help flags of a verb."""


def options_help(usage: str, kind: type) -> str:
    """Help text of a verb: usage, and every option with default and description."""
    lines = [usage, ""]
    for field in sorted(dataclasses.fields(kind), key=lambda field: field.name == "runs"):
        default = "" if field.default in ("", None, False) else shown(field.default)
        lines.append(f"  {option_name(kind, field)}{default}")
        meaning = " ".join(docstrings(kind).get(field.name, "").split())
        lines += textwrap.wrap(meaning, 112, initial_indent="      ", subsequent_indent="      ")
    return "\n".join([*lines, "", "You can also write an option as --name value or --name=value.", ""])


def option_name(kind: type, field: dataclasses.Field[Any]) -> str:
    """Canonical spelling of an option: `--watch` for a switch that is off by default, else `name=`."""
    if field.name == "runs":
        return RUNS
    is_switch = field.default is False and takes_switch(hints(kind)[field.name])
    return _flag(field.name) if is_switch else f"{field.name}="


def parse_options(kind: type[Options], argv: Sequence[str], *, positional: Sequence[str] = ()) -> Options:
    """Parse arguments into a dataclass; the first unnamed arguments fill the `positional` fields."""
    options, rest = take_options(kind, argv, positional=positional)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]  # a dataclass
    if rest:
        known, found = f"the options are {listed(names, 'and')}", list[Violation]()
        for key, _, value in (word.partition("=") for word in rest if "=" in word):
            reason = lacking(f"{_verb(kind)} {key}") or "unknown option"
            found.append(Violation(key, value, reason, did_you_mean(key, names) or known))
        if bare := " ".join(word for word in rest if "=" not in word):
            spelling = f"write an option as name=value, in quotes if it contains spaces: {known}"
            remedy = did_you_mean(bare, names) or spelling
            if "prompt" in names:
                remedy = f"to continue this text, write prompt='{bare}'"
            found.append(Violation(bare, "", "no option has this name", remedy))
        raise _refused(found)
    return options


def take_options(
    kind: type[Options],
    argv: Sequence[str],
    *,
    positional: Sequence[str] = (),
    others: Sequence[str] = (),
    verb: str = "",
) -> tuple[Options, list[str]]:
    """Parse the arguments that are options into a dataclass; returns it and the other arguments. `others` are flags of
    another parser, which are returned unparsed. The dataclass is named after its `verb`, unless given."""
    from pydantic import TypeAdapter, ValidationError

    from titan_exp.config.errors.explain_values import from_pydantic

    fields = hints(kind)
    switches = [_flag(name) for name, annotation in fields.items() if takes_switch(annotation)]
    valued = {_flag(name): str for name, annotation in fields.items() if annotation is not bool and name != "runs"}
    verb = verb or _verb(kind)
    values: dict[str, Any] = {}
    if "runs" in fields:
        values["runs"], argv = take_runs(argv)
    found, unread = take_flags(argv, switches, valued, others=others, verb=verb)
    values |= {flag[2:].replace("-", "_"): value for flag, value in found.items()}
    places, rest = list(positional), list[str]()
    for word in unread:
        key, equals, value = word.partition("=")
        name = key.replace("-", "_")
        if equals and name in fields:
            values[name] = value
        elif places and (not equals or "/" in key or ":" in key):  # a run of a study by its label, or a package
            values[places.pop(0)] = word
        else:
            rest.append(word)
    try:
        return TypeAdapter(kind).validate_python(values), rest
    except ValidationError as error:
        details = [(str(detail["loc"][0]), detail) for detail in error.errors(include_url=False)]
        meanings = docstrings(kind)
        found = [from_pydantic(detail, name, fields[name], meanings.get(name, "")) for name, detail in details]
        raise _refused(found) from error


def require_alone(name: str, value: str, argv: Sequence[str]) -> None:
    """Raise UserError if there are other arguments beside an option that takes none."""
    if others := [f"{word.partition('=')[0]}=" for word in argv if not word.startswith(f"{name}=")]:
        remedy = f"leave {listed(others, 'and')} out"
        raise _refused([Violation(name, value, "it takes no other arguments", remedy)])


def take_runs(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Folder of runs that `paths.runs=FOLDER` names, empty without it, and the other arguments."""
    found, rest, queue = "", list[str](), list(argv)
    while queue:
        word = queue.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if key not in (RUNS[:-1], "runs") or not (equals or (word.startswith("--") and queue)):
            rest.append(word)
            continue
        value = value if equals else queue.pop(0)
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"  # as Hydra reads it in train
        found = value[1:-1] if quoted else value
    return found, rest


def take_flags(
    argv: Sequence[str],
    switches: Iterable[str],
    valued: Mapping[str, type] | None = None,
    *,
    others: Iterable[str] | None = None,
    offered: Iterable[str] = (),
    verb: str = "",
) -> tuple[dict[str, str | int | bool], list[str]]:
    """Flags with their values, and the other arguments. `switches` take no value; `valued` flags take one, `--jobs 4`
    or `--jobs=4`, of type `str`, or `int` from 0. A flag in both may have one after `=`. `others` belong to another
    parser and are returned unparsed; `offered` are further flags of the verb, for suggestions."""
    alone, with_value, foreign = set(switches), dict(valued or {}), set(others or ())
    found: dict[str, str | int | bool] = {}
    rest: list[str] = []
    queue = list(argv)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.partition("=")
        if word in alone:
            found[word] = True
        elif name in with_value:
            if not equals:
                if not queue:
                    raise UserError(f"{name} needs a value after it. See titan-exp {verb} --help.")
                value = queue.pop(0)
            if with_value[name] is int and not value.isdigit():
                raise UserError(f"{name} {value}: must be a whole number, such as {name} 2.")
            found[name] = with_value[name](value)
        elif word.startswith("-") and word != "-" and name not in foreign:
            after = queue[0] if queue and not equals and "=" not in queue[0] and not queue[0].startswith("-") else ""
            raise UserError(_unknown(word, after, [*alone, *with_value, *offered], foreign, verb))
        else:
            rest.append(word)
    return found, rest


def _verb(kind: type) -> str:
    return kind.__name__.removesuffix("Options").lower()


def _refused(violations: Sequence[Violation]) -> UserError:
    return UserError("Cannot read these options.", violations)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _unknown(word: str, after: str, own: Sequence[str], foreign: Iterable[str], verb: str) -> str:
    """Message for an unknown flag; `after` is the word after it if that may be its value."""
    if reason := lacking(f"{verb} {word}"):
        return f"{word}: {reason}"
    key = word.lstrip("-") + (f"={after}" if after else "")
    if keys := _keys_like(key, (*own, *foreign), exactly=True):
        return f"{word}: set a key without dashes: {keys}"
    # Hydra's --run is what a command does anyway; a single letter resembles every other.
    flags = [flag for flag in (*own, *foreign) if flag.startswith("--") and flag != "--run"]
    offer = did_you_mean(word.partition("=")[0], flags) if word.startswith("--") or len(word) > 2 else ""
    if not offer and (keys := _keys_like(key, (*own, *foreign))):
        return f"{word}: set a key without dashes: {keys}"
    known = f"titan-exp {verb} has {listed(sorted({flag for flag in own if flag.startswith('--')}) or ['none'], 'and')}"
    return f"{word}: unknown flag. {offer[:1].upper()}{offer[1:] or known}"


def _keys_like(typed: str, flags: Sequence[str], *, exactly: bool = False) -> str:
    """Override that was typed with dashes before it, if the verb takes overrides; `exactly` excludes similar names."""
    key, _, value = typed.partition("=")
    key = key.replace("-", "_")
    if "." not in key and "--cfg" in flags and len(key) > 1:
        same = [name for name in value_keys() if name.rpartition(".")[2] == key] or other_names(key)
        found = same if exactly or same or not value else nearest(key, value_keys(), 2)
        return listed([f"{name}={value or '...'}" for name in found]) if found else ""
    return f"{key}={value or '...'}" if "." in key and not exactly else ""


SWITCHES = ("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m")
SWITCHES += ("--shell-completion", "-sc")
"""Hydra's flags without a value."""

VALUED = ("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
VALUED += ("--info", "-i")
"""Hydra's flags with a value."""

SWEEP_SWITCHES = ("--dry-run", "--json", "--prune", "--yes", "--skip")
"""Flags of sweeps without a value, the first two also of `train`; `--jobs` has one."""

VIEWS = ("job", "hydra", "all")
"""Values of `--cfg`."""

TOPICS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
"""Values of `--info`, which are optional."""


@dataclass(frozen=True)
class Arguments:
    """Flags and overrides of a command."""

    flags: tuple[str, ...]
    """Hydra's flags, each followed by its value."""
    overrides: tuple[str, ...]
    """Other arguments, in order."""

    def value_of(self, *names: str) -> str | None:
        """Value of a flag, given under any of its names; None if absent."""
        for index, flag in enumerate(self.flags):
            if flag in names:
                return self.flags[index + 1]
        return None

    def has(self, *names: str) -> bool:
        """True if a flag was given under any of its names."""
        return any(name in self.flags for name in names)


def read_arguments(argv: Sequence[str]) -> Arguments:
    """Separate Hydra's flags from overrides."""
    if any(word.partition("=")[0] == "--experimental-rerun" for word in argv):
        raise UserError("--experimental-rerun: to repeat a run, type titan-exp train --config-path runs/NAME/ID.")
    pairs = zip(argv, [*argv[1:], ""], strict=False)
    complete = [f"{word}=all" if word in ("--info", "-i") and after not in TOPICS else word for word, after in pairs]
    offered = (*SWEEP_SWITCHES, "--jobs")
    found, overrides = take_flags(complete, SWITCHES, dict.fromkeys(VALUED, str), offered=offered, verb="train")
    flags: list[str] = []
    for name, value in found.items():
        known = VIEWS if name in ("--cfg", "-c") else TOPICS if name in ("--info", "-i") else ()
        if known and value not in known:
            file = ", or give a configuration file with --config-path FILE" if Path(str(value)).suffix else ""
            raise UserError(f"{name} {value}: choose {listed(known)}{file}.")
        if name in ("--config-path", "-cp"):
            flags += _own_config(str(value))
        else:
            flags += [name] if value is True else [name, str(value)]
    return Arguments(tuple(flags), tuple(overrides))


def _own_config(path: str) -> list[str]:
    """Flags for a user's primary configuration, given as folder or file. Hydra needs absolute folders."""
    if "://" in path:
        return ["--config-path", path]
    absolute = Path(path).expanduser().absolute()
    runs = [] if (absolute / "config.yaml").exists() else list(absolute.glob("*/config.yaml"))
    if len(runs) == 1:  # an experiment's folder is its run
        absolute = runs[0]
    if absolute.is_file():
        return ["--config-path", str(absolute.parent), "--config-name", absolute.stem]
    return ["--config-path", str(absolute)]
