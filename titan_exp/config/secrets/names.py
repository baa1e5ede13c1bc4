"""Names of credentials: environment variables and configuration keys."""

import re

# `token` alone or with one of these prefixes: `pad_token` and `text_key` are not credentials.
CREDENTIAL_NAME = (
    r"(?:(?:[A-Za-z0-9_.-]*[_.-])?"
    r"(?:api[_-]?key|access[_-]?key|secret(?:[_-]?key)?|private[_-]?key|password|passwd|passphrase|credentials?"
    r"|bearer|authorization|(?:auth|access|api|bearer|hf|hub|refresh|session|wandb)[_-]?token)"
    r"|(?:[A-Za-z0-9_-]+\.)*(?:token|sig))"
)
"""Pattern of a name before a credential, in configurations and code."""
_SECRET_KEY = re.compile(rf"{CREDENTIAL_NAME}\Z", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASS|CREDENTIALS?|AUTH)($|_)", re.IGNORECASE)


def is_secret_key(key: str) -> bool:
    """True if a configuration key names a credential."""
    return bool(_SECRET_KEY.match(key.rpartition(".")[2]))


def is_secret_variable(name: str) -> bool:
    """True if an environment variable names a credential."""
    return bool(_SECRET_VARIABLE.search(name))
