"""Import paths of user code in the configuration, checked without importing.

Packages are installed, on PYTHONPATH, or in the current directory.
"""

import ast
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from titan_exp.config.errors.explained_errors import package_prefix, user_traceback
from titan_exp.config.errors.user_error import UserError, Violation, did_you_mean, listed
from titan_exp.config.extension import lacking


def is_dotted(name: str) -> bool:
    """True if a name is an import path (`package.module.Name`) instead of a built-in name."""
    return "." in name


def import_dotted(name: str, field: str) -> Any:
    """Import the object named by the key `field`, e.g. `package.module.Name` or `package.module.Class.method`.

    Raises:
        UserError: the object does not exist, or its module fails to import.
    """
    violation = find_dotted(name, field)
    if violation is not None:
        raise UserError("This import path cannot be found.", [violation])
    module, attributes, _ = locate(name)
    found: Any = import_module(module, name, field)
    try:
        for attribute in attributes:
            found = getattr(found, attribute)
    except AttributeError as error:
        offer = did_you_mean(attributes[0], dir(importlib.import_module(module)))
        raise UserError("This import path cannot be found.", [_missing(name, field, module, offer)]) from error
    return found


def import_module(module: str, name: str, field: str) -> ModuleType:
    """Import the module of an import path `name`, the value of the key `field`.

    Raises:
        UserError: the module fails to import; with the user's frames.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:
        frames = user_traceback(error, [package_prefix(name)])
        at = f"\n{frames}" if frames else f" with {type(error).__name__}: {error}"
        raise UserError(f"{field}={name}: importing {module} fails{at}") from error


def find_dotted(name: str, field: str) -> Violation | None:
    """Check an import path without importing; returns its violation, or None.

    The name is looked up in the module's source; modules with star imports, `__getattr__` or compiled code may have any
    name.
    """
    search_current_directory()
    if not all(part.isidentifier() for part in name.split(".")):
        return Violation(field, name, "this is not an import path", "write package.module.Name")
    module, attributes, spec = locate(name)
    if not module:
        reason = f"there is no module {name.partition('.')[0]} here"
        return Violation(
            field, name, reason, "install its package, put its folder on PYTHONPATH, or start from the folder it is in"
        )
    if not attributes:
        return Violation(field, name, "this is a module", f"name something in it: {name}.Name")
    bound = _names_bound_by(spec)
    if bound is None or attributes[0] in bound:
        return None
    return _missing(name, field, module, did_you_mean(attributes[0], bound))


def unknown_name(field: str, name: str, builtin: Sequence[str], example: str) -> Violation:
    """Violation of a name that is neither built in nor an import path."""
    group, _, key = field.partition(".")
    offer = did_you_mean(name, builtin)
    remedy = f"{offer + ' ' if offer else ''}Built in: {listed(builtin, 'and')}. For your own give its import path, "
    reason = lacking(f"{field}={name}") or f"unknown {group if key == 'name' else key}"
    return Violation(field, name, reason, f"{remedy}e.g. {field}={example}")


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
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        try:
            spec = find(module, folders) if find else None
        except KeyError:  # namespace packages require an imported parent
            spec = ModuleSpec(module, None, is_package=True)
            name = module.rpartition(".")[2]
            spec.submodule_search_locations = [f"{folder}/{name}" for folder in folders or ()]
        if spec is not None:
            return spec
    return None


def _names_bound_by(spec: ModuleSpec | None) -> set[str] | None:
    """Top-level names of a module; None if its source does not determine them."""
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    names = names_bound_by(Path(spec.origin))
    return None if "*" in names or "__getattr__" in names else names


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
