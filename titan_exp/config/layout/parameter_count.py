"""Optimizer state per parameter, by the optimizer's name."""

from titan_exp.config.groups.builtins import OPTIMIZERS


def has_known_state(optimizer: str) -> bool:
    """Whether an optimizer keeps at most three numbers for each parameter: ours, and torch's but for LBFGS."""
    return optimizer in OPTIMIZERS or (optimizer.startswith("torch.optim.") and not optimizer.endswith("LBFGS"))
