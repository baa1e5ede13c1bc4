"""Typed configuration: conversion of a composed configuration to an `Experiment`, and back to YAML.

pydantic checks types and bounds of the plain dataclasses; all errors are reported at once.
"""

import dataclasses
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NoReturn, TypeVar, Union, get_args, get_origin

from omegaconf import DictConfig

from titan_exp.config.errors.explain_values import about, explained, from_pydantic, unknown_keys
from titan_exp.config.errors.user_error import UserError, Violation, did_you_mean, listed
from titan_exp.config.extension import shipped_options
from titan_exp.config.foreign_file import read_file, read_yaml
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.training import with_current_keys
from titan_exp.config.hydra.resolve import Uncomputed, consequences, resolve
from titan_exp.config.schema import schema
from titan_exp.config.schema.component import KINDS, builtin_components, config_class, config_classes, current_names
from titan_exp.config.schema.foreign_code import IMPORT_PATH_KEYS, Trust, require_trust
from titan_exp.config.schema.schema import annotation_of, hints, optional_fields, texts
from titan_exp.config.secrets import SECRET, variables_in


class GapError(Exception):
    """A value that could not be read was asked for."""


def with_gaps(kind: Any, values: Mapping[str, Any]) -> Any:
    """Instance of a group's dataclass with these values, which `dataclasses.replace` may change; reading any other
    raises GapError."""
    known = {name: one for name, one in kind.__dataclass_fields__.items() if name in values}
    if len(known) == len(dataclasses.fields(kind)):
        return kind(**values)

    def construct(self: Any, **given: Any) -> None:
        vars(self).update(given)

    def refuse(self: Any, name: str = "") -> NoReturn:
        raise AttributeError(name) if name.startswith("__") else GapError

    members: dict[str, Any] = {"__init__": construct, "__getattr__": refuse, "__dataclass_fields__": known}
    members |= {one.name: property(refuse) for one in dataclasses.fields(kind) if one.name not in values}
    return type(kind.__name__, (kind,), {**members, "__module__": kind.__module__})(**values)


def to_experiment(cfg: DictConfig) -> Experiment:
    """Convert a composed configuration to an `Experiment`. Raises UserError with a violation for every unknown, missing
    or invalid key."""
    return Experiment(**_build_composed(cfg, list(hints(Experiment))))


def readable_part(cfg: DictConfig, faults: Collection[str] = ()) -> tuple[list[Violation], Experiment]:
    """Violations of a composed configuration in groups other than those in `faults`, and the experiment with gaps in
    the place of both, and of what is computed from them."""
    found: tuple[Violation, ...] = ()
    try:
        _build_composed(cfg, [name for name in hints(Experiment) if name not in faults])
    except UserError as error:
        if not error.violations:
            raise
        found = error.violations
    beside = consequences(cfg, faults)
    wrong = {*faults, *(violation.field for violation in found)}
    wrong |= consequences(cfg, wrong)
    values = resolve(cfg)[0]
    groups = {name: _readable_group(name, values.get(name), wrong) for name in hints(Experiment)}
    return [violation for violation in found if violation.field not in beside], Experiment(**groups)


def _build_composed(cfg: DictConfig, names: Sequence[str]) -> dict[str, Any]:
    """Groups of a composed configuration; raises UserError without what is only computed from a wrong value."""
    values, uncomputed = resolve(cfg)
    for sentence in with_current_keys(values)[1]:
        _say(sentence)
    left_out = hints(Experiment).keys() - {*names}
    try:
        composed = {name: group for name, group in values.items() if name not in left_out}
        return _build_groups(composed, uncomputed, "Cannot read the configuration.", names)
    except UserError as error:
        fields = {violation.field for violation in error.violations}
        computed = consequences(cfg, fields - consequences(cfg, fields))  # not keys that read each other
        found = [violation for violation in error.violations if violation.field not in computed]
        if len(found) == len(error.violations):
            raise
        raise UserError("Cannot read the configuration.", found) from error


