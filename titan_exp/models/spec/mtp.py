"""Multi-token prediction (DeepSeek-AI 2024, V3): config fields and spec of the modules behind the last layer.

Module k joins the hidden state of token i with the embedding of token i + k, and predicts token i + k + 1 by a block
of its own and the model's LM head. It is trained and not used in inference.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.model import NO_CHANGE
from titan_exp.config.groups.types import BlockCount, NonNegativeFloat
from titan_exp.models.spec.model_spec import LayerSpec, LinearSpec, VectorSpec
from titan_exp.models.spec.tp_plan import SEQUENCE_PARALLEL

MTP_DEPTH, MTP_WEIGHT = "model.mtp.depth", "model.mtp.weight"
"""Keys of the configuration."""


@dataclass(frozen=True)
class MTPConfig:
    """Multi-token prediction."""

    depth: BlockCount = 0
    """Modules, each of which predicts one token further ahead; 0 is none, and DeepSeek V3 has 1.
    E.g. `model=deepseek_debug model.mtp.depth=1`."""
    weight: NonNegativeFloat = field(default=0.3, metadata=NO_CHANGE)
    """Factor of the modules' mean loss in the objective; V3 trains with 0.3, and with 0.1 for its last third.
    E.g. `model=deepseek_debug model.mtp.weight=0.1`."""


def mtp_layers(config: MTPConfig, layer: LayerSpec, dim: int, std: float) -> tuple[LayerSpec, ...]:
    """Specs of the modules, whose block is `layer`; each has its own norms and projection, and shares embedding and
    head with the model."""
    projection = LinearSpec("projection", 2 * dim, dim, std, SEQUENCE_PARALLEL)
    before = (VectorSpec("embedding_norm", dim), VectorSpec("hidden_norm", dim))
    module = replace(
        layer, linears=(projection, *layer.linears), vectors=(*before, *layer.vectors, VectorSpec("norm", dim))
    )
    return (module,) * config.depth


def mtp_violations(config: MTPConfig, *, tied: bool) -> Iterator[Violation]:
    """A model whose embedding and head the modules cannot share."""
    if config.depth and tied:
        yield Violation(
            MTP_DEPTH,
            config.depth,
            "its modules look tokens up in the embedding where the head is, and with model.tied_embeddings=true the "
            "embedding is the head's weight as well",
            f"model.tied_embeddings=false, or {MTP_DEPTH}=0",
        )
