"""Components (model families, optimizers, parametrizations): modules of this package or of the user, with equal public
names.

A key of the config group selects the component (`model.architecture`, ...), whose `Config` types the group.
"""

import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from titan_exp.config.errors.user_error import UserError, Violation, listed, nearest, shown
from titan_exp.config.extension import provided
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.call_signature import Call, call_violations
from titan_exp.config.schema.import_path import (
    find_dotted,
    import_module,
    imported_from,
    is_dotted,
    locate,
    names_bound_by,
    search_current_directory,
    unknown_name,
)


@dataclass(frozen=True)
class ComponentKind:
    """Kind of component: interchangeable modules with the same public names, selected by a config group."""

    package: str
    """Package of the built-in modules; modules without the public names are not components."""
    key: str
    """Key of the group that selects the component."""
    public: tuple[str, ...]
    """Names defined by every component."""
    plain: str | None = None
    """Module of the package that wraps a plain class or function, given by import path; None if only modules are
    components."""
    calls: Mapping[str, Call] = field(default_factory=dict)
    """Calls of the component's functions; those not in `public` are optional."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Former names of built-in components, used in older runs and checkpoints."""
    extended_by: str = ""
    """Field of `Extension` with further modules by name; empty if extensions have none."""


KINDS = {
    "model": ComponentKind(
        "titan_exp.models",
        "architecture",
        ("Config", "spec", "block"),
        "plain",
        calls={
            "spec": Call(("config",)),
            "block": Call(("config", "layer", "backend")),
            "model": Call(("config",), ("seq_len", "backend")),
            "violations": Call(("config",)),
            "state_dict_map": Call(("config", "form")),
        },
        aliases={"decoder": "llama"},
        extended_by="families",
    ),
    "optimizer": ComponentKind(
        "titan_exp.optim",
        "name",
        ("Config", "build"),
        "torch_optimizer",
        calls={"build": Call(("parameters", "config"))},
    ),
    "parametrization": ComponentKind(
        "titan_exp.models.parametrization",
        "name",
        ("Config", "parameter_scales"),
        calls={"parameter_scales": Call(("spec", "model", "config"))},
    ),
}
"""Component kinds by config group."""


def component(group: str, name: str) -> ModuleType:
    """Import a component: built-in or of an extension by short name, user-defined by import path.

    Raises:
        UserError: the name is unknown, the module fails to import, lacks a public name, or a function of it takes
            other arguments.
    """
    kind = KINDS[group]
    name, key = kind.aliases.get(name, name), f"{group}.{kind.key}"
    found = builtin_components(group).get(name)
    if found is not None and found.startswith("titan_exp."):
        return importlib.import_module(found)
    search_current_directory()
    if found is None and not is_dotted(name) and not _is_own_module(name, kind.public):
        raise UserError(
            "This configuration cannot be read.",
            [unknown_name(key, name, [*builtin_components(group)], f"my_package.my_{group}")],
        )
    name = found or name
    module, attributes, _ = locate(name)
    if attributes or not module:
        violation = find_dotted(name, key)
        if violation is None and kind.plain is None:
            remedy = f"name a module that defines {listed(kind.public, 'and')}, e.g. {key}=my_package.my_{group}"
            violation = Violation(key, name, "this is no module", remedy)
        if violation is not None:
            raise UserError("This configuration cannot be read.", [violation])
        return importlib.import_module(f"{kind.package}.{kind.plain}")
    _require_interface(group, name)
    return import_module(name, name, key)


def component_config(group: str, name: str) -> Any:
    """`Config` of a component. Where a file of ours imports it, the file is not imported: it may import torch.

    Raises:
        UserError: as `component` does.
    """
    found = builtin_components(group).get(KINDS[group].aliases.get(name, name), "")
    if not found.startswith("titan_exp."):
        return component(group, name).Config
    module, attribute = imported_from(found, "Config")
    return getattr(importlib.import_module(module), attribute)


def is_builtin(group: str, name: str) -> bool:
    """True if a component is one of the package's, under its current or a former name; else its name is an import path,
    with or without a dot."""
    return name in builtin_components(group) or name in KINDS[group].aliases


def _is_own_module(name: str, public: Sequence[str]) -> bool:
    """True if a word without a dot, which may be a mistyped name, is a module that defines the public names, or one in
    the current folder."""
    _, _, spec = locate(name) if name.isidentifier() else ("", [], None)
    file = Path(spec.origin) if spec is not None and spec.origin else None
    if file is None or file.suffix != ".py" or name in sys.stdlib_module_names:
        return False
    here, names = Path.cwd(), names_bound_by(file)
    return file == here / f"{name}.py" or here / name in file.parents or names >= {*public} or "*" in names


