"""Code that a configuration names: built-in components, import paths of a user, trust in the run that names them."""

import ast
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from titan_exp.config.data_files import user_folder
from titan_exp.config.errors.explained_errors import package_prefix
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.extension import provided, source_file
from titan_exp.config.foreign_file import read_file, read_yaml
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.component import KINDS, is_builtin, is_dotted

LANGUAGE_MODELING = "language_modeling"
"""The core's own `training.objective`."""

TOKENIZERS = ("bytes", "store")
"""Built-in values of `data.tokenizer`; anything else is a path."""

BYTES_VOCABULARY = 257
"""Tokens of the tokenizer `bytes`: 256 byte values and the end of text."""

COMPILE_BACKENDS = ("inductor", "aot_eager", "eager", "cudagraphs")
"""Values of `compile.backend`."""


def objective_names() -> tuple[str, ...]:
    """Values of `training.objective` that are not import paths."""
    return (LANGUAGE_MODELING, *provided("objectives"))


@cache
def executor_names() -> tuple[str, ...]:
    """Built-in values of `cluster.kind`: the folders of `titan_exp/launch` that hold an executor."""
    return tuple(sorted(path.parent.name for path in (Path(__file__).parents[2] / "launch").glob("*/executor.py")))


@cache
def metric_names() -> tuple[str, ...]:
    """Built-in values of `tracking.metrics`: the files of `titan_exp/trainer/module_metrics`."""
    files = (Path(__file__).parents[2] / "trainer" / "module_metrics").glob("*.py")
    return tuple(sorted(file.stem for file in files if file.stem not in ("__init__", "metric")))


@dataclass(frozen=True)
class SourceDescription:
    """Facts about a built-in source, which its module states in literals as `DESCRIPTION`."""

    reads: tuple[str, ...] = ()
    """Keys of `data` that choose its documents, and that a source without them ignores. With `document`, its documents
    are the plain text of its files, each of which is one or is divided."""
    files: str = ""
    """Key of `reads` that holds files, folders and globs of this machine, each of which must match a file."""
    holds: str = "text"
    """`text`, documents to tokenize; `tokens`, those of a store; or samples of a kind that an extension trains on."""
    is_store: bool = False
    """True if its validation split was fixed when a store was made."""
    is_endless: bool = False
    """True if its documents may have no end when they are streamed."""
    has_options: bool = False
    """True if it takes `data.options`: found by itself where its module or class has `Options`, a dataclass of them."""


_HAS_OPTIONS = re.compile(rb"^ *(class Options\b|Options = )", re.MULTILINE)


@cache
def sources() -> dict[str, SourceDescription]:
    """Built-in values of `data.source` and those of extensions, in order, with their descriptions: files of
    `titan_exp/data/sources` and modules of extensions, not imported."""
    found = {}
    files = {path.stem: path for path in (Path(__file__).parents[2] / "data" / "sources").glob("*.py")}
    files |= {name: source_file(module) for name, module in provided("sources").items()}
    for name, path in sorted(files.items()):
        text = path.read_bytes()
        for node in ast.parse(text).body if b"\nDESCRIPTION = " in text else ():
            match node:
                case ast.Assign(targets=[ast.Name("DESCRIPTION")], value=ast.Call() as call):
                    stated = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
                    found[name] = SourceDescription(**{"has_options": bool(_HAS_OPTIONS.search(text)), **stated})
    return found


def described(source: str) -> SourceDescription:
    """Description of a source by `data.source`; the defaults for a class of the user's."""
    return sources().get(source, SourceDescription())


@cache
def decay_names() -> tuple[str, ...]:
    """Built-in values of `lr_schedule.decay`: the functions of `Decays` in `optim/lr_schedule.py`, from its source."""
    source = ast.parse((Path(__file__).parents[2] / "optim" / "lr_schedule.py").read_bytes())
    (decays,) = (node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "Decays")
    return tuple(node.name for node in decays.body if isinstance(node, ast.FunctionDef))


IMPORT_PATH_KEYS = (
    "model.architecture",
    "training.objective",
    "training.parts",
    "optimizer.name",
    "parametrization.name",
    "lr_schedule.decay",
    "data.source",
    "tracking.metrics",
    "cluster.kind",
)
"""Keys that take an import path instead of a built-in name; `training.parts` takes one for each name below it,
`tracking.metrics` a list."""


def import_paths(experiment: Experiment, keys: Collection[str] = IMPORT_PATH_KEYS) -> dict[str, str]:
    """Import paths of a run's components by key, those of `keys` and of other packages' extensions; empty if all are of
    this repository."""
    family = provided("families").get(experiment.model.architecture, "titan_exp.")
    found = import_paths_in({group: vars(value) for group, value in vars(experiment).items()}, keys)
    own = family.startswith("titan_exp.") or "model.architecture" not in keys
    return found if own else {"model.architecture": family, **found}


def import_paths_in(values: Mapping[str, Any], keys: Collection[str] = IMPORT_PATH_KEYS) -> dict[str, str]:
    """Import paths by key in the values of a configuration, which are not validated. A component that is not built in
    counts as one whether or not its module exists here, since it may later."""
    found: dict[str, Any] = {}
    for key in keys:
        group, _, name = key.partition(".")
        parts = values.get(group)
        value = parts.get(name) if isinstance(parts, Mapping) else None
        if isinstance(value, Mapping):  # of parts, from their values or their dataclasses
            for label, part in value.items():
                path = part.get("name") if isinstance(part, Mapping) else getattr(part, "name", None)
                found |= {f"{key}.{label}.name": path} if _is_path(path) else {}
            continue
        if isinstance(value, list | tuple):
            found |= {f"{key}[{index}]": path for index, path in enumerate(value) if _is_path(path)}
            continue
        is_module = group in KINDS and KINDS[group].key == name
        if isinstance(value, str) and (not is_builtin(group, value) if is_module else is_dotted(value)):
            found[key] = value
    return found


