"""Extensions: packages that add model families, verbs, options and more to the core; the registry that finds them.

The core imports no extension and names none. An extension is a folder of `titan_exp/extensions`, or an installed
package with an entry point of the group `titan_exp.extensions`. Its module `extension` holds an `EXTENSION` and imports
no torch. Folders beside that module add to those of the core: `conf` options of config groups, `sweeps` studies.
"""

import ast
import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titan_exp.config.errors.did_you_mean import listed
from titan_exp.config.errors.user_error import UserError

FOLDER = Path(__file__).resolve().parents[1] / "extensions"
"""Folder of the extensions of this repository."""

ENTRY_POINTS = "titan_exp.extensions"
"""Group of the entry points of other packages; a value is the module with `EXTENSION`."""

PROVIDED = Path(__file__).with_name("provided.json")
"""Words that extensions of this repository provide, by extension; `make golden` writes it."""


@dataclass(frozen=True)
class Extension:
    """Additions of a package to the core, whose own names stay its own. Values are import paths, imported when they are
    used: `package.module` for a module, `package.module:name` for something in it."""

    name: str
    """Name, shown by `titan-exp --version`."""
    summary: str
    """Sentence about what it adds."""
    families: Mapping[str, str] = field(default_factory=dict)
    """Module of a model family by `model.architecture`, with the public names of a family in `titan_exp/models`."""
    objectives: Mapping[str, str] = field(default_factory=dict)
    """Class of an objective by `training.objective`, as `titan_exp.trainer.objective.base.Objective`."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Module of a source by `data.source`, with the public names and the `DESCRIPTION` of `titan_exp/data/sources`."""
    parts: str = ""
    """Function that yields parts of a run, of the arguments of `titan_exp.trainer.parts.all_parts`."""
    generators: Mapping[str, str] = field(default_factory=dict)
    """Class by what `titan-exp generate` makes with it (`ModelInputs.makes`), as `titan_exp.inference.generate.Generator`."""
    metrics: tuple[str, ...] = ()
    """Metrics of its runs that a study may compare, beside those of the core."""
    resolvers: Mapping[str, str] = field(default_factory=dict)
    """OmegaConf resolver by the name that its option files use: a function, imported without torch."""
    verbs: Mapping[str, str] = field(default_factory=dict)
    """Verb by name: a function of the arguments that returns the exit code, and prints the help for `--help`. A name
    `doctor --flag` is the core's verb `doctor` with that flag. The first line of the docstring is the line of help."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Dataclass of a verb's options by verb, imported without torch; the shell completes them."""
    observations: Mapping[str, str] = field(default_factory=dict)
    """Class of an observation by its flag of `titan-exp evaluate`, as `titan_exp.inference.evaluate.Observation`. The
    first line of the docstring is the line of help."""
    reports: Mapping[str, str] = field(default_factory=dict)
    """Report by name: a function of a finished run's experiment and folder that yields lines to print."""
    folder: Path = Path()
    """Folder of the module with this description; filled by the registry."""


@cache
def extensions() -> dict[str, Extension]:
    """Installed extensions by name, those of this repository first.

    Raises:
        UserError: two provide the same, or a description cannot be imported.
    """
    modules = [f"{ENTRY_POINTS}.{path.parent.name}.extension" for path in sorted(FOLDER.glob("*/extension.py"))]
    modules += sorted({entry.value for entry in entry_points(group=ENTRY_POINTS)} - {*modules})
    found: dict[str, Extension] = {}
    owners: dict[str, str] = {}
    for module in modules:
        extension = _described(module)
        for word in (f"the name {extension.name}", *provided_words(extension)):
            if (other := owners.setdefault(word, module)) != module:
                raise UserError(f"Two extensions provide {word}: {other} and {module}. Uninstall one of them.")
        found[extension.name] = extension
    return found


def _described(module: str) -> Extension:
    try:
        imported = importlib.import_module(module)
        return replace(imported.EXTENSION, folder=Path(str(imported.__file__)).parent)
    except Exception as error:
        from titan_exp.config.errors.user_traceback import package_prefix, user_traceback

        frames = user_traceback(error, [package_prefix(module)])
        at = f"\n{frames}" if frames else f" with {type(error).__name__}: {error}"
        raise UserError(f"The extension {module} cannot be imported{at}") from error


def provided(what: str) -> dict[str, str]:
    """Import paths by name in one field of all extensions, such as `families`."""
    return {name: path for extension in extensions().values() for name, path in getattr(extension, what).items()}


def load(path: str) -> Any:
    """Module, or object of a module (`package.module:name`), of an import path in a description."""
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def help_line(path: str) -> str:
    """First line of the docstring of an import path's object, read from source without importing its module."""
    module, _, name = path.partition(":")
    nodes = ast.parse(source_file(module).read_bytes()).body
    found = next(node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name)
    return (ast.get_docstring(found) or "").partition("\n")[0]


def source_file(module: str) -> Path:
    """File of a module, which is not imported."""
    spec = find_spec(module)
    assert spec is not None, f"{module} is installed"
    assert spec.origin is not None, f"{module} has source"
    return Path(spec.origin)


def extension_folders(name: str) -> list[Path]:
    """Folders of this name beside descriptions: `conf` has options of config groups, `sweeps` has studies."""
    folders = (extension.folder / name for extension in extensions().values())
    return [folder for folder in folders if folder.is_dir()]


def provided_words(extension: Extension) -> Iterator[str]:
    """Words that a user may type if an extension is installed."""
    for path in sorted(extension.folder.glob("conf/*/*.yaml")):
        yield f"{path.parent.name}={path.stem}"
    for path in sorted(extension.folder.glob("sweeps/*.yaml")):
        yield f"sweep {path.stem}"
    yield from (f"model.architecture={name}" for name in extension.families)
    yield from (f"training.objective={name}" for name in extension.objectives)
    yield from (f"data.source={name}" for name in extension.sources)
    yield from extension.verbs
    yield from (f"evaluate --{name}" for name in extension.observations)


def lacking(word: str) -> str:
    """Reason for which a word is unknown: the extension that provides it is not installed. Empty for other words."""
    table: dict[str, list[str]] = json.loads(PROVIDED.read_text(encoding="utf-8"))
    missing = [name for name, words in table.items() if word in words and name not in extensions()]
    return f"it comes with the extension {listed(missing)}, which this installation lacks" if missing else ""
