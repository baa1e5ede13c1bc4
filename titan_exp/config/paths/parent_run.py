"""Parent of a continued run: `checkpoint.continue_from` in a form that is the same however it is typed."""

import os
from pathlib import Path

from titan_exp.config.paths.checkpoint_paths import METADATA_FILE, saved_state, step_name, step_of
from titan_exp.config.paths.remote_url import is_url


def normalize_parent(typed: str, runs: Path) -> tuple[str, int | None]:
    """Parent run, and the step if one of its checkpoints is named.

    The run is NAME/ID if it is in the folder of runs, else its absolute path or its URL. A path that does not exist
    stays as it is.
    """
    if is_url(typed) or not Path(typed).expanduser().exists():
        return typed, None
    path, step = Path(os.path.abspath(Path(typed).expanduser())), None
    if step_of(path) is not None and path.parent.name == "checkpoints":
        path, step = path.parent.parent, step_of(path)
    elif path.name == "checkpoints":
        path = path.parent
    within = os.path.relpath(path, os.path.abspath(runs))
    return (within if within.count("/") == 1 and not within.startswith("..") else str(path)), step


def parent_location(parent: str, runs: Path) -> str:
    """Path or URL of a normalized parent."""
    return parent if is_url(parent) or os.path.isabs(parent) else str(runs / parent)


def parent_checkpoint(location: str, step: int | None) -> Path | None:
    """Complete checkpoint at a path: of a run's step, or its newest, or the checkpoint itself."""
    if step is None:
        return saved_state(location)
    path = Path(location) / "checkpoints" / step_name(step)
    return path if (path / METADATA_FILE).is_file() else None
