"""`model.json` beside weights outside of a run folder: the model config and its special tokens."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.paths.foreign_file import table
from titan_exp.config.schema.component import config_class, current_names
from titan_exp.config.schema.foreign_code import require_trust
from titan_exp.config.schema.typed_config import validated

FILE = "model.json"
"""File name in the folder of a checkpoint."""


def to_json(config: ModelConfig, special_tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values that `from_json` reads."""
    return {"model": dataclasses.asdict(config), "special_tokens": dict(special_tokens)}


def from_json(values: Mapping[str, Any], path: Path, trust: bool = False) -> tuple[ModelConfig, dict[str, Any]]:
    """Model config and special tokens from the content of the file at `path`.

    Raises:
        UserError: the file describes no model, or is of another version.
        Untrusted: the model is code, without `trust`.
    """
    model = current_names("model", table(values.get("model"), f"{path}: model"))
    require_trust(path, b"", {"model": model}, trust)
    config = validated(config_class("model", model), model, str(path))
    return config, dict(table(values.get("special_tokens") or {}, f"{path}: special_tokens"))
