"""Sizes of what comes with the package or with torch, from names and shapes alone."""

from titan_exp.config.groups.builtins import ARCHITECTURES, OPTIMIZERS
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.layout.linear_shapes import projections


def parameters(model: ModelConfig) -> int | None:
    """Parameters of the whole model; None where the architecture is the user's own."""
    if model.architecture not in ARCHITECTURES:
        return None
    matrices = sum(each.inputs * each.outputs for each in projections(model))
    norms = (2 * model.layers + 1) * model.dim
    ends = model.vocab_size * model.dim * (1 if model.tied_embeddings else 2)
    return matrices + norms + ends


def has_known_state(optimizer: str) -> bool:
    """Whether an optimizer keeps at most three numbers for each parameter: ours, and torch's but for LBFGS."""
    return optimizer in OPTIMIZERS or (optimizer.startswith("torch.optim.") and not optimizer.endswith("LBFGS"))
