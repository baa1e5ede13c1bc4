"""Group `model`: the fields of every model. A family adds its own in `titan_exp/models/<architecture>.py`."""

from dataclasses import dataclass

from titan_exp.config.groups.types import Count, PositiveInt


@dataclass(frozen=True)
class ModelConfig:
    """Fields that every model has."""

    name: str
    """Published name of the model, shown in tables."""
    architecture: str
    """Model family (`llama`, `qwen3`), or the import path of your own: a module with the same public names as a
    family (`my_package.my_model`), or a plain class (`my_package.models.Mamba`)."""
    layers: PositiveInt
    """Number of blocks."""
    dim: PositiveInt
    """Width of the residual stream."""
    vocab_size: Count
    """Rows of the embedding; at least as many as the tokenizer has tokens. 0 for a model that reads no tokens."""
    context: PositiveInt
    """Context length in tokens of the published model."""
