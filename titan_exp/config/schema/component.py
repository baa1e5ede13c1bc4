"""Components: built-in modules or those of a user, found without importing, with the signatures of their calls."""

import ast
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from titan_exp.config.errors.explained_errors import package_prefix, user_traceback
from titan_exp.config.errors.user_error import UserError, Violation, did_you_mean, listed, nearest, shown
from titan_exp.config.extension import lacking, provided, shipped_options
from titan_exp.config.groups.experiment import Experiment


def is_dotted(name: str) -> bool:
    """True if a name is an import path (`package.module.Name`) instead of a built-in name."""
    return "." in name


def import_dotted(name: str, field: str) -> Any:
    """Import the object named by the key `field`, e.g. `package.module.Name` or `package.module.Class.method`. Raises
    UserError if the object does not exist, or its module fails to import."""
    if (violation := find_dotted(name, field)) is not None:
        raise UserError("Cannot find this import path.", [violation])
    module, attributes, _ = locate(name)
    found: Any = import_module(module, name, field)
    try:
        for attribute in attributes:
            found = getattr(found, attribute)
    except AttributeError as error:
        offer = did_you_mean(attributes[0], dir(importlib.import_module(module)))
        raise UserError("Cannot find this import path.", [_missing(name, field, module, offer)]) from error
    return found


def import_module(module: str, name: str, field: str) -> ModuleType:
    """Import the module of an import path `name`, the value of the key `field`. Raises UserError with the user's frames
    if it fails to import."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        frames = user_traceback(error, [package_prefix(name)])
        at = f"\n{frames}" if frames else f" with {type(error).__name__}: {error}"
        raise UserError(f"{field}={name}: cannot import {module}{at}") from error


def find_dotted(name: str, field: str) -> Violation | None:
    """Check an import path without importing; returns its violation, or None. The name is looked up in the module's
    source; modules with star imports, `__getattr__` or compiled code may have any name."""
    search_current_directory()
    if not all(part.isidentifier() for part in name.split(".")):
        return Violation(field, name, "this is not an import path", "write package.module.Name")
    module, attributes, spec = locate(name)
    if not module:
        remedy = "install its package, put its folder on PYTHONPATH, or start in the folder that holds it"
        return Violation(field, name, f"Python finds no module {name.partition('.')[0]}", remedy)
    if not attributes:
        return Violation(field, name, "this is a module", f"name something in it: {name}.Name")
    source = spec.origin if spec is not None and spec.origin else ""
    bound = names_bound_by(Path(source)) if source.endswith(".py") else {"*"}
    if bound & {"*", "__getattr__", attributes[0]}:
        return None
    return _missing(name, field, module, did_you_mean(attributes[0], bound))


def unknown_name(field: str, name: str, builtin: Sequence[str], example: str) -> Violation:
    """Violation of a name that is neither built in nor an import path."""
    group, _, key = field.partition(".")
    offer = did_you_mean(name, builtin)
    remedy = f"{offer + ' ' if offer else ''}Built in are {listed(builtin, 'and')}. For yours, give the import path, "
    reason = lacking(f"{field}={name}") or f"unknown {group if key == 'name' else key}"
    return Violation(field, name, reason, f"{remedy}for example {field}={example}")


def search_current_directory() -> None:
    """Append the current directory to Python's search path."""
    here = os.getcwd()
    if "" not in sys.path and here not in sys.path:
        sys.path.append(here)


def _missing(name: str, field: str, module: str, offer: str) -> Violation:
    attribute = name[len(module) + 1 :]
    return Violation(field, name, f"{module} has no {attribute}", offer or f"define {attribute} in {module}")


def locate(name: str) -> tuple[str, list[str], ModuleSpec | None]:
    """Longest prefix of an import path that is a module, the remaining parts, and the module's spec."""
    parts = name.split(".")
    path: Iterable[str] | None = None
    found: ModuleSpec | None = None
    for depth in range(1, len(parts) + 1):
        spec = _find_spec(".".join(parts[:depth]), path)
        if spec is None:
            return ".".join(parts[: depth - 1]), parts[depth - 1 :], found
        found, path = spec, spec.submodule_search_locations
        if path is None:
            return ".".join(parts[:depth]), parts[depth:], found
    return name, [], found


