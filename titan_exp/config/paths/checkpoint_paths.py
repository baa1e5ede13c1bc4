"""Checkpoint paths: complete checkpoints of a run, Hugging Face folders."""

import re
from pathlib import Path

COMPLETE_NAME = re.compile(r"step-(\d{8,})")
"""Pattern of a complete checkpoint's folder name."""
METADATA_FILE = ".metadata"
"""DCP metadata file in a checkpoint's folder."""


def step_name(step: int) -> str:
    """Folder name of a complete checkpoint."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int | None:
    """Step of a complete checkpoint, from its folder's name; None for another folder."""
    complete = COMPLETE_NAME.fullmatch(checkpoint.name)
    return int(complete[1]) if complete else None


def saved_state(path_text: str) -> Path | None:
    """Checkpoint at a path: the folder itself, or the newest complete one of a run folder or its `checkpoints/`."""
    path = Path(path_text).expanduser()
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


def huggingface_folder(path_text: str) -> Path | None:
    """Path of a Hugging Face folder with weights; None for anything else."""
    path = Path(path_text).expanduser()
    return path if (path / "config.json").is_file() and any(path.glob("*.safetensors")) else None


def initial_folder(path_text: str) -> Path | None:
    """Weights of `checkpoint.initial`: a Hugging Face folder, or the checkpoint at a path."""
    return huggingface_folder(path_text) or saved_state(path_text)
