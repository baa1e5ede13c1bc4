"""Async tensor parallelism: torch's compiler pass fuses every gather and scatter of a block with its matmuls."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch.nn.functional as F
from torch import Tensor, fx

from tests.models.shapes import TINY
from tests.parallel.test_meta_init import CPU, experiment
from tests.patching import patch
from tests.ranks import run_ranks
from titan_exp.config.groups.parallelism import QuantizationConfig
from titan_exp.models.blocks.linear import Linear
from titan_exp.models.build import build_model, init_specs
from titan_exp.ops.autograd import local_tensor
from titan_exp.parallel.activation_checkpoint import compile_blocks
from titan_exp.parallel.mesh import Mesh, build_mesh, group_named
from titan_exp.parallel.meta_init import init_weights, materialize_parameters
from titan_exp.parallel.tensor_parallel.styles import apply_tensor_parallel, enable_async_tp
from titan_exp.quantization.recipes import linear_impl_for
from titan_exp.trainer.distributed import joined_process_group

GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
NIGHT = pytest.mark.night
SCALED_GATHER, SCALED_SCATTER = "fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"


def all_gather(shard: Tensor, degree: int, group: str) -> Tensor:
    """torch's operator on gloo, which lacks float8."""
    gathered = shard.new_empty((degree * shard.shape[0], *shard.shape[1:]))
    dist.all_gather_into_tensor(gathered.view(torch.uint8), shard.view(torch.uint8), group=group_named(group))
    return gathered


def on_cpu() -> list[torch.library.Library]:
    """The pass and its operators on a CPU, as long as the result lives."""
    fused, plain = (torch.library.Library(name, "IMPL") for name in ("symm_mem", "_c10d_functional"))
    for name in (GATHER, SCATTER, SCALED_GATHER, SCALED_SCATTER):
        # Torch's own implementations by plain collectives.
        fused.impl(name, getattr(symmetric_memory, f"_{name}_fallback"), "CPU")
    plain.impl("all_gather_into_tensor", all_gather, "CPU")
    patch("torch.distributed.is_nccl_available", lambda _: lambda: True)
    patch("torch.distributed._symmetric_memory.enable_symm_mem_for_group", lambda _: lambda _: None)
    patch("torch.distributed._symmetric_memory.is_symm_mem_enabled_for_group", lambda _: lambda _: True)
    return [fused, plain]


def passes_of_inductor(operators: Counter[str]) -> Any:
    """Compiler backend that runs a graph after inductor's passes, without kernels, and counts its operators."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._guards import detect_fake_mode
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.virtualized import V

    def compiled(graph: fx.GraphModule, inputs: Any) -> Any:
        view_to_reshape(graph)
        with V.set_fake_mode(detect_fake_mode(inputs)):
            post_grad_passes(graph, is_inference=False)
        targets = [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        operators.update(target._schema.name.partition("::")[2] for target in targets)
        graph.recompile()
        return make_boxed_func(graph)

    def partition(joint: fx.GraphModule, *args: Any, **options: Any) -> Any:
        joint_graph_passes(joint)
        return min_cut_rematerialization_partition(joint, *args, **options)

    return aot_autograd(fw_compiler=compiled, partition_fn=partition, decompositions=select_decomp_table())


def scales_rows() -> bool:
    """True if torch's float8 matmul on a CPU takes a scale for each row, as after torch 2.11."""
    matrix, scales = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(matrix, matrix.t(), scales, scales.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def recipe_config(name: str) -> QuantizationConfig:
    """A recipe without the kernels that cast by rows and columns at once, which need a GPU."""
    return experiment(
        f"quantization={name}", "quantization.fused_casts=false", "quantization.precomputed_scales=false"
    ).quantization


def gradients(mesh: Mesh, recipe: str, rows: int, backend: Any = None) -> dict[str, Tensor]:
    """Gradients of this rank's shards of a model, with compiled blocks if there is a backend."""
    with torch.device("meta"):
        dtype = torch.float32 if recipe == "none" else torch.bfloat16
        model = build_model(TINY, seq_len=16, attention_backend="math").to(dtype)
    table = init_specs(model)
    assert table is not None
    for linear in model.modules():
        if isinstance(linear, Linear) and recipe != "none":
            linear.linear_impl = linear_impl_for(recipe_config(recipe), emulated=False)
    # As on GPUs, whose process groups have gloo beside NCCL and send float8 as it is.
    on_gpus = replace(mesh, device=torch.device("cuda"))
    apply_tensor_parallel(model, on_gpus, sequence_parallel=True, loss_parallel=False)
    materialize_parameters(model, CPU)
    init_weights(model, table, seed=3)
    if backend is not None:
        compile_blocks(model, backend)
    tokens = torch.randint(97, (rows, 16), generator=torch.Generator().manual_seed(5))
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flip(1).flatten()).backward()
    found = {name: weight.grad for name, weight in model.named_parameters()}
    return {name: local_tensor(gradient) for name, gradient in found.items() if gradient is not None}


def eager_and_fused(recipe: str, rows: int) -> tuple[dict[str, Tensor], dict[str, Tensor], Counter[str]]:
    """Gradients of eager and of compiled blocks, and the operators of the latter."""
    operators = Counter[str]()
    with joined_process_group(CPU):
        mesh = build_mesh(experiment("parallelism.dp_shard=1", "parallelism.tp=2").parallelism, CPU)
        libraries = on_cpu()
        eager = gradients(mesh, recipe, rows)
        enable_async_tp(mesh)
        fused = gradients(mesh, recipe, rows, passes_of_inductor(operators))
        del libraries
    return eager, fused, operators


@pytest.mark.parametrize(
    ("recipe", "rows", "expected"),
    [
        ("none", 1, {GATHER: 4, SCATTER: 4}),
        pytest.param("none", 2, {GATHER: 4, SCATTER: 4}, marks=NIGHT),
        pytest.param("float8_tensorwise", 1, {SCALED_GATHER: 4, SCALED_SCATTER: 4}, marks=NIGHT),
        pytest.param("float8_tensorwise", 2, {SCALED_GATHER: 4, SCALED_SCATTER: 4}, marks=NIGHT),
        # Scales are gathered by themselves, and tokens again in another cast for the gradient of the weight.
        ("float8_rowwise", 1, {SCALED_GATHER: 4, SCALED_SCATTER: 4, "all_gather_into_tensor": 10}),
        pytest.param(
            "float8_rowwise", 2, {SCALED_GATHER: 4, SCALED_SCATTER: 4, "all_gather_into_tensor": 10}, marks=NIGHT
        ),
        pytest.param("float8_rowwise_gw_hp", 2, {SCALED_SCATTER: 4, "all_gather_into_tensor": 4}, marks=NIGHT),
    ],
)
def test_messages_of_a_block_are_fused_with_matmuls(recipe: str, rows: int, expected: dict[str, int]):
    """Gradients of each parameter are those of eager blocks; a graph of all blocks has attention and feed-forward."""
    if recipe.startswith("float8_rowwise") and not scales_rows():
        pytest.skip("torch's CPU kernel takes one scale for a matrix")
    for eager, fused, operators in run_ranks(2, eager_and_fused, recipe, rows):
        assert eager.keys() == fused.keys()
        for name, gradient in eager.items():
            torch.testing.assert_close(fused[name], gradient, msg=lambda text, name=name: f"{name}: {text}")
        sent = {name: count for name, count in operators.items() if "all_gather" in name or "reduce_scatter" in name}
        assert sent == expected
