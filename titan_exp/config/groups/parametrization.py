"""Group `parametrization`: how initial weights and hyperparameters follow from a model's shape."""

from dataclasses import dataclass, field

from titan_exp.config.groups.types import PositiveFloat, PositiveInt


@dataclass(frozen=True)
class ParametrizationConfig:
    """Fields of every parametrization. Each adds its own in `titan_exp/models/parametrization/<name>.py`."""

    name: str = "standard"
    """Parametrization (`standard`, `mup`, `completep`), or the import path of a module of your own with the same public
    names.

    `standard` initializes and trains every shape with the same numbers. E.g. `parametrization.name=standard`."""


@dataclass(frozen=True)
class BaseShapeConfig(ParametrizationConfig):
    """Fields of parametrizations by width, which leave a model of the base width unchanged."""

    name: str = field()
    """Parametrization.

    It has no default, so that it is part of the run id. E.g. `parametrization=mup`."""
    base_width: PositiveInt
    """`model.dim` at which the hyperparameters were tuned, and nothing is scaled.
    E.g. `parametrization=mup parametrization.base_width=256`."""
    base_head_dim: PositiveInt | None = None
    """Width of a query head at the base width; null if all widths have the model's, and more heads.

    Scores of attention are then scaled by 1 / width of a head, instead of its root.
    E.g. `parametrization=mup parametrization.base_head_dim=64`."""
    fixed: tuple[str, ...] = ()
    """Keys of the group `model` with the same value at every width (`moe.ffn_dim`, `kv_lora_rank`).

    Linear layers with as many inputs keep their initial weights and learning rate; the inputs of all others grow with
    `model.dim`. E.g. `parametrization=mup parametrization.fixed='[moe.ffn_dim]'`."""
    embedding_multiplier: PositiveFloat = 1.0
    """Factor of embeddings at every width. E.g. `parametrization=mup parametrization.embedding_multiplier=10`."""
    output_multiplier: PositiveFloat = 1.0
    """Factor of logits at every width, beside that of the parametrization.
    E.g. `parametrization=mup parametrization.output_multiplier=2`."""
