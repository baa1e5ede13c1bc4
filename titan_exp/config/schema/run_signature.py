"""Signature of a run's configuration: an HMAC with this user's key, written by every launch.

A run is the user's own if its `config.yaml` verifies; a run of another user, a download or an altered file does not.
"""

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.paths.foreign_file import read_file
from titan_exp.config.paths.user_folder import user_folder

SIGNATURE_FILE = "config.sig"
"""File beside `config.yaml`: one line for every user who launched the run."""
_KEY_BYTES = 32
_PURPOSE = b"titan_exp: config.yaml of a launched run\0"


def signed(config: str, others: Path) -> str | None:
    """Content of the signature file of a configuration: the lines in the file `others` and this user's; None if this
    user has no key and can make none."""
    key = _read_key() or _make_key()
    if key is None:
        return None
    try:
        lines = read_file(others).decode("ascii").split()
    except (OSError, UnicodeDecodeError, UserError):
        lines = []
    return "\n".join(dict.fromkeys([*lines, _digest(key, config.encode())])) + "\n"


def is_own(config: bytes, signatures: Path) -> bool:
    """True if this user's key signed the content of a `config.yaml`."""
    key = _read_key()
    if key is None:
        return False
    try:
        lines = read_file(signatures).split()
    except (OSError, UserError):
        return False
    expected = _digest(key, config).encode()
    return any(hmac.compare_digest(line, expected) for line in lines)


def key_path() -> Path:
    """File of this user's key. Raises OSError if the user has no home."""
    return user_folder("XDG_STATE_HOME", ".local/state") / "key"


def _digest(key: bytes, config: bytes) -> str:
    return hmac.new(key, _PURPOSE + config, hashlib.sha256).hexdigest()


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
