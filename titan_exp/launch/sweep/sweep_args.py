"""Command line of `sweep` and `train -m`: flags of the sweeper, and overrides for Hydra. Imports neither."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from titan_exp.config.command_line import options as command_line
from titan_exp.config.command_line.options import SWEEP_SWITCHES, SWITCHES, VALUED, Arguments
from titan_exp.config.errors.user_error import UserError

if TYPE_CHECKING:
    from titan_exp.config.study.study import Study

SHOWS = {"--cfg", "-c", "--info", "-i", "--help", "-h", "--hydra-help", "--version", "--shell-completion", "-sc"}
"""Flags that show something instead of training."""
CHANGE_QUESTION = "--change-question"


@dataclass(frozen=True)
class SweepOptions:
    """Options of a sweep."""

    study: Path | None = None  # study file; its points replace the comma-separated values
    size: str | None = None  # study size; None is the first
    typed: tuple[str, ...] = ()  # typed overrides; they may refer to keys that only some points' groups have
    dry_run: bool = False
    skip: bool = False  # skip points that cannot run; studies always do
    jobs: int = 1
    prune: bool = False
    yes: bool = False
    change_question: bool = False
    """Go on with a registered question that was changed after a look, without an error rate."""
    json: bool = False


_now: ContextVar[SweepOptions] = ContextVar("options", default=SweepOptions())  # noqa: B039  # it is frozen


@contextmanager
def use_sweep_options(options: SweepOptions) -> Iterator[None]:
    """Set the sweeper's options for the block."""
    token = _now.set(options)
    try:
        yield
    finally:
        _now.reset(token)


def current_sweep_options() -> SweepOptions:
    """Options of the surrounding block, else the defaults."""
    return _now.get()


@dataclass(frozen=True)
class SweepArgs:
    """Flags and overrides for Hydra, and options for the sweeper."""

    argv: list[str]
    options: SweepOptions
    nested: tuple[str, ...] = ()
    """Overrides that Hydra sees only per point: the study's, and those typed after its name."""
    where: str = ""  # study file, for error messages
    written: tuple[str, ...] = ()  # overrides that stand in the study file as they are


def sweep_args(typed: Sequence[str]) -> SweepArgs | None:
    """Parse the arguments of `titan-exp sweep`; None without a study. Raises UserError about an unknown study."""
    from titan_exp.config.study.study_file import find_study, read_study, study_files  # `train` needs no study

    switches = (*SWEEP_SWITCHES[:-1], CHANGE_QUESTION)
    flags, rest = command_line.take_flags(typed, switches, {"--jobs": int}, others=(*SWITCHES, *VALUED), verb="sweep")
    arguments = _read(rest, flags)
    names = [word for word in arguments.overrides if "=" not in word and not word.startswith(("~", "+"))]
    if not names:
        if rest or flags.keys() - {"--json"}:
            raise UserError(f"Name a study: titan-exp sweep NAME {' '.join(typed)}\n  titan-exp sweep lists them.")
        return None
    study = read_study(find_study(names[0]))
    for word in names[1:]:
        if word in study.sizes:
            raise UserError(f"{word}: to choose a size of {study.name}, type size={word}")
        if word in study_files():
            both = f"titan-exp sweep {names[0]}, then titan-exp sweep {word}"
            raise UserError(f"{word}: one command runs one study. Type {both}")
    overrides = [word for word in arguments.overrides if word != names[0]]
    size = [word.removeprefix("size=") for word in overrides if word.startswith("size=")]
    for_hydra, others = _of_hydra([word for word in overrides if not word.startswith("size=")])
    options = replace(_options(flags), study=study.path, size=size[-1] if size else None, typed=others)
    lists = {axis.name for axis in study.axes}
    nested = (*_overrides_in(study), *(word for word in others if word.partition("=")[0] not in lists))
    hydra_flags = [word for word in arguments.flags if word not in ("-m", "--multirun")]
    # The author quotes what the file has as text.
    texts = [study.held_fixed, *study.sizes.values(), *(texts for axis in study.axes for texts in axis.list.values())]
    written = tuple(chain.from_iterable(texts))
    return SweepArgs(["-m", *hydra_flags, *for_hydra], options, nested, str(study.path), written)


def train_args(typed: Sequence[str]) -> SweepArgs:
    """Parse the arguments of `titan-exp train`. Raises UserError about a sweep flag without -m."""
    flags, rest = {}, list(typed)
    if any(word.partition("=")[0] in (*SWEEP_SWITCHES, "--jobs") for word in typed):
        flags, rest = command_line.take_flags(
            typed, SWEEP_SWITCHES, {"--jobs": int}, others=(*SWITCHES, *VALUED), verb="train"
        )
    arguments = _read(rest, flags)
    of_sweeps = [flag for flag in flags if flag not in SWEEP_SWITCHES[:2]]
    if of_sweeps and not arguments.has("-m", "--multirun"):
        raise UserError(f"{of_sweeps[0]} is a flag of sweeps. Add -m, or use titan-exp sweep.")
    if set(arguments.flags) & SHOWS or not arguments.has("-m", "--multirun"):
        return SweepArgs(rest, _options(flags))
    for_hydra, others = _of_hydra(arguments.overrides)
    return SweepArgs([*arguments.flags, *for_hydra], replace(_options(flags), typed=others), others)


def _read(typed: Sequence[str], flags: Mapping[str, object]) -> Arguments:
    arguments = command_line.read_arguments(typed)
    if shown := "--json" in flags and next((flag for flag in arguments.flags if flag in SHOWS), None):
        raise UserError(f"--json: {shown} prints text for people and trains nothing. Leave one of the two out.")
    return arguments


def _of_hydra(overrides: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split overrides into those of Hydra's own keys and others, which it would apply to the default model first."""
    found = [word for word in overrides if word.lstrip("+~").startswith("hydra")]
    return found, tuple(word for word in overrides if word not in found)


def _options(flags: Mapping[str, str | int | bool]) -> SweepOptions:
    if flags.get("--jobs") == 0:
        raise UserError("--jobs 0: no run would start. Use --jobs 1 or more.")
    return SweepOptions(
        dry_run="--dry-run" in flags,
        skip="--skip" in flags,
        jobs=int(flags.get("--jobs", 1)),
        prune="--prune" in flags,
        yes="--yes" in flags,
        change_question=CHANGE_QUESTION in flags,
        json="--json" in flags,
    )


def _overrides_in(study: "Study") -> list[str]:
    by_key: dict[str, dict[str, None]] = {}
    ranges = study.search.ranges if study.search else {}
    for text in (
        *study.held_fixed,
        *(text for size in study.sizes.values() for text in size),
        *(text for axis in study.axes for choice in axis.choices for text in choice.overrides),
        *(f"{key}={value}" for key, one in ranges.items() for value in one.samples),
    ):
        key, equals, value = text.partition("=")
        by_key.setdefault(key + equals, {})[value] = None
    return [f"{key}{','.join(values)}" for key, values in by_key.items()]
