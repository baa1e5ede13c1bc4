"""Mixed precision on one rank without FSDP: rounded weights in the place of parameters, for the time of a pass.

FSDP2 gathers weights into new memory each time, even from one rank; a recorded pass needs every address to stay. The
numbers are the same as FSDP2's: weights are rounded once a pass, and their gradients summed in the parameters' type.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class SingleRankPrecision:
    """The parameters of a model on one rank, as it computes with them.

    Args:
        module: its parameters plain tensors.
        dtype: what it computes in; parameters that have this type are used as they are.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """For the time of the block, modules find rounded weights where their parameters are; afterwards the gradients
        of those are added to the parameters', in place where there are some."""
        places = [
            (module, name, parameter)
            for module in self._module.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.dtype != self._dtype
        ]
        # A parameter that two modules share stays one.
        parameters = list({id(parameter): parameter for _, _, parameter in places}.values())
        rounded = _rounded(parameters, self._dtype)
        of = {id(parameter): weight for parameter, weight in zip(parameters, rounded, strict=True)}
        for module, name, parameter in places:
            module._parameters[name] = of[id(parameter)]
        try:
            yield
        finally:
            for module, name, parameter in places:
                module._parameters[name] = parameter
        for parameter, weight in zip(parameters, rounded, strict=True):
            _add_gradient(parameter, weight)


@torch.no_grad()
def _rounded(parameters: list[nn.Parameter], dtype: torch.dtype) -> list[nn.Parameter]:
    if not parameters:
        return []
    rounded = [torch.empty_like(parameter, dtype=dtype) for parameter in parameters]
    torch._foreach_copy_(rounded, list(parameters))
    return [nn.Parameter(weight, it.requires_grad) for weight, it in zip(rounded, parameters, strict=True)]


@torch.no_grad()
def _add_gradient(parameter: nn.Parameter, weight: nn.Parameter) -> None:
    if weight.grad is None:
        return
    if parameter.grad is None:
        parameter.grad = weight.grad.to(parameter.dtype)
    else:
        parameter.grad.add_(weight.grad)
    weight.grad = None
