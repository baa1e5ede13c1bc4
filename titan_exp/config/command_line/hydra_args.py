"""Hydra arguments: flags and overrides, in any order."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_exp.config.command_line.options import take_flags
from titan_exp.config.errors.did_you_mean import listed
from titan_exp.config.errors.user_error import UserError

SWITCHES = ("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m")
SWITCHES += ("--shell-completion", "-sc")
"""Hydra's flags without a value."""

VALUED = ("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
VALUED += ("--info", "-i")
"""Hydra's flags with a value."""

SWEEP_SWITCHES = ("--dry-run", "--prune", "--yes", "--skip")
"""Flags of sweeps without a value; `--jobs` has one."""

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
        raise UserError("--experimental-rerun: a run is repeated by titan-exp train --config-path runs/NAME/ID.")
    pairs = zip(argv, [*argv[1:], ""], strict=False)
    complete = [f"{word}=all" if word in ("--info", "-i") and after not in TOPICS else word for word, after in pairs]
    found, overrides = take_flags(
        complete, SWITCHES, dict.fromkeys(VALUED, str), offered=(*SWEEP_SWITCHES, "--jobs"), verb="train"
    )
    flags: list[str] = []
    for name, value in found.items():
        known = VIEWS if name in ("--cfg", "-c") else TOPICS if name in ("--info", "-i") else ()
        if known and value not in known:
            file = "; a configuration file is --config-path FILE" if Path(str(value)).suffix else ""
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
