"""torch.compile per block: identical blocks share one graph, so compile time does not grow with depth."""

import logging
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from torch import nn

from titan_exp.config.groups.parallelism import CompileConfig
from titan_exp.models.blocks.transformer import iter_blocks
from titan_exp.parallel.mesh import Mesh


def compile_blocks(model: nn.Module, backend: str, options: dict[str, Any] | None = None) -> None:
    """Compile each block's forward in place; parameter names stay. `options` are inductor's.

    Elementwise operators and norms are recomputed in backward even where a matmul reads their result: the kernel of
    their own backward reads the same inputs and can write it.
    """
    # Inductor reads this when it partitions a graph into forward and backward, at its first call.
    functorch_config.ban_recompute_materialized_backward = False
    # Ranks receive another number of rows for their experts in each pass.
    dynamo_config.capture_dynamic_output_shape_ops = True
    # torch warns that recomputed regions must not write in place; blocks do not.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    if backend == "inductor":
        _realize_inputs_of_operators()
    for block in iter_blocks(model):
        shapes = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
        forward = _own_code(block.forward, shapes)
        block.forward = torch.compile(forward, backend=backend, fullgraph=True, options=options or None)


Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of a block's parameters."""

_CODE: dict[CodeType, dict[Shapes, CodeType]] = {}
"""Code objects of a forward by the shapes of its block; the first is the forward's own."""


def _own_code(forward: Callable[..., Any], shapes: Shapes) -> Callable[..., Any]:
    """Return the same forward with a code object for blocks of these shapes.

    Dynamo counts recompilations, and finds sizes that change, by code object. Blocks of more than a few shapes would
    exceed its limit, and under FSDP their numbers of heads would become symbols.
    """
    if not isinstance(forward, MethodType):
        forward = _inlined(forward)
    function = forward.__func__ if isinstance(forward, MethodType) else forward
    assert isinstance(function, FunctionType), "a method, or the function around another callable"
    known = _CODE.setdefault(function.__code__, {})
    name = f"{function.__code__.co_name}_{len(known)}" if known else function.__code__.co_name
    code = known.setdefault(shapes, function.__code__.replace(co_name=name) if known else function.__code__)
    if code is function.__code__:
        return forward
    copied = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__, copied.__module__ = function.__kwdefaults__, function.__module__
    return MethodType(copied, forward.__self__) if isinstance(forward, MethodType) else copied


def _inlined(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap another callable in a function, as torch.compile does itself."""

    def call(*arguments: Any, **options: Any) -> Any:
        return forward(*arguments, **options)

    return call


def _realize_inputs_of_operators() -> None:
    """Let inductor compute the inputs of this package's operators in kernels before them, in every graph.

    It learns this when it first compiles an operator, so a process's first graph would differ from later ones.
    """
    from torch._inductor.lowering import add_needs_realized_inputs

    for name in torch._C._dispatch_get_all_op_names():
        namespace, operator = name.split("::")
        if namespace == "titan_exp":
            add_needs_realized_inputs(getattr(torch.ops.titan_exp, operator).default)


def inductor_options(config: CompileConfig, mesh: Mesh, *, deterministic: bool) -> dict[str, Any]:
    """Inductor's settings for blocks: on CUDA, matmul kernels are chosen by autotuning unless `deterministic`.

    Parts of a concatenation are written in place rather than by one kernel over the whole: SwiGLU's gradients of gate
    and up then share a kernel, and its reads, with the recomputation of its output (0.94 GB per block at Llama 3 8B's
    shapes and 16,384 tokens). Timings are kept in inductor's cache on disk, so later attempts and runs choose the same
    kernels. Each rank times on its own, so ranks may choose differently and exchange choices through the cache.
    Therefore `auto` tunes a single rank only.
    """
    import torch._inductor.config as inductor

    if config.backend != "inductor" or mesh.device.type != "cuda":
        return {}
    # The second is of torch 2.12 and later.
    names = ("max_pointwise_cat_inputs", "max_complex_pointwise_cat_inputs")
    options: dict[str, Any] = {name: 0 for name in names if hasattr(inductor, name)}
    if deterministic:
        # Newer versions of inductor also time reductions.
        return options | ({"deterministic": True} if hasattr(inductor, "deterministic") else {})
    if config.autotunes_gemms(mesh.world.size()):
        options |= {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON"}
    return options
