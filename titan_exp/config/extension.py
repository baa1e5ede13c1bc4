"""Extensions: packages that add model families, verbs, options and more to the core; the registry that finds them.

The core imports no extension and names none. An extension is a folder of `titan_exp/extensions`, or an installed
package with an entry point of the group `titan_exp.extensions`. Its module `extension` holds an `EXTENSION` and imports
no torch. Folders beside that module add to those of the core: `conf` options of config groups, `sweeps` studies,
`guides` pages of `titan-exp help`.
"""

import ast
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from titan_exp.config.errors.user_error import UserError, listed, shown

Group = TypeVar("Group")

_PACKAGE = Path(__file__).resolve().parents[1]
CONF_DIR = next(folder for folder in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if folder.is_dir())
"""Folder of the groups' YAML: inside an installed package, next to the package in a checkout."""
CONFIG_NAME = "config"
"""Name of the YAML file with the defaults list."""
FOLDER = _PACKAGE / "extensions"
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
    groups: Mapping[str, str] = field(default_factory=dict)
    """Dataclass by config group, whose fields have defaults; imported without torch. In a group of the core, its fields
    join those of the core's class, whose properties it may override; another group joins the configuration."""
    idle: Mapping[str, tuple[str, tuple[object, ...]]] = field(default_factory=dict)
    """Keys without effect while another key has one of the given values, as `COUNTS_BESIDE` of the core."""
    not_in_run_id: Mapping[str, str] = field(default_factory=dict)
    """Keys of its groups without effect on results, each with the reason, as `NOT_IN_RUN_ID` of the core."""
    rules: str = ""
    """Module with `RULES`, and `LAYOUT_RULES` if it has any, as those in `titan_exp/rules`; imported without torch. Its
    `EVALUATION_RULES` are those that hold for `titan-exp evaluate`, too."""
    families: Mapping[str, str] = field(default_factory=dict)
    """Module of a model family by `model.architecture`, with the public names of a family in `titan_exp/models`."""
    objectives: Mapping[str, str] = field(default_factory=dict)
    """Class of an objective by `training.objective`, as `titan_exp.trainer.objective.Objective`."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Module of a source by `data.source`, with the public names and the `DESCRIPTION` of `titan_exp/data/sources`."""
    asked: str = ""
    """Function of an experiment that returns whether its run has what the next five fields name, which is imported only
    then. Imported without torch. Without one, every run has it."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Parts that report by name: a function of an experiment and its train state that yields parts of
    `titan_exp.trainer.part`."""
    commit: str = ""
    """Function of an experiment that returns its class of `titan_exp.trainer.commit.Commit`; None for the runs of
    others."""
    updates: str = ""
    """Function that yields parts of a run which act after the optimizer, of the arguments of
    `titan_exp.trainer.parts.acting_parts`. The planner runs them, too."""
    exchange: str = ""
    """Function of an experiment that returns its `titan_exp.plan.prediction.Exchange`; None for the runs of others.
    Imported without torch."""
    evaluations: str = ""
    """Function of an experiment that yields `titan_exp.plan.evaluation.Evaluated` of what its parts evaluate, for the
    planner. Imported without torch."""
    generators: Mapping[str, str] = field(default_factory=dict)
    """Class by what `titan-exp generate` makes with it (`ModelInputs.makes`), as `Generator` of
    `titan_exp/inference/generate.py`."""
    metrics: tuple[str, ...] = ()
    """Metrics of its runs that a study may compare, beside those of the core."""
    resolvers: Mapping[str, str] = field(default_factory=dict)
    """OmegaConf resolver by the name that its option files use: a function, imported without torch."""
    verbs: Mapping[str, str] = field(default_factory=dict)
    """Verb by name: a function of the arguments that returns the exit code, and prints the help for `--help`. A name
    `doctor --flag` is the core's verb `doctor` with that flag. The first line of the docstring is the line of help."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Dataclass of a verb's options by verb, imported without torch; the shell completes them. To those of the core's
    `generate` its fields are added, which have defaults."""
    usage: Mapping[str, str] = field(default_factory=dict)
    """Lines that join the usage of a verb of the core, by verb."""
    observations: Mapping[str, str] = field(default_factory=dict)
    """Class of an observation by its flag of `titan-exp evaluate`, as `titan_exp.inference.evaluate.Observation`. The
    first line of the docstring is the line of help."""
    reports: Mapping[str, str] = field(default_factory=dict)
    """Report by name: a function of a run's experiment and folder that yields lines for the end of a finished run.
    Imported without torch."""
    unfinished: str = ""
    """Function of a run's experiment and folder that yields lines about work which outlives the run, such as jobs of
    its own, for the end of a run and for `titan-exp show`. Imported without torch."""
    late: Mapping[str, str] = field(default_factory=dict)
    """File of a run folder with metrics of such work, a JSON row for each `step`, by the prefix that the metrics get.
    They join the run's row of that step."""
    sections: str = ""
    """Function of a `titan_exp.compare.comparison.Comparison` that yields tables, each a `Section` of
    `titan_exp/compare/output/study_sections.py`, for every output of `titan-exp compare`."""
    worlds: str = ""
    """Class that launches runs with several worlds, as `titan_exp.launch.executor.Worlds`."""
    kept_state: Mapping[str, bool] = field(default_factory=dict)
    """Tensors of each parameter that its parts keep in the optimizer's state, by name, without which a run may
    continue. True if one equals the parameter whenever a checkpoint is saved, which leaves it out."""
    folder: Path = Path()
    """Folder of the module with this description; filled by the registry."""