def _find_spec(module: str, path: Iterable[str] | None) -> ModuleSpec | None:
    # importlib.util.find_spec imports parent packages, which may take seconds.
    loaded = getattr(sys.modules.get(module), "__spec__", None)
    if loaded is not None:
        return loaded
    folders = list(path) if path is not None else None
    for find in (finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec")):
        try:
            spec = find(module, folders)
        except KeyError:  # namespace packages require an imported parent
            spec = ModuleSpec(module, None, is_package=True)
            spec.submodule_search_locations = [f"{folder}/{module.rpartition('.')[2]}" for folder in folders or ()]
        if spec is not None:
            return spec
    return None


@cache
def imported_from(module: str, name: str) -> tuple[str, str]:
    """Module and name that a module imports a top-level name from, or these themselves; the module is not imported."""
    spec = find_spec(module)
    for node in ast.parse(Path(spec.origin).read_bytes()).body if spec is not None and spec.origin else ():
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return node.module, alias.name
    return module, name


def names_bound_by(file: Path) -> set[str]:
    """Top-level names of a Python file, read from its source; `*` for a star import, and where it is no Python."""
    names: set[str] = set()
    try:
        nodes: list[ast.AST] = [ast.parse(file.read_bytes())]
    except (SyntaxError, ValueError):  # importing it says where
        return {"*"}
    while nodes:
        match node := nodes.pop():
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
                continue  # inner names are not module attributes
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names.update((alias.asname or alias.name).split(".")[0] for alias in aliases)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
        nodes.extend(ast.iter_child_nodes(node))
    return names


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_REFUSED, _UNREADABLE = "This run cannot start.", "Cannot read this configuration."


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
    """Import the class or function that a key of the configuration names, and bind the call. Raises UserError if it
    cannot be imported, or takes other arguments."""
    found = import_dotted(name, key)
    if not callable(found):
        reason, remedy = "this is neither a class nor a function", "name one that its module defines"
        raise UserError(_REFUSED, [Violation(key, name, reason, remedy)])
    if violations := call_violations(found, name, key, call):
        raise UserError(_REFUSED, violations)
    return found


def require_members(found: Any, name: str, key: str, members: Sequence[str], interface: str) -> None:
    """Raise UserError if a class lacks members; `interface` names the file that documents them."""
    missing = [member for member in members if not hasattr(found, member)] if isinstance(found, type) else []
    if missing:
        reason = f"the class defines no {listed(missing, 'and no')}"
        raise UserError(_REFUSED, [Violation(key, name, reason, f"define what {interface} describes")])


def call_violations(function: Callable[..., Any], name: str, key: str, call: Call) -> list[Violation]:
    """Violations of a call of the function `name`, chosen by the key `key`. Empty without a known signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return []
    if violations := _option_violations(signature, name, call):
        return violations
    try:
        signature.bind(*call.positional, **dict.fromkeys(call.keywords), **call.options)
    except TypeError as error:
        needed = _missing_arguments(signature, call)
        if needed and call.options_key:
            remedy = "give " + " ".join(f"+{call.options_key}.{option}=VALUE" for option in needed)
            reason = f"{name} needs {listed(needed, 'and')} without a default, and titan_exp calls it as ({call})"
            return [Violation(call.options_key, dict(call.options), reason, remedy)]
        called, _, own = name.rpartition(".")
        reason = f"titan_exp calls {own} as ({call}), and that fails: {error}"
        return [Violation(key, name, reason, f"define it in {called} as {own}({call.definition})")]
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
            found.append(Violation(option_key, value, f"we pass it already: {name}({call})", "leave it out"))
        elif option not in parameters and not takes_any:
            offer = did_you_mean(option, free) or (f"it takes {listed(free, 'and')}" if free else "it takes none")
            found.append(Violation(option_key, value, f"{name} takes no argument {option}", offer))
    return found


def _missing_arguments(signature: inspect.Signature, call: Call) -> list[str]:
    """Required parameters that the call does not pass; empty if it has too many positional arguments."""
    parameters = signature.parameters
    by_position = [parameter.name for parameter in parameters.values() if parameter.kind in _BY_POSITION]
    takes_all = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters.values())
    if len(call.positional) > len(by_position) and not takes_all:
        return []
    passed = {*by_position[: len(call.positional)], *call.keywords, *call.options}
    named = [parameter for parameter in parameters.values() if parameter.kind in _BY_NAME]
    return [one.name for one in named if one.default is inspect.Parameter.empty and one.name not in passed]


@dataclass(frozen=True)
class ComponentKind:
    """Kind of component: interchangeable modules with the same public names, selected by a config group."""

    package: str
    """Package of the built-in modules; modules without the public names are not components."""
    key: str
    """Key of the group that selects the component."""
    public: tuple[str, ...]
    """Names defined by every component."""
    guide: str
    """Topic of `titan-exp help` about a component of your own."""
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
        "own-model",
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
        package="titan_exp.optim",
        key="name",
        public=("Config", "build"),
        guide="own-optimizer",
        plain="torch_optimizer",
        calls={"build": Call(("parameters", "config"))},
    ),
    "parametrization": ComponentKind(
        package="titan_exp.models.parametrization",
        key="name",
        public=("Config", "parameter_scales"),
        guide="parametrization",
        calls={"parameter_scales": Call(("spec", "model", "config"))},
    ),
}
"""Component kinds by config group."""


def component(group: str, name: str) -> ModuleType:
    """Import a component: built-in or of an extension by short name, user-defined by import path. Raises UserError if
    the name is unknown, the module fails to import, lacks a public name, or a function of it takes other arguments."""
    kind = KINDS[group]
    name, key = kind.aliases.get(name, name), f"{group}.{kind.key}"
    found = builtin_components(group).get(name)
    if found is not None and found.startswith("titan_exp."):
        return importlib.import_module(found)
    search_current_directory()
    if found is None and not is_dotted(name) and not _is_own_module(name, kind.public):
        unknown = unknown_name(key, name, [*builtin_components(group)], f"my_package.my_{group}")
        raise UserError(_UNREADABLE, [unknown])
    name = found or name
    module, attributes, _ = locate(name)
    if attributes or not module:
        violation = find_dotted(name, key)
        if violation is None and kind.plain is None:
            remedy = f"name a module that defines {listed(kind.public, 'and')}, for example {key}=my_package.my_{group}"
            violation = Violation(key, name, "this is not a module", remedy)
        if violation is not None:
            raise UserError(_UNREADABLE, [violation])
        return importlib.import_module(f"{kind.package}.{kind.plain}")
    _require_interface(group, name)
    return import_module(name, name, key)


def component_config(group: str, name: str) -> Any:
    """`Config` of a component. Where a file of ours imports it, the file is not imported: it may import torch. Raises
    UserError as `component` does."""
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
    if missing := [public for public in kind.public if not hasattr(found, public)]:
        reason = f"the module {name} defines no {listed(missing, 'and no')}"
        remedy = f"define {listed(kind.public, 'and')} there, or name a class in it: {name}.Name"
        raise UserError(_UNREADABLE, [Violation(key, name, reason, remedy)])
    base = get_type_hints(Experiment)[group]
    violations = []
    if not (isinstance(found.Config, type) and issubclass(found.Config, base) and is_frozen(found.Config)):
        reason = f"{name}.Config is not a frozen dataclass that extends {base.__name__}"
        remedy = f"import {base.__name__} from {base.__module__}, and write a frozen class Config({base.__name__})"
        violations.append(Violation(key, name, reason, remedy))
    for function, call in kind.calls.items():
        if hasattr(found, function):
            violations += call_violations(getattr(found, function), f"{name}.{function}", key, call)
    if violations:
        raise UserError(_UNREADABLE, violations)


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
    """Dataclass of a config group with these values. Raises UserError if the key that selects the component is not
    text, or names none."""
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
            raise UserError(_UNREADABLE, [Violation(f"{group}.{key}", name, "it must be text", remedy)])
        case name:
            return component_config(group, str(name))


def one_value(key: str, values: Sequence[Any], known: Sequence[str] = ()) -> str:
    """Remedy for several values where one is asked for: the first that is known, and a run with each."""
    texts = [shown(value) for value in values]
    near = [other for text in texts for other in (text, *nearest(text, known)) if not known or other in known]
    remedy = f"choose one: {key}={next(iter(near or known or texts))}"
    group, _, name = key.partition(".")
    swept = group if name in ("name", "source", "decay") and {*shipped_options(group)}.issuperset(texts) else key
    # The other keys of a component are those of its option.
    separate = swept in [f"{group}.{kind.key}" for group, kind in KINDS.items()]
    if len(texts) < 2 or separate or not all(re.fullmatch(r"[\w.+/-]+", text) for text in texts):
        return remedy
    return f"{remedy}, or start a run with each: titan-exp train -m {swept}={','.join(texts)}"


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
