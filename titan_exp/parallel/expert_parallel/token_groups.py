"""Tokens among tensor-parallel ranks: each routes a part of them; ranks that share experts' channels need all.

Sequence parallelism has split the tokens already. Without it every rank has all of them, and takes a part for the time
of a mixture of experts, so that no token is routed twice.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from titan_exp.ops.autograd import dense
from titan_exp.parallel.functional_collectives import all_gather
from titan_exp.parallel.tensor_parallel.collectives import TensorParallelGroup


@dataclass(frozen=True)
class TokenGroup(TensorParallelGroup):
    """Tensor-parallel ranks, each with other tokens."""

    sequence: bool = True

    def gather(self, part: Tensor) -> Tensor:
        """All ranks' tokens [degree · tokens, ...]; the gradient is summed over ranks."""
        return self.gather_input(part[None])[0]

    def reduce(self, x: Float[Tensor, "all_tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """Sum over ranks of all tokens, of which this rank keeps its own."""
        return self.reduce_output(x[None])[0]

    def split(self, x: Float[Tensor, "batch seq dim"]) -> Float[Tensor, "batch part dim"]:
        """This rank's part of tokens that all ranks have; the last ranks may have fewer, or none."""
        return _Split.apply(x, self)  # type: ignore[return-value]  # a Tensor

    def join(self, part: Float[Tensor, "batch part dim"], length: int) -> Float[Tensor, "batch seq dim"]:
        """The `length` tokens of each sequence from the ranks' parts, the same on all ranks, as is the gradient."""
        return _Join.apply(part, self, length)  # type: ignore[return-value]  # a Tensor

    def part(self, length: int) -> slice:
        """This rank's tokens of a sequence."""
        size = -(-length // self.degree)
        return slice(min(self.rank * size, length), min((self.rank + 1) * size, length))


def _joined(part: Tensor, region: TokenGroup, length: int) -> Tensor:
    padded = F.pad(part, (0, 0, 0, -(-length // region.degree) - part.shape[1]))
    return torch.cat(all_gather(padded, region.degree, region.group).chunk(region.degree), dim=1)[:, :length]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: TokenGroup) -> Tensor:
        ctx.region, ctx.length = region, x.shape[1]
        return dense(x[:, region.part(x.shape[1])])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _joined(gradients[0], ctx.region, ctx.length), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, region: TokenGroup, length: int) -> Tensor:
        ctx.region = region
        return _joined(part, region, length)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # All ranks compute the same loss from all tokens, hence the same gradient.
        return gradients[0][:, ctx.region.part(gradients[0].shape[1])].contiguous(), None, None