@cache
def extensions() -> dict[str, Extension]:
    """Installed extensions by name, those of this repository first. Raises UserError if two provide the same, or a
    description cannot be imported."""
    modules = [f"{ENTRY_POINTS}.{path.parent.name}.extension" for path in sorted(FOLDER.glob("*/extension.py"))]
    modules += sorted({*_installed()} - {*modules})
    found: dict[str, Extension] = {}
    owners: dict[str, str] = {}
    for module in modules:
        extension = _described(module)
        for word in (f"the name {extension.name}", *provided_words(extension)):
            if (other := owners.setdefault(word, module)) != module:
                raise UserError(f"Two extensions provide {word}: {other} and {module}. Uninstall one of them.")
        found[extension.name] = extension
    return found


def _installed() -> list[str]:
    """Modules that entry points name. `importlib.metadata` takes 45 ms, so a package that could have one is looked for
    first, which takes 2."""

    def may_have_one(folder: str) -> bool:
        try:
            names = [name for name in os.listdir(folder or ".") if name.endswith("-info")]
        except OSError:
            return os.path.isfile(folder)  # an archive
        for name in names:
            with contextlib.suppress(OSError), open(os.path.join(folder, name, "entry_points.txt"), "rb") as file:
                if ENTRY_POINTS.encode() in file.read():
                    return True
        return False

    if not any(map(may_have_one, sys.path)):
        return []
    from importlib.metadata import entry_points

    return [entry.value for entry in entry_points(group=ENTRY_POINTS)]


def _described(module: str) -> Extension:
    try:
        imported = importlib.import_module(module)
        return replace(imported.EXTENSION, folder=Path(str(imported.__file__)).parent)
    except Exception as error:
        from titan_exp.config.errors.explained_errors import package_prefix, user_traceback

        frames = user_traceback(error, [package_prefix(module)])
        at = f"\n{frames}" if frames else f" with {type(error).__name__}: {error}"
        raise UserError(f"Cannot import the extension {module}{at}") from error


def provided(what: str) -> dict[str, Any]:
    """Import paths, or other values, by name in one field of all extensions, such as `families`."""
    return {name: path for extension in extensions().values() for name, path in getattr(extension, what).items()}


def extended(group: str = "", what: str = "groups") -> Callable[[type[Group]], type[Group]]:
    """Decorator of the dataclass of a config group, or of a verb's `options`: a subclass with the fields that
    extensions add to it. Without a group, of the whole configuration, which gets the groups that the core lacks."""

    def extend(kind: Any) -> Any:
        found = [(name, load(path)) for one in extensions().values() for name, path in getattr(one, what).items()]
        mixins, added = tuple(mixin for name, mixin in found if name == group), []
        if not group:
            own = get_type_hints(kind)
            added = [(name, new, field(default_factory=new)) for name, new in found if name not in own]
            for name, mixin in found:
                assert name not in own or issubclass(own[name], mixin), f"{name} takes keys of its own only"
        if not mixins and not added:
            return kind
        members = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        bases = (*mixins, kind)
        return make_dataclass(kind.__name__, added, bases=bases, namespace=members, frozen=True, kw_only=True)

    return extend


