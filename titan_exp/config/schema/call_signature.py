"""Signatures of user code, bound before a run is queued: the call that a run would make, without making it."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from titan_exp.config.errors.user_error import UserError, Violation, did_you_mean, listed
from titan_exp.config.schema.import_path import import_dotted

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_REFUSED = "This run cannot be started."


@dataclass(frozen=True)
class Call:
    """A call of user code, by the names of its arguments."""

    positional: tuple[str, ...]
    """Positional arguments."""
    keywords: tuple[str, ...] = ()
    """Keyword arguments."""
    options_key: str = ""
    """Key of the configuration with further keyword arguments; empty if there are none."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Value of that key."""

    def __str__(self) -> str:
        options = [f"**{self.options_key}"] if self.options_key else []
        return ", ".join([*self.positional, *(f"{name}=..." for name in self.keywords), *options])

    @property
    def definition(self) -> str:
        """Parameters of a function that takes the call."""
        keywords = [*(["*"] if self.keywords else []), *self.keywords]
        return ", ".join([*self.positional, *keywords, *(["**options"] if self.options_key else [])])


def import_callable(name: str, key: str, call: Call) -> Any:
    """Import the class or function that a key of the configuration names, and bind the call.

    Raises:
        UserError: it cannot be imported, or takes other arguments.
    """
    found = import_dotted(name, key)
    if not callable(found):
        raise UserError(_REFUSED, [Violation(key, name, "it is no class or function", "name one of its module")])
    violations = call_violations(found, name, key, call)
    if violations:
        raise UserError(_REFUSED, violations)
    return found


def require_members(found: Any, name: str, key: str, members: Sequence[str], interface: str) -> None:
    """Raise UserError if a class lacks members; `interface` names the file that documents them."""
    missing = [member for member in members if not hasattr(found, member)] if isinstance(found, type) else []
    if missing:
        reason = f"the class defines no {listed(missing, 'and no')}"
        raise UserError(_REFUSED, [Violation(key, name, reason, f"the interface is in {interface}")])


def call_violations(function: Callable[..., Any], name: str, key: str, call: Call) -> list[Violation]:
    """Violations of a call of the function `name`, chosen by the key `key`. Empty without a known signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return []
    violations = list(_option_violations(signature, name, call))
    if violations:
        return violations
    try:
        signature.bind(*call.positional, **dict.fromkeys(call.keywords), **call.options)
    except TypeError as error:
        needed = _missing(signature, call)
        if needed and call.options_key:
            remedy = " ".join(f"+{call.options_key}.{option}=VALUE" for option in needed)
            reason = f"{name} needs {listed(needed, 'and')}, without a default; it is called as ({call})"
            return [Violation(call.options_key, dict(call.options), reason, remedy)]
        called, _, own = name.rpartition(".")
        reason = f"{own} cannot be called as ({call}): {error}"
        return [Violation(key, name, reason, f"in {called}: {own}({call.definition})")]
    return []


def _option_violations(signature: inspect.Signature, name: str, call: Call) -> list[Violation]:
    """Options that the function does not take, or that are passed already."""
    parameters, found = signature.parameters, []
    by_name = [parameter.name for parameter in parameters.values() if parameter.kind in _BY_NAME]
    passed = {*[*parameters][: len(call.positional)], *call.keywords}
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    free = [parameter for parameter in by_name if parameter not in passed]
    for option, value in call.options.items():
        option_key = f"{call.options_key}.{option}"
        if option in passed:
            found.append(Violation(option_key, value, f"it is passed already: {name}({call})", "leave it out"))
        elif option not in parameters and not takes_any:
            offer = did_you_mean(option, free) or (f"it takes {listed(free, 'and')}" if free else "it takes none")
            found.append(Violation(option_key, value, f"{name} takes no argument {option}", offer))
    return found


def _missing(signature: inspect.Signature, call: Call) -> list[str]:
    """Required parameters that the call does not pass; empty if it has too many positional arguments."""
    parameters = signature.parameters
    by_position = [parameter.name for parameter in parameters.values() if parameter.kind in _BY_POSITION]
    takes_all = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters.values())
    if len(call.positional) > len(by_position) and not takes_all:
        return []
    passed = {*by_position[: len(call.positional)], *call.keywords, *call.options}
    return [
        parameter.name
        for parameter in parameters.values()
        if parameter.default is inspect.Parameter.empty and parameter.kind in _BY_NAME and parameter.name not in passed
    ]
