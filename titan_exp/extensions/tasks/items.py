"""Tasks as data: items with rendered contexts and continuations, whatever format their file has."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.foreign_file import LINE_BYTES, open_file, parse_object

Kind = Literal["choice", "continuation", "rolling"]


@dataclass(frozen=True)
class Item:
    """Item of a task, rendered: few-shot examples are part of its contexts. Raises ValueError for other types."""

    choices: tuple[tuple[str, str], ...]
    """Context and continuation of each choice. Contexts differ in schema tasks. A document has an empty context."""
    gold: tuple[int, ...]
    """Indices of the correct choices, at least one."""
    neutral: str | None = None
    """Context of the unconditional log-likelihood, for PMI. None if the task has none."""
    cluster: str | None = None
    """Name of what the item shares with others, such as a passage, so that they are not independent."""
    id: str = ""
    """Name of the item in its file, or its number. Runs are paired by it."""

    def __post_init__(self) -> None:
        if odd := [text for pair in self.choices for text in pair if not isinstance(text, str)]:
            raise ValueError(f"{odd[0]!r} is not a text")
        if not self.gold or not all(type(one) is int and 0 <= one < len(self.choices) for one in self.gold):
            raise ValueError(f"the gold choice {list(self.gold)} is none of its {len(self.choices)} choices")


@dataclass(frozen=True)
class Task:
    """Task: items, and the conventions by which they become tokens and scores."""

    name: str
    """Name, unique in its file."""
    kind: Kind
    """Multiple choice; one gold continuation, scored by log-likelihood and greedy hit; or whole documents."""
    items: tuple[Item, ...]
    """Items in the order of the file."""
    chance: float
    """Accuracy of guessing, 0 to 1."""
    primary: str
    """Metric by which the task is usually reported, a name of `scores.score`."""
    convention: Literal["whole", "apart", "common"]
    """Tokenization at the border of context and continuation. `whole`: context + continuation and context, as lm-eval;
    `apart`: each by itself, as OLMo; `common`: the tokens that all choices share are context, as CORE."""
    delimiter: str
    """Text that every continuation starts with, such as a space. The lengths of answers leave it out."""
    file: str
    """File or folder that the task was read from."""

    @cached_property
    def digest(self) -> str:
        """Version: sha256 of the rendered items and the conventions, in hex."""
        conventions = (self.kind, self.chance, self.primary, self.convention, self.delimiter)
        return hashlib.sha256(json.dumps([conventions, *map(asdict, self.items)]).encode()).hexdigest()


def guessing(items: Sequence[Item]) -> float:
    """Accuracy of guessing among the choices, a mean over items."""
    return sum(len(item.gold) / len(item.choices) for item in items) / len(items)


@contextmanager
def placed(place: object) -> Iterator[None]:
    """Raise a UserError that names the place for a missing key, or a value of another type."""
    try:
        yield
    except KeyError as error:
        raise UserError(f"{place} has no {error.args[0]}. Add it.") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        raise UserError(f"{place} cannot be used: {error}. Correct or remove it.") from error


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of a JSONL file, gzipped if its name ends in `.gz`, each after its place. Raises UserError."""
    try:
        with open_file(path) as file, gzip.open(file) if path.suffix == ".gz" else file as lines:
            for number, line in enumerate(iter(lambda: lines.readline(LINE_BYTES), b""), 1):
                place = f"{path}, line {number}"
                if len(line) == LINE_BYTES:
                    raise UserError(f"{place}: this line is longer than {LINE_BYTES // 2**20} MiB. Remove it.")
                if line.strip():
                    yield place, parse_object(line, place)
    except FileNotFoundError as error:
        raise UserError(f"There is no file {path}. Put it there, or correct its name.") from error
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is damaged: {error}. Copy it again.") from error
