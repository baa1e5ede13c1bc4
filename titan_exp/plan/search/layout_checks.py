"""Memoized checks of many layouts: one call for all layouts that are equal in the searched keys that a check reads."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from operator import attrgetter
from typing import Any, Generic, TypeVar

from titan_exp.config.groups.experiment import Experiment

T = TypeVar("T")


class LayoutChecks(Generic[T]):
    """Checks, called in order until one returns something. They may depend on nothing but the layout."""

    def __init__(self, checks: Iterable[Callable[[Experiment], T | None]], keys: Collection[str]) -> None:
        self._keys: dict[str, frozenset[str]] = {
            group: frozenset(key.partition(".")[2] for key in keys if key.partition(".")[0] == group)
            for group in {key.partition(".")[0] for key in keys}
        }
        # No check has read a key yet.
        self._groups: dict[tuple[str, ...], _Group[T]] = {(): _Group(dict(enumerate(checks)))}
        self._moved = False

    def first(self, experiment: Experiment) -> T | None:
        """Result of the first check that has one."""
        while True:
            found = [result for keys in list(self._groups) if (result := self._of_group(keys, experiment)) is not None]
            if not self._moved:
                return min(found, key=lambda result: result[0])[1] if found else None
            self._moved = False

    def _of_group(self, keys: tuple[str, ...], experiment: Experiment) -> tuple[int, T] | None:
        group = self._groups[keys]
        values = attrgetter(*keys)(experiment) if keys else None
        if values not in group.results:
            group.results[values] = self._call(keys, experiment)
        return group.results[values]

    def _call(self, keys: tuple[str, ...], experiment: Experiment) -> tuple[int, T] | None:
        """Call the checks of a group until one returns something; those that read more keys leave it."""
        for number, check in list(self._groups[keys].checks.items()):
            read = set(keys)
            answer = check(self._recorded(experiment, read))
            if len(read) > len(keys):
                self._move(number, keys, tuple(sorted(read)))
            elif answer is not None:
                return number, answer
        return None

    def _move(self, number: int, old: tuple[str, ...], new: tuple[str, ...]) -> None:
        source, target = self._groups[old], self._groups.setdefault(new, _Group({}))
        target.checks[number] = source.checks.pop(number)
        target.checks = dict(sorted(target.checks.items()))
        target.results.clear()
        source.results.clear()
        self._moved = True

    def _recorded(self, experiment: Experiment, read: set[str]) -> Experiment:
        """Copy of a run that adds the searched keys to `read` when they are read."""
        groups: dict[str, Any] = {}
        for group, keys in self._keys.items():
            values = getattr(experiment, group)
            copy = groups[group] = object.__new__(_recorder(type(values), group, keys))
            vars(copy).update({one.name: vars(values)[one.name] for one in fields(values)}, _read=read)
        return replace(experiment, **groups)


@dataclass
class _Group(Generic[T]):
    """Checks that read the same keys."""

    checks: dict[int, Callable[[Experiment], T | None]]
    results: dict[Any, tuple[int, T] | None] = field(default_factory=dict)
    """First result by the values of these keys."""


@cache
def _recorder(kind: type, group: str, keys: frozenset[str]) -> type:
    """Subclass of a group of the configuration whose fields report that they are read."""

    def read(self: Any, name: str) -> Any:
        if name in keys:
            object.__getattribute__(self, "_read").add(f"{group}.{name}")
        return object.__getattribute__(self, name)

    return type(kind.__name__, (kind,), {"__getattribute__": read})
