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
    from titan_exp.ops.float8.kernels import amax_kernel, cast_kernel
    from titan_exp.ops.optim.adamw_kernel import adamw_kernel

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
    return found


def test_they_compile(tmp_path: Path):
    [assembly] = run_ranks(1, compiled, str(tmp_path))
    for name, text in assembly.items():
        if name.startswith("adamw"):
            # The roots and quotients that torch computes, and not the approximate ones.
            assert "sqrt.rn.f32" in text, name
            assert "div.rn.f32" in text, name
            assert "cvt.rn.bf16" in text, name
        if name.startswith("cast"):
            # The instruction that rounds to the nearest float8 number, not code in its place.
            assert "cvt.rn.satfinite.e" in text, name
