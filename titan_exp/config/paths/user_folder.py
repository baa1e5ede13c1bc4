"""Per-user state and cache folders of the XDG standard."""

import os
from pathlib import Path


def user_folder(variable: str, default: str) -> Path:
    """Folder of titan_exp below the one that `variable` names, or below `default` in this user's home. Raises OSError
    if the user has no home, as in a container without an entry in /etc/passwd."""
    base = os.environ.get(variable) or os.path.expanduser(f"~/{default}")
    if base.startswith("~"):
        raise FileNotFoundError(f"this user has no home folder, and {variable} is not set")
    return Path(base) / "titan_exp"
