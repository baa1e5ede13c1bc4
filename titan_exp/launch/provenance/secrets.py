"""Credential masking and refusal, since run folders are shared.

Detects known token formats, values after names such as `api_key`, and values of secret environment variables.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping

from titan_exp.config.errors.user_error import UserError, Violation, listed
from titan_exp.config.schema.foreign_code import import_paths_in
from titan_exp.config.schema.identity_keys import is_among
from titan_exp.config.secrets import (
    CREDENTIAL_NAME,
    LABELS,
    SECRET,
    SHAPES,
    URL_USER,
    is_secret_key,
    secret_values,
    variables_in,
    without_variables,
)

MASK = "***"

_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
# Any quoted value matches. A bare value needs a digit; otherwise code such as `token = tokenizer.next` would be masked.
_QUOTED = re.compile(
    rf"(?P<before>\b{CREDENTIAL_NAME}[\"']?\s*[:=]\s*(?P<quote>[\"']))(?P<secret>[^\"'\s]{{6,}})(?=(?P=quote))", re.I
)
_BARE = re.compile(
    rf"(?P<before>\b{CREDENTIAL_NAME}\s*[:=]\s*(?:(?:bearer|basic)\s+)?)"
    r"(?P<secret>(?=[^\s\"',;&]*\d)[A-Za-z0-9_+/.~=-]{8,})",
    re.IGNORECASE,
)


def mask(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Replace every credential in a text by `***`."""
    return _masked(text, secret_values(environment.items()))


def _masked(text: str, secrets: Iterable[str]) -> str:
    for value in secrets:
        text = text.replace(value, MASK)
    text = _PRIVATE_KEY.sub(rf"\1{MASK}\2", text)
    text = SHAPES.sub(MASK, text)
    for pattern in (URL_USER, _QUOTED, _BARE):
        text = pattern.sub(_masked_match, text)
    return text


def _masked_match(match: re.Match[str]) -> str:
    # `${oc.env:HF_TOKEN}` is not a credential, but the variable's value is.
    return f"{match['before']}{MASK}" if without_variables(match["secret"]).strip(":") else match[0]


def mask_override(override: str, environment: Mapping[str, str] = os.environ) -> str:
    """Mask credentials in a command-line override; mask the whole value if its key names a credential. Interpolations
    stay as typed."""
    key, equals, value = override.partition("=")
    if equals and value not in ("", "null") and is_secret_key(key) and not value.strip("'\"").startswith("${"):
        return f"{key}={MASK}"
    return mask(override, environment)


def refuse_secrets(config: Mapping[str, object]) -> None:
    """Raise UserError about keys with credentials, since ranks read config.yaml and it cannot be masked, and about
    secret variables in keys that your code does not read."""
    secrets = secret_values(os.environ.items())
    found = []
    for key, value in _leaves(config):
        if not isinstance(value, str) or not value:
            continue
        literal = without_variables(value)
        if _masked(literal, secrets) != literal or (literal and is_secret_key(key)):
            reason = "this looks like a credential, and config.yaml would keep it"
            found.append(
                Violation(
                    key,
                    MASK,
                    reason,
                    f"put it into an environment variable, and type the variable: {key}='${{oc.env:HF_TOKEN}}'",
                )
            )
        elif variables_in(value) and not _may_hold_secrets(key, config):
            names = listed(dict.fromkeys(variables_in(value)), "and")
            found.append(Violation(key, value, f"{names}: {SECRET}", _remedy(key)))
    if found:
        raise UserError("The configuration holds credentials.", found)


OPTIONS = ("model.options", "optimizer.options", "lr_schedule.options", "data.options", "training.objective_options")
"""Arguments of your code; it gets the values of secret variables in them."""


def _may_hold_secrets(key: str, config: Mapping[str, object]) -> bool:
    groups = {name.partition(".")[0] for name in import_paths_in(config)} & {"model", "optimizer"}
    return is_among(key.partition("[")[0], (*LABELS, *OPTIONS, *groups))


def _remedy(key: str) -> str:
    if key.startswith("cluster."):
        return "leave it out, since jobs inherit your environment and their shell reads $NAME"
    return f"type the value itself, or use a variable with another name (you may put secrets into {listed(OPTIONS)})"


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
