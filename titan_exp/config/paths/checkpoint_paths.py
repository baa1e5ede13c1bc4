"""Checkpoint folders of a run, found by name."""

import re
from pathlib import Path

COMPLETE_NAME = re.compile(r"step-(\d{8,})")
"""Name of a complete checkpoint's folder."""
METADATA_FILE = ".metadata"
"""The file in it that says what it holds."""


def step_name(step: int) -> str:
    """Folder name of a complete checkpoint."""
    return f"step-{step:08d}"


def saved_state(asked: str) -> Path | None:
    """Checkpoint at a path: the folder itself, or the newest complete one of a run; None if there is none.

    Args:
        asked: a checkpoint's folder, a run folder, or its `checkpoints/`.
    """
    path = Path(asked).expanduser()
    if (path / METADATA_FILE).is_file() and not path.name.endswith(".partial"):
        return path
    for folder in (path / "checkpoints", path):
        if folder.is_dir():
            found = [
                entry
                for entry in folder.iterdir()
                if COMPLETE_NAME.fullmatch(entry.name) and (entry / METADATA_FILE).is_file()
            ]
            if found:
                return max(found, key=lambda entry: int(entry.name.removeprefix("step-")))
    return None


def huggingface_folder(asked: str) -> Path | None:
    """The Hugging Face folder of weights that a path is; None where it is none."""
    path = Path(asked).expanduser()
    return path if (path / "config.json").is_file() and any(path.glob("*.safetensors")) else None
