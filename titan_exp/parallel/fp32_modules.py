"""Modules that compute in fp32 in a bf16 run (`training.fp32_modules`)."""

from fnmatch import fnmatchcase

from torch import nn

from titan_exp.config.errors.did_you_mean import did_you_mean
from titan_exp.config.errors.user_error import UserError, Violation


def require_modules(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Check that every pattern of `fp32_modules` matches a module of the whole model.

    Raises:
        UserError: a pattern matches no module.
    """
    named = _named(model)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            suggestion = did_you_mean(pattern, named) or "patterns look like blocks.*.attention_norm"
            violation = Violation("training.fp32_modules", pattern, "the model has no such module", suggestion)
            raise UserError("This run cannot be started.", [violation])


def matching_modules(model: nn.Module, patterns: tuple[str, ...]) -> list[nn.Module]:
    """Outermost modules that match any of the patterns."""
    named = _named(model)
    found = {name: module for pattern in patterns for name, module in named.items() if fnmatchcase(name, pattern)}
    return [module for name, module in found.items() if not any(name.startswith(f"{other}.") for other in found)]


def _named(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if name and any(True for _ in module.parameters())}
