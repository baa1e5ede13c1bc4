"""Optimizer state per parameter, by the optimizer's name."""

from titan_exp.config.groups.builtins import OPTIMIZERS


def has_known_state(optimizer: str) -> bool:
    """True if an optimizer keeps at most three numbers per parameter: ours, and torch's except LBFGS."""
    return optimizer in OPTIMIZERS or (optimizer.startswith("torch.optim.") and not optimizer.endswith("LBFGS"))
