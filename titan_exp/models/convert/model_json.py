"""`model.json` beside weights outside of a run folder: the model config and its special tokens."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.schema.component import config_class, current_names
from titan_exp.config.schema.foreign_code import require_trust

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
    from pydantic import TypeAdapter, ValidationError

    try:
        model = current_names("model", values["model"])
        require_trust(path, b"", {"model": model}, trust)
        config = TypeAdapter(config_class("model", model)).validate_python(model)
    except (KeyError, TypeError, ValidationError) as error:
        raise UserError(f"{path} does not describe a model: {error}") from error
    return config, dict(values.get("special_tokens") or {})
