"""Secrets: names that tell of them, and environment variables that no file holds."""

import dataclasses
import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import quote

from titan_exp.config.errors.user_error import UserError, Violation

# `token` alone or with one of these prefixes: `pad_token` and `text_key` are not credentials.
CREDENTIAL_NAME = (
    r"(?:(?:[A-Za-z0-9_.-]*[_.-])?"
    r"(?:api[_-]?key|access[_-]?key|secret(?:[_-]?key)?|private[_-]?key|password|passwd|passphrase|credentials?"
    r"|bearer|authorization|(?:auth|access|api|bearer|hf|hub|refresh|session|wandb)[_-]?token)"
    r"|(?:[A-Za-z0-9_-]+\.)*(?:token|sig))"
)
"""Pattern of a name before a credential, in configurations and code."""
_SECRET_KEY = re.compile(rf"{CREDENTIAL_NAME}\Z", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(
    r"(?<!^OLD)(?<!^)PWD($|_)"  # the shell's PWD and OLDPWD are folders
    r"|(KEYS?|TOKEN|PASS|PASSPHRASE|PASSCODE|CREDS?)($|_|\d)"
    r"|SECRET|PASSW(OR)?D|CREDENTIAL|COOKIE|BEARER|(^|_)(AUTH|JWT|PAT|PW|DSN|SAS)($|_)",
    re.IGNORECASE,
)

SHAPES = re.compile(
    r"hf_[A-Za-z0-9]{16,}"
    r"|(?:sk|rk)-(?:[A-Za-z]+-)*[A-Za-z0-9_]{16,}"
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}|glpat-[A-Za-z0-9_-]{16,}"
    r"|wandb_v\d_[A-Za-z0-9_]{16,}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|AIza[A-Za-z0-9_-]{30,}"
    r"|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"
)
"""Forms of well-known credentials."""
URL_USER = re.compile(
    r"(?P<before>[a-z][a-z0-9+.-]*://)(?P<secret>[^\s/@:'\"]*:[^\s/@'\"]+|[^\s/@:'\"]{16,})(?=@)", re.IGNORECASE
)
"""User and password in a URL."""
_LINE = 20
"""Characters of the shortest line of a secret of several lines that is one by itself."""


def is_secret_key(key: str) -> bool:
    """True if a configuration key names a credential."""
    return bool(_SECRET_KEY.match(key.rpartition(".")[2]))


def is_secret_variable(name: str) -> bool:
    """True if an environment variable names a credential. The token of a submission is none: attempts record it."""
    return not name.startswith("TITAN_EXP_") and bool(_SECRET_VARIABLE.search(name))


