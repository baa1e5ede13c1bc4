"""Group `parametrization`: how initial weights and hyperparameters follow from a model's shape."""

from dataclasses import dataclass, field

from titan_exp.config.groups.types import PositiveFloat, PositiveInt


@dataclass(frozen=True)
class ParametrizationConfig:
    """Fields of every parametrization. Each adds its own in `titan_exp/models/parametrization/<name>.py`."""

    name: str = "standard"
    """Parametrization (`standard`, `mup`, `completep`), or the import path of your own: a module with the same public
    names. `standard` initializes and trains every shape with the same numbers."""


@dataclass(frozen=True)
class BaseShapeConfig(ParametrizationConfig):
    """Fields of parametrizations by width, which leave a model of the base width unchanged."""

    name: str = field()
    """Parametrization, as for all; without a default, so that it is part of the run id."""
    base_width: PositiveInt
    """`model.dim` at which the hyperparameters were tuned."""
    base_head_dim: PositiveInt | None = None
    """Width of a query head at the base width; null if all widths have the model's, and more heads. Scores of attention
    are then scaled by 1 / width of a head, instead of its root."""
    fixed: tuple[str, ...] = ()
    """Keys of the group `model` with the same value at every width (`moe.ffn_dim`, `kv_lora_rank`). Linear layers with
    as many inputs keep their initial weights and learning rate; the inputs of all others grow with `model.dim`."""
    embedding_multiplier: PositiveFloat = 1.0
    """Factor of embeddings at every width."""
    output_multiplier: PositiveFloat = 1.0
    """Factor of logits at every width, beside that of the parametrization."""
