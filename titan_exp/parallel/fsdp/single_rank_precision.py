"""Mixed precision on one rank without FSDP: rounded weights replace the parameters during a pass.

FSDP2 gathers weights into new memory even on one rank; a captured CUDA graph needs fixed addresses. The numbers equal
FSDP2's: weights are rounded once per pass, and gradients are summed in the parameters' dtype.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class SingleRankPrecision:
    """Computes with the plain-tensor parameters of a module in `dtype`."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Replace parameters by rounded weights in the `with` block, then add their gradients to the parameters'."""
        uses = [
            (module, name, parameter)
            for module in self._module.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.dtype != self._dtype
        ]
        # A parameter shared by two modules is rounded once.
        parameters = list({id(parameter): parameter for _, _, parameter in uses}.values())
        rounded = _rounded(parameters, self._dtype)
        weights = {id(parameter): weight for parameter, weight in zip(parameters, rounded, strict=True)}
        for module, name, parameter in uses:
            module._parameters[name] = weights[id(parameter)]
        try:
            yield
        finally:
            for module, name, parameter in uses:
                module._parameters[name] = parameter
        for parameter, weight in zip(parameters, rounded, strict=True):
            _add_gradient(parameter, weight)


@torch.no_grad()
def _rounded(parameters: list[nn.Parameter], dtype: torch.dtype) -> list[nn.Parameter]:
    if not parameters:
        return []
    rounded = [torch.empty_like(parameter, dtype=dtype) for parameter in parameters]
    torch._foreach_copy_(rounded, list(parameters))
    return [nn.Parameter(weight, p.requires_grad) for weight, p in zip(rounded, parameters, strict=True)]


@torch.no_grad()
def _add_gradient(parameter: nn.Parameter, weight: nn.Parameter) -> None:
    if weight.grad is None:
        return
    if parameter.grad is None:
        parameter.grad = weight.grad.to(parameter.dtype)
    else:
        parameter.grad.add_(weight.grad)
    weight.grad = None
