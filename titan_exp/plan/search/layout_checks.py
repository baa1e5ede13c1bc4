"""Memoized checks of many layouts: one call for all layouts that are equal in the searched keys that a check reads."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import fields, replace
from functools import cache
from operator import attrgetter
from typing import Any, Generic, TypeVar

from titan_exp.config.groups.experiment import Experiment

T = TypeVar("T")


class LayoutChecks(Generic[T]):
    """Checks, called in order until one returns something. They may depend on nothing but the layout."""

    def __init__(self, checks: Iterable[Callable[[Experiment], T | None]], keys: Collection[str]) -> None:
        groups = {key.partition(".")[0] for key in keys}
        searched = {group: frozenset(key for key in keys if key.startswith(f"{group}.")) for group in groups}
        self._checks = [_MemoizedCheck(check, searched) for check in checks]

    def first(self, experiment: Experiment) -> T | None:
        """Result of the first check that has one."""
        return next((found for check in self._checks if (found := check(experiment)) is not None), None)


class _MemoizedCheck(Generic[T]):
    """Check with its results by the values of the keys that it has read so far."""

    def __init__(self, check: Callable[[Experiment], T | None], searched: dict[str, frozenset[str]]) -> None:
        self._check, self._searched = check, searched
        self._read = set[str]()
        self._values: Callable[[Experiment], Any] = lambda experiment: ()
        self._results: dict[Any, T | None] = {}

    def __call__(self, experiment: Experiment) -> T | None:
        values = self._values(experiment)
        if values not in self._results:
            known = len(self._read)
            result = self._check(self._recorded(experiment))
            if len(self._read) > known:
                self._values = attrgetter(*sorted(self._read))
                self._results.clear()
                values = self._values(experiment)
            self._results[values] = result
        return self._results[values]

    def _recorded(self, experiment: Experiment) -> Experiment:
        """Copy of a run that notes which searched keys are read."""
        groups: dict[str, Any] = {}
        for group, keys in self._searched.items():
            values = getattr(experiment, group)
            copy = groups[group] = object.__new__(_recorder(type(values), group, keys))
            vars(copy).update({one.name: vars(values)[one.name] for one in fields(values)}, _read=self._read)
        return replace(experiment, **groups)


@cache
def _recorder(kind: type, group: str, keys: frozenset[str]) -> type:
    """Subclass of a group of the configuration whose fields report that they are read."""

    def read(self: Any, name: str) -> Any:
        if f"{group}.{name}" in keys:
            object.__getattribute__(self, "_read").add(f"{group}.{name}")
        return object.__getattribute__(self, name)

    return type(kind.__name__, (kind,), {"__getattribute__": read})
