"""Names of credentials, environment variables and configuration keys, and forms of their values."""

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import quote

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