def _readable_group(name: str, values: object, wrong: Collection[str]) -> Any:
    from pydantic import ValidationError

    kind = hints(Experiment)[name]
    if not isinstance(values, Mapping) or name in wrong:
        return with_gaps(kind, {})
    try:
        kind = config_class(name, values)
        own = [one.name for one in dataclasses.fields(kind)]
        left = tuple(one for one in own if not any(f"{key}.".startswith(f"{name}.{one}.") for key in wrong))
        part = kind if len(left) == len(own) else _with_fields(kind, left)
        read = getattr(_reader(name, part).model_validate({name: values}), name)
        # `__post_init__` of a user's class may add attributes that are no fields.
        return with_gaps(kind, {one: getattr(read, one) for one in left})
    except (UserError, ValidationError):
        return with_gaps(kind, {})


@cache
def _with_fields(kind: Any, names: tuple[str, ...]) -> Any:
    """Dataclass with these fields of another."""
    declared = []
    for one in (one for one in dataclasses.fields(kind) if one.name in names):
        default = dataclasses.field(default=one.default, default_factory=one.default_factory)
        declared.append((one.name, hints(kind)[one.name], default))
    return dataclasses.make_dataclass(kind.__name__, declared, kw_only=True)


def load_experiment(path: str | Path, trust: Trust = False) -> Experiment:
    """Read a resolved `config.yaml` written by `to_yaml`, whose interpolations are literal text. Raises UserError if
    the file cannot be read, or is not an experiment, and Untrusted if this user did not launch the run, and it names
    code without `trust`."""
    values, text = _read(Path(path))
    require_trust(Path(path), text, values, trust)
    return Experiment(**_build_groups(values, [], f"Cannot read the configuration in {path}.", list(hints(Experiment))))


def load_group(path: Path, group: str, imports: Collection[str] = IMPORT_PATH_KEYS, trust: Trust = False) -> Any:
    """One group of a resolved `config.yaml`, as `load_experiment`; `imports` are the keys whose code the caller
    imports."""
    return group_of(read_values(path, [key for key in imports if key.startswith(f"{group}.")], trust), group, path)


def group_of(values: Mapping[str, Any], group: str, path: Path) -> Any:
    """One group of the values of the `config.yaml` at `path`, validated. Raises UserError if it is not such a group."""
    message = f"Cannot read the configuration in {path}."
    return _build_groups({group: values.get(group)}, [], message, [group])[group]


def read_values(path: str | Path, imports: Collection[str] = (), trust: Trust = False) -> dict[str, Any]:
    """Values of a `config.yaml`, not validated, so that older versions can be read. Raises UserError if the file cannot
    be read, and Untrusted if this user did not launch the run, and a key of `imports` names code without `trust`."""
    values, text = _read(Path(path))
    require_trust(Path(path), text, values, trust, imports)
    if wrong := [name for name in hints(Experiment) if not isinstance(values.get(name, {}), dict)]:
        raise UserError(f"{path}: {wrong[0]} is not a group of keys, as it is in the config.yaml of a run.")
    return _current(values)


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    try:
        text = read_file(path)
    except FileNotFoundError as error:
        raise UserError(f"Cannot read {path}: no such file or directory.") from error
    values = read_yaml(path, "a configuration", content=text)
    if not values:
        raise UserError(f"{path} is empty. The configuration of a run is config.yaml in its folder.")
    return values, text


