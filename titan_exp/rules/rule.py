"""Rules called with what their parameters name: a group, the layout, the device type, the model's spec."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from titan_exp.config.errors.did_you_mean import divisors, listed, multiples_near, nearest_numbers
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.devices import device_type
from titan_exp.models.spec.lookup import model_spec

GROUPS = {"run" if field.name == "experiment" else field.name: field.name for field in dataclasses.fields(Experiment)}
"""Groups by parameter name: every group has its own, and `experiment` is `run`."""

DERIVED: dict[str, Callable[[Experiment], Any]] = {
    "layout": ResolvedLayout.of,
    "device": lambda experiment: device_type(experiment.cluster),
    "spec": lambda experiment: model_spec(experiment.model),
}
"""Other parameters that a rule may have. A rule about the `spec` is skipped for a model without one."""


class Rule:
    """A check of some groups, which yields violations.

    Args:
        function: generator function whose parameters are named as in `GROUPS` and `DERIVED`.
        when: predicate with such parameters; the rule is skipped where it is false.

    Raises:
        TypeError: a parameter has another name.
    """

    def __init__(self, function: Callable[..., Iterator[Violation]], when: Callable[..., bool] | None = None) -> None:
        self._function, self._parameters = function, _parameters(function)
        self._when = None if when is None else (when, _parameters(when))

    def ask(self, values: "Values") -> Iterator[Violation]:
        """Violations of the rule."""
        if self._when is not None and not self._when[0](*map(values.__getitem__, self._when[1])):
            return
        if "spec" not in self._parameters or values["spec"] is not None:
            yield from self._function(*map(values.__getitem__, self._parameters))


class Values(dict[str, Any]):
    """Arguments of rules, each computed when the first rule asks for it; the layout of the experiment is resolved."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__()
        self._experiment = experiment

    def __missing__(self, name: str) -> Any:
        derive = DERIVED.get(name)
        self[name] = derive(self._experiment) if derive else getattr(self._experiment, GROUPS[name])
        return self[name]


def rules(*functions: Callable[..., Iterator[Violation]], when: Callable[..., bool] | None = None) -> tuple[Rule, ...]:
    """Rules of generator functions, all skipped where `when` is false."""
    return tuple(Rule(function, when) for function in functions)


def ask(asked: Iterable[Rule], experiment: Experiment) -> list[Violation]:
    """Violations of an experiment whose layout is resolved."""
    values = Values(experiment)
    return [violation for rule in asked for violation in rule.ask(values)]


def not_a_divisor(field: str, value: int, of: int, reason: str, more: str = "") -> Violation:
    """Violation that offers the divisors of `of` that are nearest to the value."""
    return Violation(field, value, reason, f"nearest: {field}={listed(nearest_numbers(value, divisors(of)))}{more}")


def not_a_multiple(field: str, value: int, of: int, reason: str, more: str = "") -> Violation:
    """Violation that offers the multiples of `of` that are nearest to the value."""
    return Violation(field, value, reason, f"nearest: {field}={listed(multiples_near(value, of))}{more}")


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    names = tuple(inspect.signature(function).parameters)
    unknown = [name for name in names if name not in GROUPS and name not in DERIVED]
    if unknown:
        known = listed([*GROUPS, *DERIVED], "and")
        raise TypeError(f"{function.__qualname__} asks for {listed(unknown, 'and')}; rules are given {known}")
    return names
