"""Fit of a published repository: preset of its shape, and its parts that are not read."""

from collections.abc import Iterator, Mapping
from typing import Any

from titan_exp.config.errors.did_you_mean import listed
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.hydra.presets import nearest_preset
from titan_exp.models.convert.hf_config import (
    MTP_KEY,
    family_types,
    from_huggingface,
    language_model,
    other_family,
    quantized_weights,
)
from titan_exp.models.spec.lookup import mtp_depth

TOWERS = {"vision_config": "vision tower", "audio_config": "audio tower"}
"""Parts of a multimodal model beside its language model, by their keys in `config.json`."""


def repository_lines(values: Mapping[str, Any], name: str, weights: ModelConfig | None = None) -> Iterator[str]:
    """Preset that fits a `config.json`, then what of the repository is not read.

    `weights` is the model as its files hold it; None if only `config.json` is known.

    Raises:
        UserError: no family reads the `model_type`.
    """
    text, _ = language_model(values)
    if not has_family(values):
        from_huggingface(text, name)
        yield no_family(values)
        return
    try:
        model = from_huggingface(text, name)
        quantized_weights(text)
    except UserError as error:  # it says what the family cannot compute
        yield f"cannot be converted: {error}"
        return
    preset, keys = nearest_preset(model)
    yield f"model={preset} fits but for {' '.join(keys)}" if keys else f"fits model={preset}"
    if text is not values:
        yield from (f"not read: {tower} ({key})" for key, tower in TOWERS.items() if key in values)
    depth = int(text.get(MTP_KEY) or 0)
    if depth and weights is not None and mtp_depth(weights) == 0:
        yield f"missing in the files: modules of multi-token prediction, of which config.json has {MTP_KEY}={depth}"
    elif depth:
        yield f"{depth} module of multi-token prediction: trained with model.mtp.depth={depth}"


def has_family(values: Mapping[str, Any]) -> bool:
    """True if a family here reads the `model_type` of a `config.json`."""
    return language_model(values)[0].get("model_type") in family_types()


def no_family(values: Mapping[str, Any]) -> str:
    """Sentences that name a `model_type` of no family, the families, and the one that takes any type."""
    kind, (_, other) = values.get("model_type"), other_family() or ("", None)
    found = f"model_type {kind!r} is of no family here; families are {listed(family_types(), 'and')}."
    return f"{found} {other.offer}" if other else found
