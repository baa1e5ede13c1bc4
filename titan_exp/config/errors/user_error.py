"""User errors: violations of the configuration, printed without a traceback."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """A violated rule or type: key, value, reason, remedy."""

    field: str
    """Configuration key, as typed on the command line (`training.global_batch_size`)."""
    value: object
    """Its value."""
    reason: str
    """Why the value cannot be used."""
    remedy: str
    """Nearest values that work, or the command to type."""

    def __str__(self) -> str:
        setting = f"{self.field}={shown(self.value)}" if self.value != "" else self.field
        return f"{setting}: {self.reason}\n    {self.remedy}"


class UserError(Exception):
    """Error that a user can fix. The command line prints it without a traceback and exits 2."""

    exit_code = 2

    def __init__(self, message: str, violations: Sequence[Violation] = ()) -> None:
        self.violations = tuple(violations)
        lines = [message, *(f"  {violation}" for violation in self.violations)]
        super().__init__("\n".join(lines))


def shown(value: object, text: Callable[[str], str] = str) -> str:
    """A value as it is typed on the command line, its strings through `text`."""
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
