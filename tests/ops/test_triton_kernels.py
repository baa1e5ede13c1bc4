"""Our Triton kernels compile for GPUs, down to their machine code, whether one is here or not."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.interpreted import needs_triton
from tests.ranks import run_ranks
from titan_exp.ops.swiglu_variant import SWIGLU, SwiGLUVariant

pytestmark = needs_triton

VARIANTS = (SWIGLU, SwiGLUVariant(1.702, 7.0, 1.0))


def compiled(folder: str, capabilities: tuple[int, ...]) -> tuple[dict[str, str], set[str]]:
    """Assembly by kernel, variant and capability, and the names of kernels that are not among them."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    knobs.cache.dir = folder
    found, left = {}, all_kernels()
    for name, (kernel, types, constants) in variants().items():
        left -= {f"{kernel.__module__}.{kernel.__name__}"}
        signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
        # An A100 has no float8.
        for capability in set(capabilities) - ({80} if name.startswith("cast") else set[int]()):
            source = ASTSource(kernel, signature, constexprs=constants)
            found[f"{name} {capability}"] = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    return found, left


def all_kernels() -> set[str]:
    """Modules and names of the project's kernels; functions that kernels call have no such name."""
    import titan_exp

    [root] = titan_exp.__path__
    modules = [
        ".".join(("titan_exp", *path.relative_to(root).with_suffix("").parts)) for path in Path(root).rglob("*.py")
    ]
    found = set()
    for name in modules:
        if name.endswith(("_kernel", "kernels")) and not name.startswith(("titan_exp.plan", "titan_exp.quantization")):
            functions = vars(importlib.import_module(name)).values()
            found |= {
                f"{it.__module__}.{it.__name__}"
                for it in functions
                if type(it).__name__ == "JITFunction" and it.__name__.endswith("_kernel")
            }
    return found


def variants() -> dict[str, tuple[Any, dict[str, str], dict[str, Any]]]:
    """Kernels, the types of their arguments, and what is fixed when they are compiled."""
    from titan_exp.ops.attention.rope_kernel import split_rotated_kernel
    from titan_exp.ops.float8.kernels import (
        amax_kernel,
        cast_kernel,
        cast_tokens_kernel,
        cast_weights_kernel,
        weights_amax_kernel,
    )
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
    many = {"starts": "*i64", "table": "*i64", "source": "*fp32", "target": "*fp8e4nv", "largest": "fp32"}
    sizes = {"weights": 128, "side": 64}
    found["largest of weights"] = (weights_amax_kernel, many, sizes)
    for per_row in (True, False):
        constants = sizes | {"to_bf16": True, "one_row_scale": not per_row, "one_column_scale": not per_row}
        found[f"cast of weights, {per_row=}"] = (cast_weights_kernel, many, constants)
    types = {"x": "*bf16", "inverse": "*i64", "rows": "*fp8e4nv", "scales": "*fp32", "width": "i32"}
    types |= {"least": "fp32", "largest": "fp32"}
    found["cast of tokens"] = (cast_tokens_kernel, types, {"choices": 8, "block": 1024})
    types = dict.fromkeys(("gate_up", "out", "gradient", "gate_up_grad"), "*bf16") | {"size": "i32"}
    for kernel in (swiglu_kernel, swiglu_backward_kernel):
        for variant in VARIANTS:
            found[f"{kernel.__name__}, {variant}"] = (kernel, types, {"group": 32, "block": 1024, **variant.numbers})
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
    from titan_exp.ops.moe import expert_bias, permutation
    from titan_exp.ops.moe.expert_bias_kernels import add_expert_bias_kernel, expert_bias_backward_kernel
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
        for variant in VARIANTS:
            sizes = {"group": 32, "side": ROWS, "block": BLOCK, **variant.numbers}
            found[f"experts, {kernel.__name__}, {variant}"] = (kernel, types, sizes)
    types = dict.fromkeys(("rows", "gradient", "bias", "out"), "*bf16") | {"ends": "*i32", "width": "i32"}
    types |= dict.fromkeys(("weights", "bias_grad", "parts"), "*fp32") | {"height": "i32"}
    for weighted in (False, True):
        sizes = {"experts": 32, "padded": 32, "block": expert_bias.BLOCK, "weighted": weighted}
        found[f"experts, biases, {weighted=}"] = (add_expert_bias_kernel, types, sizes)
        sizes = {"side": expert_bias.ROWS, "block": expert_bias.COLUMNS, "weighted": weighted}
        found[f"experts, biases' backward, {weighted=}"] = (expert_bias_backward_kernel, types, sizes)
    return found


@pytest.mark.parametrize(
    "capabilities", [(90,), pytest.param((80, 100), marks=pytest.mark.night)], ids=["H100", "A100 and B200"]
)
def test_they_compile(tmp_path: Path, capabilities: tuple[int, ...]):
    [(assembly, left)] = run_ranks(1, compiled, str(tmp_path), capabilities)
    assert not left, "not compiled here"
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
