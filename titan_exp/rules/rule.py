"""Rule types: a table of refused values, and generator functions for rules that compute a remedy.

Both take groups and derived values by parameter name; the texts of `Refuse` are format strings over the same names,
e.g. `{training.steps}`, and `{found}`, what its condition returns.
"""

import dataclasses
import inspect
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from operator import attrgetter
from typing import Any

from titan_exp.config import devices
from titan_exp.config.devices import device_type, visible_gpus
from titan_exp.config.errors.user_error import Violation, listed, multiples_near, nearest_numbers
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.typed_config import GapError
from titan_exp.models.spec.lookup import model_spec

GROUPS = {"run" if field.name == "experiment" else field.name: field.name for field in dataclasses.fields(Experiment)}
"""Groups by parameter name: the group's name, except `run` for `experiment`."""

DERIVED: dict[str, Callable[[Experiment], Any]] = {
    "layout": ResolvedLayout.of,
    "device": lambda experiment: device_type(experiment.cluster),
    "gpus": lambda _: visible_gpus(),
    "unusable_cuda": lambda _: devices.unusable_cuda(),
    "spec": lambda experiment: model_spec(experiment.model),
    "whole": lambda experiment: experiment,
}
"""Derived values by parameter name. Rules with `spec` are skipped for models without one. `whole` is the experiment,
`gpus` the number of local GPUs, `unusable_cuda` the reason for which torch cannot use them, and the remedy."""

Condition = Callable[..., Any]
"""Predicate over groups and derived values, e.g. `lambda parallelism: parallelism.tp > 1`."""


@dataclasses.dataclass(frozen=True)
class Refuse:
    """Rule that refuses a key's value under a condition."""

    field: str
    """Key of the configuration."""
    condition: Condition
    """True if the value is refused, or what is wrong with it; a list of the entries of the value that are refused."""
    reason: str
    """Reason for the refusal."""
    remedy: str
    """Values that work."""

    def violations(self, values: "Values") -> Iterator[Violation]:
        """Violation if the condition holds, of each entry that it lists."""
        found = values.call(self.condition)
        for one in found if isinstance(found, list) else [found] * bool(found):
            value = one if isinstance(found, list) else attrgetter(self.field)(values.experiment)
            words = ChainMap({"found": one}, values)
            yield Violation(self.field, value, self.reason.format_map(words), self.remedy.format_map(words))


Check = Refuse | Callable[..., Iterable[Violation]]
"""Refused value, or generator function of groups and derived values."""


class Values(dict[str, Any]):
    """Groups and derived values of an experiment with a resolved layout, computed on first use."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__()
        self.experiment = experiment

    def __missing__(self, name: str) -> Any:
        derive = DERIVED.get(name)
        self[name] = derive(self.experiment) if derive else getattr(self.experiment, GROUPS[name])
        return self[name]

    def call(self, function: Callable[..., Any]) -> Any:
        """Call a function with values looked up by parameter name."""
        return function(*map(self.__getitem__, parameters(function)))


class Rule:
    """Check that is skipped if `when` is false."""

    def __init__(self, check: Check, when: Condition | None = None) -> None:
        self.check, self.when = check, when
        self._needs_spec = "spec" in parameters(check.condition if isinstance(check, Refuse) else check)
        if when is not None:
            parameters(when)

    def violations(self, values: Values) -> Iterator[Violation]:
        """Violations of the rule."""
        if (self.when is None or values.call(self.when)) and not (self._needs_spec and values["spec"] is None):
            yield from self.check.violations(values) if isinstance(self.check, Refuse) else values.call(self.check)


def rules(*checks: Check, when: Condition | None = None) -> tuple[Rule, ...]:
    """Create rules that are all skipped if `when` is false."""
    return tuple(Rule(check, when) for check in checks)


def find_violations(checked: Iterable[Rule], experiment: Experiment) -> list[Violation]:
    """Violations of an experiment with a resolved layout; without those of rules that read a gap."""
    values, found = Values(experiment), list[Violation]()
    for rule in checked:
        with suppress(GapError):
            found.extend(rule.violations(values))
    return found


def check_number(
    field: str,
    value: int,
    accepts: Callable[[int], object],
    reason: str,
    *,
    largest: int,
    more: str = "",
    otherwise: str = "",
) -> Iterator[Violation]:
    """Violation of an unaccepted number, with the nearest accepted numbers up to `largest`; `otherwise` is the remedy
    if there are none. With `more` it follows either."""
    if not accepts(value):
        near = nearest_numbers(value, filter(accepts, range(1, largest + 1)))
        remedy = f"nearest: {field}={listed(near)}" if near else otherwise
        yield Violation(field, value, reason, f"{remedy}{more}")


def check_multiple(field: str, value: int, of: int, reason: str, more: str = "") -> Iterator[Violation]:
    """Violation of a number that is not a multiple of `of`, with the nearest multiples."""
    if value % of:
        yield Violation(field, value, reason, f"nearest: {field}={listed(multiples_near(value, of))}{more}")


@cache
def parameters(function: Callable[..., object]) -> tuple[str, ...]:
    """Names of a function's parameters. Raises TypeError if a name is neither in `GROUPS` nor in `DERIVED`."""
    names = tuple(inspect.signature(function).parameters)
    unknown = [name for name in names if name not in GROUPS and name not in DERIVED]
    if unknown:
        known = listed([*GROUPS, *DERIVED], "and")
        raise TypeError(f"{function.__qualname__} takes {listed(unknown, 'and')}; rules take {known}")
    return names
