"""What was typed after a verb, sorted into Hydra's flags and overrides, in any order."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_exp.config.errors.did_you_mean import did_you_mean, nearest
from titan_exp.config.errors.user_error import UserError

SWITCHES = ("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m")
SWITCHES += ("--shell-completion", "-sc")
"""Hydra's flags that stand alone."""

VALUED = ("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
VALUED += ("--experimental-rerun", "--info", "-i")
"""Hydra's flags that take a value."""

TOPICS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
"""What `--info` tells; it may stand alone."""


@dataclass(frozen=True)
class Arguments:
    """Flags and overrides of one command."""

    flags: tuple[str, ...]
    """Hydra's flags, each followed by its value, in the order typed."""
    overrides: tuple[str, ...]
    """Everything else, in the order typed."""

    def value_of(self, *names: str) -> str | None:
        """The value of a flag, under any of its names; None where it was not given."""
        for place, flag in enumerate(self.flags):
            if flag in names:
                return self.flags[place + 1]
        return None

    def has(self, *names: str) -> bool:
        """Whether a flag was given, under any of its names."""
        return any(name in self.flags for name in names)


def read_arguments(arguments: Sequence[str]) -> Arguments:
    """Sort what was typed.

    Raises:
        UserError: a flag that Hydra does not have, or one without its value.
    """
    flags: list[str] = []
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if word in SWITCHES:
            flags.append(word)
        elif name in VALUED and (equals or word in VALUED):
            if equals:
                flags += [name, value]
            elif name in ("--info", "-i") and (not rest or rest[0] not in TOPICS):
                flags += [name, "all"]
            elif not rest:
                raise UserError(f"{word} needs a value after it. See titan-exp train --help.")
            else:
                flags += [word, rest.pop(0)]
            if name in ("--config-path", "-cp"):
                flags[-2:] = _primary(flags[-1])
        elif word.startswith("-") and word != "-":
            raise UserError(_unknown_flag(word))
        else:
            overrides.append(word)
    return Arguments(tuple(flags), tuple(overrides))


def _primary(place: str) -> list[str]:
    """Flags for a configuration of one's own, such as a run's, by its folder or file. Hydra wants absolute folders."""
    if "://" in place:
        return ["--config-path", place]
    path = Path(place).expanduser().absolute()
    if path.is_file():
        return ["--config-path", str(path.parent), "--config-name", path.stem]
    return ["--config-path", str(path)]


def _unknown_flag(word: str) -> str:
    key = word.lstrip("-")
    if "=" in key or "." in key:
        return f"{word}: keys are set without dashes: {key if '=' in key else key + '=...'}"
    offer = did_you_mean(word, nearest(word, (*SWITCHES, *VALUED)))
    return f"{word}: there is no such flag; {offer or 'see titan-exp train --help'}"