def _current(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values with the current names of keys and components."""
    moved = with_current_keys(values)[0]
    return {name: current_names(name, group) if isinstance(group, dict) else group for name, group in moved.items()}


@cache
def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr)


def validated(kind: Any, values: Mapping[str, Any], where: str) -> Any:
    """Instance of a dataclass of a group from values that somebody else wrote, in the file or checkpoint `where`.
    Raises UserError if a value has another type, or is out of bounds, or is missing."""
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        found = "" if first["type"] == "missing" else f", and it is {str(first['input'])[:60]!r}"
        raise UserError(f"{where} does not describe a model: {key}: {first['msg']}{found}.") from error


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def to_dict(experiment: Experiment) -> dict[str, Any]:
    """Convert an experiment to plain dictionaries, lists and scalars."""
    return _plain(dataclasses.asdict(experiment))


def to_yaml(experiment: Experiment) -> str:
    """Resolved YAML of an experiment; `load_experiment` is the inverse."""
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # same text, ten times faster
    return yaml.dump(to_dict(experiment), Dumper=dumper, sort_keys=False, allow_unicode=True, width=120)


def _build_groups(
    values: Mapping[str, Any], uncomputed: Sequence[Uncomputed], message: str, names: Sequence[str]
) -> dict[str, Any]:
    from pydantic import ValidationError

    values, found = _current(values), dict[str, Violation]()

    def add(violation: Violation) -> None:
        # One per key; violations inside a wrong group are consequences.
        parts = violation.field.split(".")
        if not any(".".join(parts[: depth + 1]) in found for depth in range(len(parts))):
            found[violation.field] = violation

    classes: dict[str, Any] = {}
    for name in names:
        try:
            classes[name] = config_class(name, values.get(name))
        except UserError as error:
            if not error.violations:
                raise
            for violation in error.violations:
                add(violation)
    known = {name: group for name, group in values.items() if name in classes or name not in names}
    unchosen = {name: violation for name in classes if (violation := _unchosen(name, classes[name], known.get(name)))}
    for violation in unchosen.values():
        add(violation)
    others = [*unknown_keys(known, classes, optional_fields(Experiment))]
    for violation in (*(failure.violation for failure in uncomputed), *others):
        if violation.field.partition(".")[0] not in unchosen:
            add(violation)
    built: dict[str, Any] = {}
    for name, kind in classes.items():
        try:
            built[name] = getattr(_reader(name, kind).model_validate(known), name)
        except ValidationError as error:
            for detail in error.errors(include_url=False) if name not in unchosen else ():
                add(_of_pydantic(detail, kind))
    if not found:
        return built
    found |= {key: cause for each in uncomputed if (key := each.violation.field) in found and (cause := each.cause)}
    order = {name: index for index, name in enumerate(schema.keys())}
    raise UserError(message, sorted(found.values(), key=lambda violation: order.get(violation.field, len(order))))


def _of_pydantic(detail: Any, kind: Any) -> Violation:
    """Violation of an error of pydantic in a group of this class."""
    *group, last = detail["loc"]
    names_key = last == "[key]"  # the key of a mapping is wrong, not its value
    field = _key_at(group if names_key else detail["loc"])
    declared = _key_at(group[:-1]) if names_key else field
    if names := variables_in(detail["input"]):
        remedy = "type the value itself, or use a variable with another name"
        return Violation(field, detail["input"], f"{names[0]}: {SECRET}", remedy)
    return from_pydantic(detail, field, *schema.declared_in(kind, declared))


def _unchosen(group: str, kind: Any, values: object) -> Violation | None:
    """Violation of a component that is named without an option of it: the keys are another component's."""
    if group not in KINDS or not isinstance(values, Mapping) or values.get(KINDS[group].key) is None:
        return None
    key, name, fields = f"{group}.{KINDS[group].key}", str(values[KINDS[group].key]), hints(kind)
    others, missing = values.keys() - fields.keys(), fields.keys() - values.keys() - {*optional_fields(kind)}
    if not others or len(others) + len(missing) == 1:
        return None
    if others - {field for other in config_classes(group) for field in hints(other)}:
        return None
    if name not in builtin_components(group):
        option, optional = name.rpartition(".")[2], optional_fields(kind)
        needed = listed([field for field in fields if field not in optional and field != KINDS[group].key], "and")
        file = f"conf/{group}/{option}.yaml with {KINDS[group].key}: {name}, {needed}"
        command = f"type --config-dir conf {group}={option}"
        remedy = f"write {file} (titan-exp help {KINDS[group].guide}), and {command}"
        return Violation(key, name, "it has keys of its own, and those of another option are set", remedy)
    texts = {option: path.read_text() for option, path in shipped_options(group).items()}
    options = [f"{group}={option}" for option, text in texts.items() if option == name or f"family/{name}@" in text]
    remedy = f"use {listed(options, 'or')}"
    return Violation(key, name, "the other keys belong to another one", remedy) if options else None


def _key_at(location: Sequence[int | str]) -> str:
    """Key of an error's location, without indices of lists, which are numbers, and types of a union."""
    parts = [part for part in location if isinstance(part, str)]
    whole = ".".join(parts)
    inside = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    return next((key for key in inside if schema.literals_beside(annotation_of(key))), whole)


@cache
def _reader(group: str, kind: Any) -> Any:
    """Model of pydantic that reads one group; each takes milliseconds to make."""
    from pydantic import ConfigDict, Field, create_model

    # A dataclass inherits the settings of the enclosing model. `unknown_keys` has already found unknown keys.
    settings = ConfigDict(coerce_numbers_to_str=True, allow_inf_nan=False, extra="ignore", protected_namespaces=())
    default: Any = Field(default_factory=kind) if group in optional_fields(Experiment) else ...
    fields: dict[str, Any] = {group: (kind, default)}
    return create_model("Reader", __config__=settings, **fields)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value


Options = TypeVar("Options")


def typed_options(kind: type[Options], values: Mapping[str, Any], key: str) -> Options:
    """Dataclass `kind` with these values, which are at `key` of the configuration. Raises UserError if a name or a
    value does not fit."""
    found, options = typed_values(kind, values, key)
    if found:
        raise UserError("Cannot read these options.", found)
    return options


def typed_values(kind: type[Options], values: Mapping[Any, Any], key: str = "") -> tuple[list[Violation], Options]:
    """Dataclass of values at a key of the configuration, or of a file that is none, with gaps in the place of what
    cannot be read, and a violation for every unknown, missing or invalid key. Examples in the docstrings of a file's
    class are lines of it."""
    from pydantic import ConfigDict, ValidationError, create_model

    settings = ConfigDict(coerce_numbers_to_str=True, allow_inf_nan=False, extra="forbid")
    declared: dict[str, Any] = {one.name: (hints(kind)[one.name], ...) for one in fields(kind)}  # type: ignore[arg-type]
    declared |= {name: (hints(kind)[name], value) for name, value in schema.defaults(kind).items()}

    def read(names: Collection[str], given: Mapping[Any, Any]) -> dict[str, Any]:
        return vars(create_model("Read", __config__=settings, **{name: declared[name] for name in names})(**given))

    given = {str(name): value for name, value in values.items()}
    try:
        return [], kind(**read(declared, given))
    except ValidationError as error:
        details = error.errors(include_url=False)
    readable = declared.keys() - {detail["loc"][0] for detail in details}
    part = read(readable, {name: value for name, value in given.items() if name in readable})
    return [_at_its_place(kind, key, detail) for detail in details], with_gaps(kind, part)


def _at_its_place(kind: Any, key: str, error: Mapping[str, Any]) -> Violation:
    """Violation from a pydantic error in a dataclass at a key, or of a file if that is empty."""
    place, owner, name, annotation = key, kind, "", kind
    for part in error["loc"] if error["loc"][-1] != "[key]" else error["loc"][:-1]:
        inner = _alternative(annotation)
        if dataclasses.is_dataclass(inner):
            owner, name, annotation = inner, part, hints(inner).get(part)
        else:
            annotation = get_args(inner)[-1 if get_origin(inner) is dict else 0]
        place += f"[{int(part) + 1}]" if get_origin(inner) is tuple else f".{part}"
    place, given, known = place.removeprefix("."), error["input"], hints(owner)
    value = "" if isinstance(given, dict | list) or error["type"] == "missing" or error["loc"][-1] == "[key]" else given
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        has = f"{place.rpartition('.')[0] or 'the file'} has {listed(known, 'and')}" if known else "leave it out"
        reason = "there is no such option" if key else "unknown key"
        return Violation(place, value, reason, did_you_mean(name, known) or has)
    reason, remedy = explained(error, place, _alternative(annotation))
    reason = "this key has no value" if error["type"] == "missing" else reason
    if key:
        typed = f"give +{place}=VALUE" if error["type"] == "missing" else remedy
        return Violation(place, value, reason, typed or about(place, ""))
    if not remedy or error["type"] not in ("literal_error", "value_error"):  # others are for the command line
        remedy = f"for example {texts(owner)[name].example} (it means: {texts(owner)[name].meaning.rstrip('.')})"
    return Violation(place, value, reason, remedy)


def _alternative(annotation: Any) -> Any:
    """Type without its metadata, and without null beside it."""
    if get_origin(annotation) is Annotated:
        return _alternative(get_args(annotation)[0])
    parts = [part for part in get_args(annotation) if part is not NoneType]
    return _alternative(parts[0]) if get_origin(annotation) in (Union, UnionType) and len(parts) == 1 else annotation
