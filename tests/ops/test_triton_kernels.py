"""Our Triton kernels compile for GPUs, down to their machine code, whether one is here or not."""

from pathlib import Path
from typing import Any

from tests.interpreted import needs_triton
from tests.ranks import run_ranks

pytestmark = needs_triton

CAPABILITIES = (80, 90, 100)
"""A100, H100 and H200, B200."""


def compiled(folder: str) -> dict[str, str]:
    """Assembly by kernel, variant and capability."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    knobs.cache.dir = folder
    found = {}
    for name, (kernel, types, constants) in variants().items():
        signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
        for capability in CAPABILITIES if not name.startswith("cast") else (90, 100):
            source = ASTSource(kernel, signature, constexprs=constants)
            found[f"{name} {capability}"] = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    return found


def variants() -> dict[str, tuple[Any, dict[str, str], dict[str, Any]]]:
    """Kernels, the types of their arguments, and what is fixed when they are compiled."""
    from titan_exp.ops.attention.rope_kernel import split_rotated_kernel
    from titan_exp.ops.float8.kernels import amax_kernel, cast_kernel
    from titan_exp.ops.loss.loss_kernels import logits_gradient_kernel, row_statistics_kernel
    from titan_exp.ops.loss.row_softmax import BLOCK
    from titan_exp.ops.optim.adamw_kernel import adamw_kernel
    from titan_exp.ops.swiglu_kernels import swiglu_backward_kernel, swiglu_kernel

    numbers = dict.fromkeys(("keep", "beta1", "rest1", "beta2", "rest2", "eps"), "fp32")
    found = {}
    for moments in ("fp32", "bf16"):
        types = dict.fromkeys(("weight", "gradient", "factor", "rates"), "*fp32") | numbers | {"size": "i32"}
        types |= {"first": f"*{moments}", "second": f"*{moments}", "copy": "*bf16"}
        constants = {"has_factor": True, "has_copy": True, "block": 1024}
        found[f"adamw, moments in {moments}"] = (adamw_kernel, types, constants)
    size = dict.fromkeys(("height", "width"), "i32")
    bits = {"matrix": "*bf16", "row_amax": "*i32", "column_amax": "*i32"}
    found["largest"] = (amax_kernel, bits | size, {"side": 64})
    for float8 in ("fp8e4nv", "fp8e5"):
        for per_tensor in (True, False):
            types = {"matrix": "*bf16", "row_scales": "*fp32", "column_scales": "*fp32", "largest": "fp32"}
            types |= size | {"rows": f"*{float8}", "transposed": f"*{float8}"}
            found[f"cast to {float8}, {per_tensor=}"] = (cast_kernel, types, {"per_tensor": per_tensor, "side": 64})
    types = dict.fromkeys(("gate_up", "out", "gradient", "gate_up_grad"), "*bf16") | {"size": "i32"}
    for kernel in (swiglu_kernel, swiglu_backward_kernel):
        found[kernel.__name__] = (kernel, types, {"group": 32, "block": 1024})
    types = dict.fromkeys(("qkv", "query", "key", "value"), "*bf16") | {"cos": "*fp32", "sin": "*fp32"}
    types |= dict.fromkeys(("positions", "kv_heads"), "i32")
    for backward in (False, True):
        constants = {"group": 4, "half": 64, "padded": 64, "heads": 16, "backward": backward}
        found[f"split_rotated, {backward=}"] = (split_rotated_kernel, types, constants)
    numbers = dict.fromkeys(("largest", "total", "chosen", "log_z", "factor"), "*fp32") | {"absent": "fp32"}
    sizes = dict.fromkeys(("stride", "gradient_stride", "columns", "first"), "i32") | {"z_loss": "fp32"}
    types = {"logits": "*bf16", "gradient": "*bf16", "target": "*i64", "labels": "*i64"} | numbers | sizes
    found |= expert_variants()
    found["loss, statistics"] = (row_statistics_kernel, types, {"block": BLOCK})
    found["loss, gradient"] = (logits_gradient_kernel, types, {"block": BLOCK})
    return found


def expert_variants() -> dict[str, tuple[Any, dict[str, str], dict[str, Any]]]:
    from titan_exp.ops.moe import permutation
    from titan_exp.ops.moe.permutation_kernels import (
        combine_backward_kernel,
        copy_tokens_kernel,
        sum_rows_kernel,
        zero_rows_after_kernel,
    )
    from titan_exp.ops.moe.weighted_swiglu import BLOCK, ROWS
    from titan_exp.ops.moe.weighted_swiglu_kernels import weighted_swiglu_backward_kernel, weighted_swiglu_kernel

    types = dict.fromkeys(("x", "out", "gradient", "rows", "rows_grad"), "*bf16")
    types |= {"inverse": "*i64", "weights": "*fp32", "weights_grad": "*fp32", "width": "i32"}
    found: dict[str, Any] = {}
    for choices in (6, 8):
        sizes = {"choices": choices, "block": permutation.BLOCK}
        found[f"experts, {choices} copies"] = (copy_tokens_kernel, types, sizes)
        for weighted in (False, True):
            found[f"experts, {choices} sums, {weighted=}"] = (sum_rows_kernel, types, sizes | {"weighted": weighted})
        sizes = {"choices": choices, "padded": 8, "block": permutation.TILE // 8}
        found[f"experts, {choices} sums' backward"] = (combine_backward_kernel, types, sizes)
    types = {"out": "*bf16", "ends": "*i32", "rows": "i32", "width": "i32", "last": "i32"}
    found["experts, zeroed rows"] = (zero_rows_after_kernel, types, {"programs": 1024, "block": 1024})
    types = dict.fromkeys(("gate_up", "out", "gradient", "gate_up_grad"), "*bf16")
    types |= {"weights": "*fp32", "weights_grad": "*fp32", "rows": "i32", "ffn": "i32"}
    for kernel in (weighted_swiglu_kernel, weighted_swiglu_backward_kernel):
        found[f"experts, {kernel.__name__}"] = (kernel, types, {"group": 32, "side": ROWS, "block": BLOCK})
    return found


def test_they_compile(tmp_path: Path):
    [assembly] = run_ranks(1, compiled, str(tmp_path))
    for name, text in assembly.items():
        if name.startswith("adamw"):
            # The roots and quotients that torch computes, and not the approximate ones.
            assert "sqrt.rn.f32" in text, name
            assert "div.rn.f32" in text, name
            assert "cvt.rn.bf16" in text, name
        if name.startswith("experts"):
            # Sums have one order: no program adds to what another writes.
            assert "atom" not in text, name
            assert "red.global" not in text, name
            # All rows are more than 2^31 numbers.
            assert "mad.lo.s64" in text or "mul.lo.s64" in text or "mul.wide" in text, name
        if name.startswith("loss"):
            # All logits are more than 2^31 numbers.
            assert "mul.lo.s64" in text, name
        if name.startswith("loss, gradient"):
            assert "cvt.rn.bf16" in text, name
        if name.startswith("cast"):
            # The instruction that rounds to the nearest float8 number, not code in its place.
            assert "cvt.rn.satfinite.e" in text, name
