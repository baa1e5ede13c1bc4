"""User errors: violations of the configuration, printed without a traceback."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """Violation of a rule or type: key, value, reason, remedy."""

    field: str
    """Configuration key, as typed on the command line (`training.global_batch_size`)."""
    value: object
    """Value of the key."""
    reason: str
    """Reason why the value cannot be used."""
    remedy: str
    """Nearest values that work, or the command to type."""

    def __str__(self) -> str:
        setting = f"{self.field}={shown(self.value)}" if self.value != "" else self.field
        return f"{setting}: {self.reason}\n    {self.remedy}"


class UserError(Exception):
    """Error that the user can fix; printed without a traceback, exit status 2."""

    exit_code = 2

    def __init__(self, message: str, violations: Sequence[Violation] = ()) -> None:
        self.violations = tuple(violations)
        lines = [message, *(f"  {violation}" for violation in self.violations)]
        super().__init__("\n".join(lines))


def shown(value: object, text: Callable[[str], str] = str) -> str:
    """Format a value as typed on the command line; `text` formats its strings."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list() | tuple():
            return f"[{','.join(shown(part, text) for part in value)}]"
        case dict():
            return f"{{{','.join(f'{key}:{shown(part, text)}' for key, part in value.items())}}}"
        case str():
            return text(value)
        case _:
            return str(value)


def in_quotes(text: str) -> str:
    """String in quotes as Hydra reads them: a backslash is one before a quote and at the end alone."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"
