"""Precomputed weight scales: amax of all shards, reduced over ranks in one message.

Rounding is monotonic, so amax before rounding, then rounded, equals amax of the gathered rounded weight.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from titan_exp.ops.local_tensor import local_tensor
from titan_exp.quantization.recipes import ScaledLinearImpl


class WeightScales:
    """Precomputed scales of the quantized weights of this rank's modules, which compute in `dtype`.

    `groups` are ranks with other shards of the same weights, possibly with some of the same.
    """

    def __init__(self, parts: Sequence[nn.Module], groups: Sequence[dist.ProcessGroup], dtype: torch.dtype) -> None:
        self._weights = list(_weights(parts))
        self._scales = [linear.weight_scale for _, linear in self._weights if linear.weight_scale is not None]
        self._groups, self._dtype = groups, dtype

    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute the scales after the weights have changed; called by all ranks."""
        if not self._weights:
            return
        first = self._weights[0][1]
        # Uneven shards may be empty.
        shards = (local_tensor(weight) for weight, _ in self._weights)
        maxima = [shard.abs().amax() if shard.numel() else shard.new_zeros(()) for shard in shards]
        amax = torch.stack(maxima).to(self._scales[0].device)
        for group in self._groups:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        scales = first.scales_of(amax.to(self._dtype))
        torch._foreach_copy_(self._scales, list(scales.unbind()))


def _weights(parts: Sequence[nn.Module]) -> Iterator[tuple[nn.Parameter, ScaledLinearImpl]]:
    for part in parts:
        for module in part.modules():
            linear_impl = getattr(module, "linear_impl", None)
            if isinstance(linear_impl, ScaledLinearImpl) and linear_impl.weight_scale is not None:
                yield module.get_parameter("weight"), linear_impl
