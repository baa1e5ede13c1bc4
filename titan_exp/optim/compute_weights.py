"""Optimizers in mixed precision: gradients in the compute dtype in, compute weights out."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class UpdatesComputeWeights(Protocol):
    """An optimizer whose `step` takes gradients in the compute dtype and writes the compute weights.

    Others get gradients in the dtype of their parameters. It scales gradients itself, too (`set_grad_scale`): clipping
    them in place would round them.
    """

    def set_compute_weights(self, copies: Mapping[Any, Tensor]) -> None:
        """Compute weights by parameter, with the parameters' strides; none for parameters that compute themselves."""
        ...


def cast_gradients(parameters: Iterable[Tensor]) -> None:
    """Cast gradients to the dtypes of their parameters, one at a time."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
            parameter.grad = parameter.grad.to(parameter.dtype)
