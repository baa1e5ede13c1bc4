"""Modules of user code that a configuration names by import path, with the modules that these import.

They are found in source files, without importing anything; dynamic imports (`importlib`) are not seen.
"""

import ast
import functools
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import titan_exp
from titan_exp.config.schema.component import locate, search_current_directory

MODULES_LIMIT = 1000
"""Maximum number of modules that are followed."""


def user_modules(names: Iterable[str]) -> dict[str, Path]:
    """Files by module name: the modules of these import paths, their packages, and what they import.

    Modules of titan_exp, the standard library and installed packages are left out, unless a name is theirs.
    """
    search_current_directory()
    found: dict[str, Path] = {}
    waiting = [(name, True) for name in names]
    while waiting and len(found) < MODULES_LIMIT:
        name, named = waiting.pop()
        if not named and _is_package_installed(name.partition(".")[0]):
            continue
        for module, file in _modules(name):
            if module in found or _is_own(file):
                continue
            found[module] = file
            if not is_installed(file):
                waiting += [(imported, False) for imported in _imports(module, file)]
    return dict(sorted(found.items()))


def is_installed(file: Path) -> bool:
    """True if a file belongs to an installed package or to the Python installation."""
    return bool({"site-packages", "dist-packages"} & set(file.parts)) or any(
        folder in file.parents for folder in _python_folders()
    )


def scope(module: str, file: Path) -> Path:
    """Folder of a module's outermost package; the file itself if it is in no package."""
    inner, depth = (file.parent, module.count(".")) if file.stem == "__init__" else (file, module.count("."))
    return inner if depth == 0 else inner.parents[depth - 1]


def _modules(name: str) -> Iterator[tuple[str, Path]]:
    """Innermost module of a dotted name, and its packages."""
    module, _, _ = locate(name)
    parts = module.split(".") if module else []
    for depth in range(len(parts), 0, -1):
        prefix = ".".join(parts[:depth])
        if prefix.partition(".")[0] in sys.stdlib_module_names:
            return
        _, _, spec = locate(prefix)
        if spec is not None and spec.has_location and spec.origin:
            yield prefix, Path(spec.origin).absolute()


def _imports(module: str, file: Path) -> Iterator[str]:
    """Dotted names that a module imports, absolute."""
    try:
        tree = ast.parse(file.read_bytes()) if file.suffix == ".py" else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return
    package = module.split(".") if file.stem == "__init__" else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            stem = [*package[: len(package) - node.level + 1]] if node.level else []
            base = ".".join([*stem, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names if base)


@functools.cache
def _is_package_installed(package: str) -> bool:
    _, _, spec = locate(package)
    return spec is None or bool(spec.has_location and spec.origin and is_installed(Path(spec.origin).absolute()))


def _is_own(file: Path) -> bool:
    return Path(titan_exp.__file__).resolve().parent in file.resolve().parents


@functools.cache
def _python_folders() -> frozenset[Path]:
    return frozenset(Path(sysconfig.get_path(name)).absolute() for name in ("stdlib", "platstdlib"))
