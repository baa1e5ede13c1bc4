"""How many parameters the built-in model has, from its shape alone."""

from titan_exp.config.builtins import ARCHITECTURES
from titan_exp.config.model import ModelConfig
from titan_exp.config.projections import projections


def parameters(model: ModelConfig) -> int | None:
    """Parameters of the whole model; None where the architecture is the user's own."""
    if model.architecture not in ARCHITECTURES:
        return None
    matrices = sum(each.inputs * each.outputs for each in projections(model))
    norms = (2 * model.layers + 1) * model.dim
    ends = model.vocab_size * model.dim * (1 if model.tied_embeddings else 2)
    return matrices + norms + ends
