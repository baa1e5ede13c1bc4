"""Run folders of a folder, without those that other users have closed to this one."""

import os
from pathlib import Path


def is_readable_run(path: Path) -> bool:
    """True for a run folder whose configuration this user may read."""
    return os.access(path / "config.yaml", os.R_OK)


def readable_runs(folder: Path) -> list[Path]:
    """Run folders in a folder by name, none if it is missing or closed to this user."""
    if not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK):
        return []
    return [path for path in sorted(folder.iterdir()) if not path.name.startswith(".") and is_readable_run(path)]
