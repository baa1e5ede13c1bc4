"""Credential masking and refusal, since run folders are shared.

Detects known token formats, values after names such as `api_key`, and values of secret environment variables.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from titan_exp.config.errors.user_error import UserError, Violation

MASK = "***"

_SHAPES = re.compile(
    r"hf_[A-Za-z0-9]{16,}"
    r"|(?:sk|rk)-(?:[A-Za-z]+-)*[A-Za-z0-9_]{16,}"
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}|glpat-[A-Za-z0-9_-]{16,}"
    r"|wandb_v\d_[A-Za-z0-9_]{16,}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|AIza[A-Za-z0-9_-]{30,}"
    r"|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"
)
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_URL_USER = re.compile(
    r"(?P<before>[a-z][a-z0-9+.-]*://)(?P<secret>[^\s/@:'\"]*:[^\s/@'\"]+|[^\s/@:'\"]{16,})(?=@)", re.IGNORECASE
)
# `token` alone or with one of these prefixes: `pad_token` and `text_key` are not credentials.
_NAME = (
    r"(?:(?:[A-Za-z0-9_.-]*[_.-])?"
    r"(?:api[_-]?key|access[_-]?key|secret(?:[_-]?key)?|private[_-]?key|password|passwd|passphrase|credentials?"
    r"|bearer|authorization|(?:auth|access|api|bearer|hf|hub|refresh|session|wandb)[_-]?token)"
    r"|(?:[A-Za-z0-9_-]+\.)*(?:token|sig))"
)
# Any quoted value matches; a bare one needs a digit, or code such as `token = tokenizer.next` would be masked.
_QUOTED = re.compile(
    rf"(?P<before>\b{_NAME}[\"']?\s*[:=]\s*(?P<quote>[\"']))(?P<secret>[^\"'\s]{{6,}})(?=(?P=quote))", re.I
)
_BARE = re.compile(
    rf"(?P<before>\b{_NAME}\s*[:=]\s*(?:(?:bearer|basic)\s+)?)(?P<secret>(?=[^\s\"',;&]*\d)[A-Za-z0-9_+/.~=-]{{8,}})",
    re.I,
)
_SECRET_KEY = re.compile(rf"{_NAME}\Z", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASS|CREDENTIALS?|AUTH)($|_)", re.IGNORECASE)


def mask(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Replace every credential in a text by `***`."""
    return _masked(text, _secret_values(environment))


def _masked(text: str, secrets: Sequence[str]) -> str:
    for value in secrets:
        text = text.replace(value, MASK)
    text = _PRIVATE_KEY.sub(rf"\1{MASK}\2", text)
    text = _SHAPES.sub(MASK, text)
    for pattern in (_URL_USER, _QUOTED, _BARE):
        text = pattern.sub(rf"\g<before>{MASK}", text)
    return text


def mask_override(override: str, environment: Mapping[str, str] = os.environ) -> str:
    """Mask a command-line override; the whole value if its key names a credential."""
    key, equals, value = override.partition("=")
    if equals and value not in ("", "null") and is_secret_key(key):
        return f"{key}={MASK}"
    return mask(override, environment)


def is_secret_key(key: str) -> bool:
    """True if a configuration key names a credential."""
    return bool(_SECRET_KEY.match(key.rpartition(".")[2]))


def is_secret_variable(name: str) -> bool:
    """True if an environment variable names a credential."""
    return bool(_SECRET_VARIABLE.search(name))


def refuse_secrets(config: Mapping[str, object]) -> None:
    """Raise UserError about keys with credentials; config.yaml cannot be masked, since ranks read it."""
    secrets = _secret_values(os.environ)
    found = [
        Violation(key, MASK, "looks like a credential, and config.yaml would keep it", _REMEDY)
        for key, value in _leaves(config)
        if isinstance(value, str) and value and (is_secret_key(key) or _masked(value, secrets) != value)
    ]
    if found:
        raise UserError("The configuration holds credentials.", found)


_REMEDY = "leave it out and let your code read it from an environment variable, which is not recorded"


def _secret_values(environment: Mapping[str, str]) -> list[str]:
    values = {value for name, value in environment.items() if is_secret_variable(name) and _is_random(value)}
    return sorted(values, key=len, reverse=True)


def _is_random(value: str) -> bool:
    """True if a value looks like a secret rather than a flag, a path or a word."""
    return len(value) >= 8 and not value.startswith(("/", ".")) and any(c.isdigit() for c in value)


def _leaves(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    parts: Iterable[tuple[str, object]]
    if isinstance(value, Mapping):
        parts = ((f"{key}.{name}" if key else str(name), item) for name, item in value.items())
    elif isinstance(value, list | tuple):
        parts = ((f"{key}[{index}]", item) for index, item in enumerate(value))
    else:
        yield key, value
        return
    for name, item in parts:
        yield from _leaves(item, name)
