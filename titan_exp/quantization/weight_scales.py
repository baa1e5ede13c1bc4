"""Scales of whole weights, computed together: from each rank's shards, and one message over the ranks that share them.

The largest number of a weight is the same whether it is looked for in fp32 and rounded, or rounded first and then
looked for, so that these are the scales that would be computed from the gathered weight.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from titan_exp.ops.local_tensor import local_tensor
from titan_exp.quantization.recipes import ScaledLinearImpl


class WeightScales:
    """The precomputed scales of this rank's parts of a model.

    Args:
        parts: quantized, divided and sharded.
        groups: ranks that have other parts of the same weights; who has the same ones may be among them.
        dtype: what weights are computed in.
    """

    def __init__(self, parts: Sequence[nn.Module], groups: Sequence[dist.ProcessGroup], dtype: torch.dtype) -> None:
        self._weights = list(_weights(parts))
        self._scales = [it.weight_scale for _, it in self._weights if it.weight_scale is not None]
        self._groups, self._dtype = groups, dtype

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute them anew, after the weights have changed; all ranks together."""
        if not self._weights:
            return
        first = self._weights[0][1]
        # A rank may hold nothing of a weight that is divided unevenly.
        shards = (local_tensor(weight) for weight, _ in self._weights)
        largest = [it.abs().amax() if it.numel() else it.new_zeros(()) for it in shards]
        amax = torch.stack(largest).to(self._scales[0].device)
        for group in self._groups:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        scales = first.scales_of(amax.to(self._dtype))
        torch._foreach_copy_(self._scales, list(scales.unbind()))


def _weights(parts: Sequence[nn.Module]) -> Iterator[tuple[nn.Parameter, ScaledLinearImpl]]:
    for part in parts:
        for module in part.modules():
            product = getattr(module, "linear_impl", None)
            if isinstance(product, ScaledLinearImpl) and product.weight_scale is not None:
                yield module.get_parameter("weight"), product