def added_groups() -> list[str]:
    """Config groups to which extensions add keys, those of theirs included."""
    return list(dict.fromkeys(name for one in extensions().values() for name in one.groups))


def added_keys(group: str) -> dict[str, Any]:
    """Keys that extensions add to a group of the core, with their defaults."""
    paths = (path for one in extensions().values() for name, path in one.groups.items() if name == group)
    return {key: value for path in paths for key, value in asdict(load(path)()).items()}


def added_usage(verb: str) -> str:
    """Lines of extensions in the usage of a verb of the core."""
    return "".join(one.usage.get(verb, "") for one in extensions().values())


def load(path: str) -> Any:
    """Module, or object of a module (`package.module:name`), of an import path in a description."""
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def loaded(what: str, experiment: Any = None) -> Iterator[Any]:
    """Objects at the import paths in one field of all extensions, such as `rules`, or of those that an experiment asks
    for."""
    chosen = extensions().values() if experiment is None else asked_by(experiment)
    return (load(path) for extension in chosen if (path := getattr(extension, what)))


def asked_by(experiment: Any) -> list[Extension]:
    """Extensions that take part in the run of an experiment."""
    return [one for one in extensions().values() if not one.asked or load(one.asked)(experiment)]


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


def shipped_folders() -> list[Path]:
    """Folders of the groups' YAML in Hydra's order: the core's, then those of extensions."""
    return [CONF_DIR, *extension_folders("conf")]


def shipped_options(group: str) -> dict[str, Path]:
    """Files of a group's options by name in order, of the core and of extensions."""
    found = {path.stem: path for folder in reversed(shipped_folders()) for path in (folder / group).glob("*.yaml")}
    return dict(sorted(found.items()))


def provided_words(extension: Extension) -> Iterator[str]:
    """Words that a user may type if an extension is installed; its keys with their defaults."""
    for group, path in extension.groups.items():
        yield from (f"{group}.{key}={shown(value)}" for key, value in asdict(load(path)()).items())
    for path in sorted(extension.folder.glob("conf/*/*.yaml")):
        yield f"{path.parent.name}={path.stem}"
    for path in sorted(extension.folder.glob("sweeps/*.yaml")):
        yield f"sweep {path.stem}"
    yield from (f"help {path.stem}" for path in sorted(extension.folder.glob("guides/*.md")))
    yield from (f"model.architecture={name}" for name in extension.families)
    yield from (f"training.objective={name}" for name in extension.objectives)
    yield from (f"data.source={name}" for name in extension.sources)
    yield from extension.verbs
    for verb in sorted(extension.options.keys() - extension.verbs.keys()):
        yield from (f"{verb} {option.name}" for option in fields(load(extension.options[verb])))
    yield from (f"evaluate --{name}" for name in extension.observations)


def lacking(word: str) -> str:
    """Reason for which a word, or a key, is unknown: the extension that provides it is not installed. Empty for other
    words."""
    absent = {name: words for name, words in _provided().items() if name not in extensions()}
    keys = {name: {one.partition("=")[0] for one in words} for name, words in absent.items()}
    missing = [name for name, words in absent.items() if word in words or word in keys[name]]
    return f"it comes with the extension {listed(missing)}, which you have not installed" if missing else ""


def is_default_of_missing(key: str, value: object) -> bool:
    """True for a key of an extension that is not installed, and for a group of such keys, at their defaults: a run of
    another installation had no use for it either."""
    if isinstance(value, Mapping):
        return bool(value) and all(is_default_of_missing(f"{key}.{name}", one) for name, one in value.items())
    return bool(lacking(f"{key}={shown(value)}"))


@cache
def _provided() -> dict[str, list[str]]:
    return json.loads(PROVIDED.read_text(encoding="utf-8"))
