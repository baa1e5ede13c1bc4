"""Saved tensors of compiled float8 matmuls: backward casts inputs again, from what their producer keeps anyway."""

import functools
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.ranks import run_ranks
from titan_exp.ops.swiglu import swiglu
from titan_exp.quantization.float8 import Float8, float8_linear

TOKENS, DIM, FFN = 384, 128, 512


def large_saved_tensors(rowwise: bool) -> list[int]:
    """Bytes of the matrices of tokens that a norm and a feed-forward keep, as inductor partitions them on a GPU."""
    recipe = Float8(rowwise, False, power_of_two=True, emulated=False, dual_cast=True)
    saved: list[Tensor] = []

    def feed_forward(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        normed = F.rms_norm(x, (DIM,))
        return float8_linear(swiglu(float8_linear(normed, gate_up, None, recipe)), down, None, recipe)

    def forward(graph: torch.fx.GraphModule, _: Any) -> Any:
        [output] = [node for node in graph.graph.nodes if node.op == "output"]
        kept = [node.meta["val"] for node in output.args[0][1:] if node.op != "placeholder"]
        saved.extend(value for value in kept if isinstance(value, Tensor))
        return graph.forward

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, _: graph.forward,
        decompositions=select_decomp_table(),
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
    functorch_config.ban_recompute_materialized_backward = False  # as `compile_blocks` does
    with FakeTensorMode(allow_non_fake_inputs=True):
        shapes = ((TOKENS, DIM), (2 * FFN, DIM), (DIM, FFN))
        tensors = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        torch.compile(feed_forward, backend=backend, fullgraph=True)(*tensors)
    sizes = {
        value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in saved if TOKENS in value.shape
    }
    return sorted(size for size in sizes.values() if size > 4 * TOKENS)


@pytest.mark.parametrize("rowwise", [True, False])
def test_compiled_code_keeps_no_input_of_a_matmul(rowwise: bool):
    """The projection to gate and up alone, as without float8."""
    assert run_ranks(1, large_saved_tensors, rowwise, limit=120) == [[4 * TOKENS * FFN]]