def secret_values(environment: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Values that are secret, the longest first, with the names of their variables: those of secret variables and,
    whatever the name, credentials of a known form and passwords in URLs. A value is also given as JSON and URLs write
    it, and each line of a key."""
    return _secret_values(tuple(environment))


@lru_cache(maxsize=4)
def _secret_values(environment: tuple[tuple[str, str], ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in environment:
        secrets = [value] if is_secret_variable(name) and _looks_secret(value) else []
        secrets += [match[0] for match in SHAPES.finditer(value)]
        secrets += [match["secret"].partition(":")[2] or match["secret"] for match in URL_USER.finditer(value)]
        for secret in filter(_looks_secret, secrets):
            lines = [line for line in secret.splitlines() if len(line) >= _LINE]
            for text in (secret, json.dumps(secret)[1:-1], quote(secret, safe=""), *lines):
                found.setdefault(text, name)
    return dict(sorted(found.items(), key=lambda pair: -len(pair[0])))


def _looks_secret(value: str) -> bool:
    """True if a value looks like a secret rather than a flag, a path or a word."""
    is_word = value.isalpha() and len(value) < 16 and value[1:].islower()
    return len(value) >= 8 and not value.startswith(("/", ".", "~")) and not is_word


Config = TypeVar("Config")

_VARIABLE = r"\$\{oc\.env:(?P<name>[^${},\s]+)(?:,(?P<default>null|'(?:[^'\\]|\\.)*'|[\w./:+-]*))?\}"
_TYPED = re.compile(rf"(?P<decode>\$\{{oc\.decode:)?{_VARIABLE}(?(decode)\}})")
_PLAIN_DEFAULT = re.compile(r"[\w./:+-]+")
_SHORTEST = 4
"""Characters of the shortest value that `concealed` replaces; shorter ones are parts of other words."""
_revealed: dict[str, str] = {}
"""Interpolation by value that this process has read."""


def register_secret_resolvers(register: Callable[..., None]) -> None:
    """Replace OmegaConf's `oc.env` and `oc.decode`, which would read secrets while composing, by a function of
    OmegaConf; idempotent."""
    register("oc.env", _env, replace=True)
    register("oc.decode", _decode, replace=True)


def variables_in(value: object) -> list[str]:
    """Names of the secret variables in a text; empty for other values."""
    return [match["name"] for match in _matches(value)]


def without_variables(text: str) -> str:
    """Text with secret variables replaced by their defaults."""
    return _TYPED.sub(lambda match: _default(match) or "" if is_secret_variable(match["name"]) else match[0], text)


def revealed(config: Config, field: str) -> Config:
    """Part of a configuration, at the key `field`, with the values of its secret variables. Raises UserError if one is
    not set."""
    return _reveal(config, field)


def require_variables(config: object, field: str = "") -> set[str]:
    """Names of the secret variables that user code reads; `field` as in `revealed`. Raises UserError if the environment
    lacks one."""
    read, missing = set[str](), []
    for key, text in _texts(config, field):
        for match in _matches(text) if key.partition("[")[0] not in LABELS else ():
            read.add(match["name"])
            if match["name"] not in os.environ and match["default"] is None:
                reason = f"{socket.gethostname()} has no environment variable {match['name']}"
                missing.append(Violation(key, text, reason, _SET))
    if missing:
        raise UserError("The configuration reads secrets from the environment, and some are not set.", missing)
    return read


def concealed(text: str) -> str:
    """Text with an interpolation in place of each secret: those that this process has read, and all others of its
    environment."""
    if len(text) < _SHORTEST:  # as most cells of a table are
        return text
    secrets = {value: f"${{oc.env:{name}}}" for value, name in secret_values(os.environ.items()).items()} | _revealed
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, secrets[value])
    return text


LABELS = ("experiment.notes", "experiment.tags")
"""Keys with text that nothing reads, in which a secret variable stays as typed."""
SECRET = "the name of this variable says that its value is secret, and only options of your own code may read it"
"""Reason against a secret variable in another key."""


_SET = "set it where you launch the run (titan_exp records its value nowhere)"


def _env(key: str, *default: Any) -> Any:
    from omegaconf.resolvers import oc

    if not is_secret_variable(key):
        return oc.env(key, *default)
    if not default:
        if key not in os.environ:
            raise KeyError(f"Environment variable '{key}' not found")
        return f"${{oc.env:{key}}}"
    text = "null" if default[0] is None else str(default[0])
    if default[0] is not None and not _PLAIN_DEFAULT.fullmatch(text):
        text = "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return f"${{oc.env:{key},{text}}}"


def _decode(expr: str | None, _parent_: Any, _node_: Any) -> Any:
    from omegaconf.resolvers import oc

    if not variables_in(expr):
        return oc.decode(expr, _parent_, _node_)
    if not _TYPED.fullmatch(str(expr)):
        raise ValueError(f"oc.decode takes a secret variable and nothing else, not {expr}")
    return f"${{oc.decode:{expr}}}"


def _matches(value: object) -> Iterator[re.Match[str]]:
    if isinstance(value, str):
        yield from (match for match in _TYPED.finditer(value) if is_secret_variable(match["name"]))


def _reveal(value: Any, key: str) -> Any:
    if isinstance(value, str):
        return _reveal_text(value, key) if variables_in(value) else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        changed = {name: new for name, part in parts.items() if (new := _reveal(part, _join(key, name))) is not part}
        return dataclasses.replace(value, **changed) if changed else value
    if isinstance(value, Mapping):
        found = {name: _reveal(part, _join(key, str(name))) for name, part in value.items()}
        return found if any(found[name] is not value[name] for name in found) else value
    if isinstance(value, list | tuple):
        items = [_reveal(part, f"{key}[{index}]") for index, part in enumerate(value)]
        return type(value)(items) if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return value


def _reveal_text(text: str, key: str) -> Any:
    require_variables(text, key)
    whole = _TYPED.fullmatch(text)
    if whole is not None:
        return _value(whole)
    return _TYPED.sub(lambda match: str(_value(match)) if is_secret_variable(match["name"]) else match[0], text)


def _value(match: re.Match[str]) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    name = match["name"]
    value = os.environ.get(name, _default(match))
    if value is not None and name in os.environ and len(value) >= _SHORTEST:
        _revealed[value] = f"${{oc.env:{name}}}"
    if not match["decode"] or value is None:
        return value
    try:
        return oc.decode(value, OmegaConf.create(), None)  # type: ignore[arg-type]  # a node is for interpolations
    except Exception:  # whose message has the value
        raise UserError(f"{match[0]}: oc.decode cannot read the value of {name}.") from None


def _default(match: re.Match[str]) -> str | None:
    text = match["default"]
    if text is None or text == "null":
        return None
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if text.startswith("'") else text


def _texts(value: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _texts(getattr(value, field.name), _join(key, field.name))
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _texts(part, _join(key, str(name)))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _texts(part, f"{key}[{index}]")


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name
