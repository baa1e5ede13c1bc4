"""Precomputed weight scales: amax of all shards, reduced over ranks in one message; and shards quantized with them.

Rounding is monotonic, so amax before rounding, then rounded, equals amax of the gathered rounded weight.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from titan_exp.ops.local_tensor import local_tensor
from titan_exp.quantization.float8.float8_tensor import E4M3, cast
from titan_exp.quantization.recipes import Float8LinearImpl, ScaledLinearImpl


class WeightScales:
    """Precomputed scales of the quantized weights of this rank's modules, which compute in `dtype`.

    `groups` are ranks with other shards of the same weights, possibly with some of the same.
    """

    def __init__(self, parts: Sequence[nn.Module], groups: Sequence[dist.ProcessGroup], dtype: torch.dtype) -> None:
        self._linears = list(_scaled_linears(parts))
        self._scales = [linear.weight_scale for _, linear in self._linears if linear.weight_scale is not None]
        self._groups, self._dtype = groups, dtype

    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute scales and sent shards after the weights have changed; called by all ranks."""
        if not self._linears:
            return
        first = self._linears[0][1]
        shards = [local_tensor(module.get_parameter("weight")) for module, _ in self._linears]
        amax = shards[0].new_zeros(len(shards))
        # Uneven shards may be empty, which have no maximum.
        filled = [number for number, shard in enumerate(shards) if shard.numel()]
        if filled:
            norms = torch._foreach_norm([shards[number] for number in filled], torch.inf)
            torch._foreach_copy_([amax[number] for number in filled], norms)
        amax = amax.to(self._scales[0].device)
        for group in self._groups:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        scales = first.scales_of(amax.to(self._dtype))
        torch._foreach_copy_(self._scales, list(scales.unbind()))
        for (_, linear_impl), shard, scale in zip(self._linears, shards, self._scales, strict=True):
            if isinstance(linear_impl, Float8LinearImpl) and linear_impl.sent_shard is not None:
                # First rounded to the compute dtype, as for a bf16 all-gather; torchao casts from fp32 directly.
                linear_impl.sent_shard.copy_(cast(shard.to(self._dtype), scale, E4M3).view(torch.uint8))


def _scaled_linears(parts: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, ScaledLinearImpl]]:
    for part in parts:
        for module in part.modules():
            linear_impl = getattr(module, "linear_impl", None)
            if isinstance(linear_impl, ScaledLinearImpl) and linear_impl.weight_scale is not None:
                yield module, linear_impl