def _is_path(value: object) -> bool:
    return isinstance(value, str) and is_dotted(value)


def user_packages(experiment: Experiment) -> list[str]:
    """Prefixes of the module names of a run's user code."""
    return sorted({package_prefix(name) for name in import_paths(experiment).values()})


SIGNATURE_FILE = "config.sig"
"""File beside `config.yaml`: one line for every user who launched the run."""
_KEY_BYTES = 32
_PURPOSE = b"titan_exp: config.yaml of a launched run\0"


def signed(config: str, others: Path) -> str | None:
    """Content of the signature file of a configuration: the lines in the file `others` and this user's; None if this
    user has no key and can make none."""
    line = signature(config.encode())
    if line is None:
        return None
    try:
        lines = read_file(others).decode("ascii").split()
    except (OSError, UnicodeDecodeError, UserError):
        lines = []
    return "\n".join(dict.fromkeys([*lines, line])) + "\n"


def is_own(config: bytes, signatures: Path) -> bool:
    """True if this user's key signed the content of a `config.yaml`."""
    try:
        lines = read_file(signatures).split()
    except (OSError, UserError):
        return False
    return any(is_signature(line.decode(errors="replace"), config) for line in lines)


def signature(content: bytes, purpose: bytes = _PURPOSE) -> str | None:
    """Signature of a content by this user's key, valid for one purpose; None if this user has no key and can make
    none."""
    key = _read_key() or _make_key()
    return None if key is None else _digest(key, purpose + content)


def is_signature(text: str, content: bytes, purpose: bytes = _PURPOSE) -> bool:
    """True if a text is this user's signature of a content."""
    if (key := _read_key()) is None:
        return False
    return hmac.compare_digest(text.encode(errors="replace"), _digest(key, purpose + content).encode())


def key_path() -> Path:
    """File of this user's key. Raises OSError if the user has no home."""
    return user_folder("XDG_STATE_HOME", ".local/state") / "key"


def _digest(key: bytes, content: bytes) -> str:
    return hmac.new(key, content, hashlib.sha256).hexdigest()


def _read_key() -> bytes | None:
    """This user's key; None without one, or if others could have read or written it."""
    try:
        with open(key_path(), "rb") as file:
            status = os.fstat(file.fileno())
            private = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
            key = file.read(_KEY_BYTES + 1) if private else b""
    except OSError:
        return None
    return key if len(key) == _KEY_BYTES else None


def _make_key() -> bytes | None:
    """Create this user's key unless another process was first; None if the folder is not writable or a file is in the
    way."""
    try:
        path = key_path()
        temporary = path.with_name(f".key.{os.getpid()}.{secrets.token_hex(4)}")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            os.write(file, secrets.token_bytes(_KEY_BYTES))
            os.fsync(file)
        finally:
            os.close(file)
        try:
            os.link(temporary, path)  # unlike a rename, keeps the key of a process that was first
        finally:
            temporary.unlink()
    except OSError:
        pass
    return _read_key()


Trust = bool | Collection[str]
"""True trusts a configuration; import paths in a collection are trusted, as those that the user has typed."""

WHY = "titan_exp would import this code and run it with your rights"
_HYDRA = "this changes how Hydra composes, which can import and call anything"
_READS = "this value would come from your environment and your files"


class Untrusted(UserError):
    """Refusal of a foreign configuration, which `--trust` lifts."""


def require_trust(
    path: Path, text: bytes, config: Mapping[str, Any], trust: Trust, imports: Collection[str] = IMPORT_PATH_KEYS
) -> None:
    """Raise Untrusted if a configuration that this user did not launch names code. `text` is the content of the file at
    `path`, `config` its values, and `imports` the keys whose code is imported."""
    known = () if isinstance(trust, bool) else trust
    names = {key: name for key, name in import_paths_in(config, imports).items() if name not in known}
    if trust is True or not names or is_own(text, path.with_name(SIGNATURE_FILE)):
        return
    raise _refusal(path, [Violation(key, name, WHY, _remedy(name)) for key, name in names.items()])


def require_plain(path: Path) -> None:
    """Raise Untrusted if composing a configuration that this user did not launch could do more than set values: by
    import paths, interpolations, a defaults list, or settings of Hydra."""
    try:
        text = read_file(path)
    except FileNotFoundError:
        return  # Hydra says so
    values = read_yaml(path, "a configuration", content=text)
    if is_own(text, path.with_name(SIGNATURE_FILE)):
        return
    found = [Violation(key, name, WHY, _remedy(name)) for key, name in import_paths_in(values).items()]
    composing = ["@package"] if b"@package" in text else []
    composing += [key for key in values if isinstance(key, str) and key.split("@")[0] in ("hydra", "defaults")]
    remedy = "remove it, since the config.yaml of a run has no such key"
    found += [Violation(key, "", _HYDRA, remedy) for key in composing]
    remedy = "replace it by its value, as in the config.yaml of a run"
    found += [Violation(key, value, _READS, remedy) for key, value in _interpolations(values)]
    if found:
        raise _refusal(path, found)


def _refusal(path: Path, violations: list[Violation]) -> Untrusted:
    changed = f"you did not launch this run, or its {path.name} has changed since"
    return Untrusted(f"{path.parent}: {changed}. So we do not trust it with:", violations)


def _remedy(name: str) -> str:
    return f"look at the code of {name.partition('.')[0]}, and add --trust if you trust that folder"


def _interpolations(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _interpolations(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _interpolations(part, f"{key}[{index}]")
    elif isinstance(value, str) and "${" in value:
        yield key, value
