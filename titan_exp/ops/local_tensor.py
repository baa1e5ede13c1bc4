"""Local shard of a DTensor."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; a plain tensor as it is. Differentiable."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