@cache
def _require_interface(group: str, name: str) -> None:
    """Check the public names of a user's module."""
    kind, key = KINDS[group], f"{group}.{KINDS[group].key}"
    found = import_module(name, name, key)
    missing = [public for public in kind.public if not hasattr(found, public)]
    if missing:
        reason = f"the module {name} defines no {listed(missing, 'and no')}"
        remedy = f"define {listed(kind.public, 'and')} there, or name a class in it: {name}.Name"
        raise UserError("This configuration cannot be read.", [Violation(key, name, reason, remedy)])
    base = get_type_hints(Experiment)[group]
    violations = []
    if not (isinstance(found.Config, type) and issubclass(found.Config, base) and is_frozen(found.Config)):
        reason = f"{name}.Config is no frozen dataclass that extends {base.__name__}"
        remedy = f"from {base.__module__} import {base.__name__}; @dataclass(frozen=True) class Config({base.__name__})"
        violations.append(Violation(key, name, reason, remedy))
    for function, call in kind.calls.items():
        if hasattr(found, function):
            violations += call_violations(getattr(found, function), f"{name}.{function}", key, call)
    if violations:
        raise UserError("This configuration cannot be read.", violations)


def is_frozen(kind: type) -> bool:
    """True for a frozen dataclass whose own fields are part of it."""
    parameters = vars(kind).get("__dataclass_params__")
    return parameters is not None and parameters.frozen


@cache
def builtin_components(group: str) -> dict[str, str]:
    """Modules of the built-in components and those of extensions, by name in order, without importing them."""
    kind, spec = KINDS[group], find_spec(KINDS[group].package)
    assert spec is not None, "the package is installed"
    files = sorted(file for folder in spec.submodule_search_locations or () for file in Path(folder).glob("*.py"))
    names = [file.stem for file in files if file.stem != kind.plain and names_bound_by(file) >= {*kind.public}]
    added = provided(kind.extended_by) if kind.extended_by else {}
    return dict(sorted((added | {name: f"{kind.package}.{name}" for name in names}).items()))


def config_class(group: str, values: object) -> Any:
    """Dataclass of a config group with these values.

    Raises:
        UserError: the key that selects the component is no text, or names none.
    """
    base = get_type_hints(Experiment)[group]
    if group not in KINDS or not isinstance(values, Mapping):
        return base
    key = KINDS[group].key
    match values.get(key):
        case None:
            return base
        case bool() | Mapping() | list() as name:
            names = [] if isinstance(name, bool) else list(name)
            remedy = one_value(f"{group}.{key}", names, [*builtin_components(group)])
            raise UserError(
                "This configuration cannot be read.", [Violation(f"{group}.{key}", name, "it must be text", remedy)]
            )
        case name:
            return component_config(group, str(name))


def one_value(key: str, values: Sequence[Any], known: Sequence[str] = ()) -> str:
    """Remedy for several values where one is asked for: the first that is known, and a run with each."""
    from titan_exp.config.extension import shipped_options

    texts = [shown(value) for value in values]
    near = [other for text in texts for other in (text, *nearest(text, known)) if not known or other in known]
    remedy = f"one value: {key}={next(iter(near or known or texts))}"
    group, _, name = key.partition(".")
    swept = group if name in ("name", "source", "decay") and {*shipped_options(group)}.issuperset(texts) else key
    # The other keys of a component are those of its option.
    separate = swept in [f"{group}.{kind.key}" for group, kind in KINDS.items()]
    if len(texts) < 2 or separate or not all(re.fullmatch(r"[\w.+/-]+", text) for text in texts):
        return remedy
    return f"{remedy}; for a run with each: titan-exp train -m {swept}={','.join(texts)}"


def config_classes(group: str) -> list[Any]:
    """Possible dataclasses of a config group: the base class, then the built-in components'."""
    base = get_type_hints(Experiment)[group]
    names = builtin_components(group) if group in KINDS else ()
    return [base, *(component_config(group, name) for name in names)]


def current_names(group: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a config group with the component's current name, in place of former names."""
    kind = KINDS.get(group)
    if kind is None or str(values.get(kind.key)) not in kind.aliases:
        return dict(values)
    current = {**values, kind.key: kind.aliases[values[kind.key]]}
    if not current.get("options"):  # older versions wrote it for every component; only plain classes have it
        current.pop("options", None)
    return current
