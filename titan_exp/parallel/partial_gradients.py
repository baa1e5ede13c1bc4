"""Partial gradients: replicated parameters that each tensor-parallel rank used only in part."""

from collections.abc import Iterator

from torch import nn


def mark_partial(module: nn.Module, *names: str) -> None:
    """Note that gradients of these parameters of a module, or of all of its own, are summed over ranks."""
    module.partial_gradients = names or tuple(name for name, _ in module.named_parameters(recurse=False))  # type: ignore[assignment]


def partial_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The module's own parameters with partial gradients."""
    names: tuple[str, ...] = getattr(module, "partial_gradients", ())
    for name in names:
        yield getattr(module, name)
