"""FLOPs of attention by torch's formulas, which the compiler asks where it chooses what to recompute."""

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from titan_exp.ops.matmul_flops import count_grouped_heads

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_grouped_heads_count_as_repeated_ones(kv_heads: int):
    """Torch 2.11 refuses them, so that no block of grouped heads compiled with a budget."""
    count_grouped_heads()
    count_grouped_heads()
    query = torch.empty(2, 8, 16, 4, device="meta")
    grouped, repeated = (torch.empty(2, heads, 16, 4, device="meta") for heads in (kv_heads, 8))
    forward = flop_registry[FORWARD](query, grouped, grouped, out_val=query)
    assert forward == flop_registry[FORWARD](query, repeated, repeated, out_val=query) == 2 * 2 * 2 * 8 * 16 * 16 * 4
    backward = flop_registry[BACKWARD](query, query, grouped, grouped, out_val=query)
    assert backward == flop_registry[BACKWARD](query, query, repeated, repeated, out_val=query) == 5 * forward // 2
