"""Casts of experts' grouped matmuls: shapes, strides and dtypes of torchao's own fake kernels; plans with them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.ranks import run_ranks
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.plan import fake_kernels
from titan_exp.plan.devices import device_named
from titan_exp.plan.predict import predict
from titan_exp.plan.trace.op_costs import EXPERT_MATMULS
from titan_exp.rules import check

EXPERTS, ROWS, COLUMNS = 3, 256, 384
TOKENS, CHOICES, LOCAL, DIM, FFN = 2048, 8, 16, 2048, 768
"""Tokens of a micro-batch, experts of a token, experts of a rank, and widths of Qwen3 30B-A3B."""
RUN = (
    "model=qwen3_30b_a3b",
    "cluster=slurm_h100",
    "compile=none",
    "training.mixed_precision=bf16",
    f"training.seq_len={TOKENS}",
    "training.micro_batch_size=1",
    "training.global_batch_size=8",
    "parallelism.dp_shard=8",
    "parallelism.ep=8",
    "activation_checkpoint=none",
    "quantization.smallest_gemm=0",
)


def described(found: Any) -> list[tuple[Any, ...]]:
    tensors = [found] if isinstance(found, Tensor) else found
    return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]


def _both() -> dict[str, tuple[list[Any], list[Any]]]:
    """Results of torchao's fake kernels and of ours, by torchao's names; none if Triton refuses torchao's kernels."""
    import torch.utils._triton as triton

    # torchao defines its kernels beside a GPU only; their fake ones need none.
    triton.has_triton = lambda: True
    try:
        from torchao.prototype.moe_training import kernels
    except ValueError:  # as that of torch 2.15 those of 0.18
        return {}
    from torchao.prototype.moe_training.kernels import mxfp8
    from torchao.prototype.moe_training.kernels.mxfp8 import quant

    modules = (fake_kernels._IN[f"moe_training.{name}_grouped_mm"] for name in ("fp8", "mxfp8"))
    found, names = {}, {name: cast for module in modules for name, cast in module.items()}
    with FakeTensorMode():
        matrix = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16)
        weight = torch.empty(EXPERTS, COLUMNS, ROWS, dtype=torch.bfloat16).mT
        ends, scales = torch.empty(EXPERTS, dtype=torch.int32), torch.empty(ROWS, COLUMNS, dtype=torch.float8_e8m0fnu)
        arguments = {
            "triton_fp8_colwise_3d_scale_and_cast": (weight,),
            "triton_fp8_rowwise_3d_transpose_rhs": (weight,),
            "triton_fp8_rowwise_2d_scale_and_cast": (matrix,),
            "triton_fp8_per_group_colwise_scales_dual": (matrix, matrix[:, :128].contiguous(), ends),
            "mxfp8_quantize_2d_1x32_cutedsl": (matrix,),
            "mxfp8_quantize_cuda_3d": (weight.contiguous(),),
            "triton_mx_block_rearrange_per_group_3d": (scales.expand(EXPERTS, ROWS, COLUMNS).contiguous(),),
            "triton_mx_block_rearrange_2d_K_groups": (scales, ends),
        }
        assert {*arguments, "_SM100_KERNELS_AVAILABLE", "triton_to_mxfp8_dim0"} == {*names}
        operators = {
            "mxfp8_quantize_2d_1x32_cutedsl": quant._mxfp8_quantize_2d_1x32_cutedsl_custom_op,
            "mxfp8_quantize_cuda_3d": quant._mxfp8_quantize_3d_cutedsl_custom_op,
        }
        for name, tensors in arguments.items():
            theirs = operators.get(name) or getattr(kernels, name, None) or getattr(mxfp8, name)
            found[name] = described(theirs(*tensors)), described(names[name](*tensors))
    return found


def test_fake_casts_are_torchaos():
    (found,) = run_ranks(1, _both)
    if not found:
        pytest.skip("Triton refuses torchao's kernels")
    for name, (theirs, ours) in found.items():
        assert ours == theirs, name


def planned(device: str, *runs: tuple[str, bool]) -> list[tuple[Any, ...]]:
    """FLOPs of experts, those in float8, all FLOPs, bytes moved, peak and reserved memory; runs, True to trace each
    layer."""
    found = []
    for words, full in runs:
        experiment = to_experiment(compose([*RUN, *words.split()]))
        plan = predict(resolve_layout(check(experiment), 8), device_named(device), full=full)
        (rank,) = plan.ranks
        costs, peak = rank.trace.costs, rank.trace.peak.bytes
        experts = (costs.kernels[EXPERT_MATMULS, measure] for measure in ("flops", "fp8_flops"))
        found.append((*experts, costs.flops, costs.bytes_moved, peak, rank.bytes))
    return found


@pytest.mark.parametrize(("recipe", "device", "multiple"), [("float8_rowwise", "h100", 16), ("mxfp8", "b200", 128)])
def test_matmuls_of_experts_are_in_float8(recipe: str, device: str, multiple: int):
    check_experts(run_ranks(1, planned, device, (f"model.layers=2 quantization={recipe}", True)), multiple)


def check_experts(found: list[list[tuple[Any, ...]]], multiple: int) -> None:
    ((eager,),) = found
    rows = multiple * (-(-TOKENS * CHOICES // multiple) + LOCAL)
    # Three matmuls of gate and up, and of down.
    assert eager[:2] == (2 * 3 * 2 * rows * 3 * DIM * FFN,) * 2


@pytest.mark.night
@pytest.mark.parametrize("compiled", ["none", "blocks"])
@pytest.mark.parametrize(("recipe", "device"), [("float8_rowwise", "h100"), ("mxfp8", "b200")])
def test_quantized_experts_are_extrapolated(recipe: str, device: str, compiled: str):
    words = f"model.layers=12 quantization={recipe} compile={compiled}"
    ((short, whole),) = run_ranks(1, planned, device, (words, False), (words, True), limit=300)
    assert short == whole


@pytest.mark.night
def test_compiled_blocks_take_rows_whose_number_is_unknown():
    """With expert parallelism; kernels for experts of a GPU, whose rows are padded."""
    words = "model.layers=2 quantization=float8_rowwise compile="
    ((eager, compiled),) = run_ranks(1, planned, "h100", (f"{words}none", True), (f"{words}blocks", True))
    assert compiled[:3] == eager[:3]
    assert compiled[3] < eager[3]
