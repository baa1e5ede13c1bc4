"""Keys of a description that somebody else wrote, noted as they are read, so that an error can name one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from titan_exp.config.errors.user_error import UserError, shown


class NotedKeys(dict[str, Any]):
    """Keys and values; `last` is the key that was read last."""

    last: str = ""

    def __getitem__(self, key: str) -> Any:
        self.last = key
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a key, or the default."""
        self.last = key
        return super().get(key, default)


@contextmanager
def named_errors(values: NotedKeys, name: str, whose: str) -> Iterator[None]:
    """Raise a UserError that names the file and the key for whatever a value of another type breaks; `whose` file has
    the keys that are missing."""
    try:
        yield
    except KeyError as error:
        raise UserError(f"{name} has no {error.args[0]}, which {whose} has.") from error
    except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as error:
        found = shown(values.get(values.last))[:60]
        raise UserError(f"{name}: {values.last}={found} cannot be used ({error}).") from error
