"""Our Triton kernels compile for GPUs, down to their machine code, whether one is here or not."""

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.interpreted import needs_triton
from tests.ranks import run_ranks

pytestmark = needs_triton


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
    import titan_exp.ops

    found = set()
    for module in pkgutil.walk_packages(titan_exp.ops.__path__, "titan_exp.ops."):
        functions = vars(importlib.import_module(module.name)).values()
        found |= {
            f"{it.__module__}.{it.__name__}"
            for it in functions
            if type(it).__name__ == "JITFunction" and it.__name__.endswith("_kernel")
        }
    return found


def variants() -> dict[str, tuple[Any, dict[str, str], dict[str, Any]]]:
    """Kernels, the types of their arguments, and what is fixed when they are compiled."""
    from titan_exp.ops.adamw import adamw_kernel
    from titan_exp.ops.cross_entropy import BLOCK, logits_gradient_kernel, row_statistics_kernel
    from titan_exp.ops.float8 import (
        amax_kernel,
        cast_kernel,
        cast_tokens_kernel,
        cast_weights_kernel,
        weights_amax_kernel,
    )

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
    numbers = dict.fromkeys(("largest", "total", "chosen", "log_z", "factor"), "*fp32") | {"absent": "fp32"}
    sizes = dict.fromkeys(("stride", "gradient_stride", "columns", "first"), "i32") | {"z_loss": "fp32"}
    types = {"logits": "*bf16", "gradient": "*bf16", "target": "*i64", "labels": "*i64"} | numbers | sizes
    found |= expert_variants()
    found["loss, statistics"] = (row_statistics_kernel, types, {"block": BLOCK})
    found["loss, gradient"] = (logits_gradient_kernel, types, {"block": BLOCK})
    return found


def expert_variants() -> dict[str, tuple[Any, dict[str, str], dict[str, Any]]]:
    from titan_exp.ops.moe import permutation
    from titan_exp.ops.moe.grouped_mm import zero_rows_after_kernel
    from titan_exp.ops.moe.permutation import combine_backward_kernel, copy_tokens_kernel, sum_rows_kernel

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


WITHOUT_TRITON = """
import importlib.util, pkgutil
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else found(name, *rest)
import titan_exp.ops
for module in pkgutil.walk_packages(titan_exp.ops.__path__, "titan_exp.ops."):
    importlib.import_module(module.name)
assert titan_exp.ops.triton_kernels.triton is None
"""


def test_operators_are_imported_without_triton():
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=True, timeout=120)
