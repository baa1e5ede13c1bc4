"""Treatment of a block: backward recomputes its activations (Chen et al. 2016), and torch.compile shares its graph."""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titan_exp.config.errors.user_error import UserError, Violation, did_you_mean
from titan_exp.config.groups.parallelism import ActivationCheckpointConfig, CompileConfig
from titan_exp.config.torch_features import read_entry
from titan_exp.models.blocks.feed_forward import Router
from titan_exp.models.blocks.transformer import iter_blocks, iter_numbered_blocks
from titan_exp.ops.matmul_flops import count_grouped_heads
from titan_exp.parallel.expert_parallel import mixtures
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.saved_calls import (
    FLEX_ATTENTION,
    ROUTING,
    SavedCalls,
    call_name,
    is_attention,
    routing_cache,
    trace_block,
    with_attention_cache,
)

LEAST_BUDGET = 1e-9  # memory budget at which a block saves only what it must


def apply_activation_checkpointing(
    model: nn.Module, config: ActivationCheckpointConfig, *, random: bool = True, compiled: bool = False
) -> None:
    """Make blocks keep the configured activations and recompute the rest in backward, in place. Only `forward` is
    replaced, so parameter names stay; FSDP's hooks run around it. `random=False` says that blocks draw no random
    numbers, so that no random state need be restored; `compiled` says that a compiler will partition the blocks. Raises
    UserError if an operator to keep does not exist."""
    blocks = list(iter_blocks(model))
    match config.mode:
        case "none":
            for router in [module for module in model.modules() if isinstance(module, Router)]:
                router.recomputed = False
        case "full":
            _recompute_fully(blocks, random=random, compiled=compiled)
        case "every_n":
            # Layer numbers are those of the whole model, also in a pipeline stage.
            every = [block for number, block in iter_numbered_blocks(model) if (number + 1) % config.every == 0]
            _recompute_fully(every, random=random, compiled=compiled)
        case "selective" if config.automatic is not None:
            chosen = functools.partial(SavedCalls, automatic=config.automatic, budget=config.budget, compiled=compiled)
            _recompute_automatically(model, chosen, random=random, compiled=compiled)
        case "selective":
            kept, mixed = _kept_operators(config.save), bool(mixtures(model))
            kept |= _routing_operators() if mixed else {}
            contexts = functools.partial(_selective_contexts, kept, attention=compiled and mixed)
            _recompute(blocks, context_fn=contexts, preserve_rng_state=random)
        case "budget":
            count_grouped_heads()
            # The compiler chooses among the operators of blocks with experts, too, but keeps their routing.
            mixed, kept = [block for block in blocks if mixtures(block)], _routing_operators()
            contexts = functools.partial(_selective_contexts, kept, CheckpointPolicy.PREFER_SAVE)
            _recompute(mixed, context_fn=contexts, preserve_rng_state=random)
            # Read when a graph is partitioned into forward and backward, at its first call. With 0, the compiler saves
            # nothing but inputs.
            functorch_config.activation_memory_budget = max(config.budget, LEAST_BUDGET) if mixed else config.budget
            if hasattr(functorch_config, "unsafe_treat_script_objects_as_zero_size"):
                # The compiler cannot know that the process groups of tensor-parallel blocks hold no tensors.
                functorch_config.unsafe_treat_script_objects_as_zero_size = True


def needs_compiler(config: ActivationCheckpointConfig, model: nn.Module, *, compiled: bool) -> bool:
    """True if the compiler must see the recomputation, because it chooses among a block's operators. In blocks with
    experts every mode does: routing is never repeated, and graphs may write to memory saved outside."""
    return config.mode == "selective" or (config.mode != "none" and compiled and bool(mixtures(model)))


def _recompute(blocks: Sequence[nn.Module], **options: Any) -> None:
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)


def _recompute_fully(blocks: Sequence[nn.Module], *, random: bool, compiled: bool) -> None:
    """Recompute whole blocks except routing; `compiled` ones keep attention, too, whose random state torch 2.13 would
    confuse with experts' meshes."""
    in_graph = functools.partial(_selective_contexts, _routing_operators(), attention=True)
    for block in blocks:
        outside = {"context_fn": routing_cache} if mixtures(block) else {}
        _recompute([block], preserve_rng_state=random, **({"context_fn": in_graph} if compiled else outside))


def _routing_operators() -> dict[Any, int]:
    return {overload: 1 for name in ROUTING for overload in _overloads(name)}


def saved_calls(model: nn.Module) -> list[SavedCalls]:
    """Distinct lists of saved calls of a model's blocks, chosen automatically in the first forward pass."""
    return list(dict.fromkeys(block.saved_calls for block in iter_blocks(model) if hasattr(block, "saved_calls")))  # type: ignore[misc]


def _recompute_automatically(
    model: nn.Module, list_of: Callable[..., SavedCalls], *, random: bool, compiled: bool
) -> None:
    """Let the first training forward pass of each block choose its saved calls; blocks of equal shapes choose once."""
    contexts = functools.partial(_automatic_contexts, compiled=compiled)
    chosen: dict[Any, SavedCalls] = {}

    def choose(number: int, handle: list[Any], block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        tensors = [*block.parameters(), *tree_leaves((args, kwargs))]
        key = (type(block), *((leaf.shape, leaf.dtype) for leaf in tensors if isinstance(leaf, Tensor)))
        if key not in chosen:
            chosen[key] = list_of(trace_block(block, args, kwargs))
            logging.getLogger("titan_exp").info("%s", chosen[key])
        block.saved_calls = chosen[key]  # type: ignore[assignment]  # a plain attribute
        # Not compiled yet: the compiler, which wraps `forward`, reads it in the call after this hook.
        wrapped = forwards[number]
        wrapped.keywords["context_fn"] = functools.partial(contexts, chosen[key].of_block(number))
        handle.pop().remove()

    forwards: dict[int, functools.partial[Any]] = {}
    for number, block in iter_numbered_blocks(model):
        _recompute([block], context_fn=functools.partial(contexts, ()), preserve_rng_state=random)
        forwards[number] = block.forward  # type: ignore[assignment]  # set by `_recompute`
        handle: list[Any] = []
        hook = functools.partial(choose, number, handle)
        handle.append(block.register_forward_pre_hook(hook, with_kwargs=True))


def _automatic_contexts(saved: tuple[str, ...], *, compiled: bool) -> Any:
    def choose(operator: Any, call: int) -> CheckpointPolicy:
        is_saved = call_name(_operator_name(operator), call) in saved
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = _contexts(choose)
    return with_attention_cache(contexts) if call_name(FLEX_ATTENTION, 0) in saved and not compiled else contexts


def _contexts(choose: Callable[[Any, int], CheckpointPolicy]) -> Any:
    """Contexts of a block's forward pass and of its recomputation, each with its own call counters. `choose` gets an
    operator and the number of its earlier calls."""
    calls: Counter[Any] = Counter()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        call = calls[context.is_recompute, operator]
        calls[context.is_recompute, operator] += 1
        return choose(operator, call)

    return create_selective_checkpoint_contexts(policy)


@functools.cache
def _operator_name(operator: Any) -> str:
    return str(operator)


def _selective_contexts(
    kept: Mapping[Any, int], others: CheckpointPolicy = CheckpointPolicy.PREFER_RECOMPUTE, *, attention: bool = False
) -> Any:
    def choose(operator: Any, call: int) -> CheckpointPolicy:
        if operator not in kept:
            return CheckpointPolicy.MUST_SAVE if attention and is_attention(_operator_name(operator)) else others
        return CheckpointPolicy.PREFER_RECOMPUTE if call % kept[operator] else CheckpointPolicy.MUST_SAVE

    return _contexts(choose)


def _kept_operators(entries: Sequence[str]) -> dict[Any, int]:
    """Operators to keep, each with its period: 2 keeps every second call."""
    kept: dict[Any, int] = {}
    for entry in entries:
        read = read_entry(entry)
        found = _overloads(read.operator) if read is not None else []
        if read is None or not found:
            name = entry.partition("/")[0]
            offer = (
                did_you_mean(name, _neighbours(name)) or "use a name of torch.ops, such as aten.mm or aten.mm.default"
            )
            violation = Violation("activation_checkpoint.save", entry, "torch has no such operator here", offer)
            raise UserError("Unknown operator in activation_checkpoint.save.", [violation])
        kept.update(dict.fromkeys(found, read.every))
    return kept


def _overloads(name: str) -> list[Any]:
    """All overloads of an operator's name, or the one it names; empty if there is none."""
    found: Any = torch.ops
    for part in name.split("."):
        if (found := getattr(found, part, None)) is None:
            return []
    if isinstance(found, torch._ops.OpOverload):
        return [found]
    return [getattr(found, overload) for overload in found.overloads()]


def _neighbours(name: str) -> Iterator[str]:
    """Names in the same namespace, with overloads if the entry has one."""
    namespace, _, rest = name.partition(".")
    for known in torch._C._dispatch_get_all_op_names():
        known_namespace, _, operator = known.partition("::")
        if known_namespace == namespace:
            packet, _, overload = operator.partition(".")
            yield f"{namespace}.{packet}.{overload or 'default'}" if "." in rest else f"{namespace}.{packet}"


def compile_blocks(model: nn.Module, backend: str, options: dict[str, Any] | None = None) -> None:
    """Compile each block's forward in place; parameter names stay. `options` are inductor's. Elementwise operators and
    norms are recomputed even where a matmul reads them: the kernel of their own backward can write them."""
    # Inductor reads this when it partitions a graph into forward and backward, at its first call.
    functorch_config.ban_recompute_materialized_backward = False
    # Ranks receive another number of rows for their experts in each pass.
    dynamo_config.capture_dynamic_output_shape_ops = True
    # torch warns that recomputed regions must not write in place; blocks do not.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    if backend == "inductor":
        from torch._inductor.lowering import add_needs_realized_inputs

        # Inductor learns this when it first compiles an operator, so a process's first graph would differ from others.
        for name in torch._C._dispatch_get_all_op_names():
            namespace, operator = name.split("::")
            if namespace == "titan_exp":
                add_needs_realized_inputs(getattr(torch.ops.titan_exp, operator).default)
    for block in iter_blocks(model):
        shapes = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
        forward = _own_code(block.forward, shapes)
        block.forward = torch.compile(forward, backend=backend, fullgraph=True, options=options or None)


Shapes = tuple[tuple[str, tuple[int, ...]], ...]

_CODE: dict[CodeType, dict[Shapes, CodeType]] = {}
"""Code objects of a forward by the shapes of its block; the first is the forward's own."""


def _own_code(forward: Callable[..., Any], shapes: Shapes) -> Callable[..., Any]:
    """Return the same forward with a code object for blocks of these shapes. Dynamo counts recompilations, and finds
    sizes that change, by code object. More than a few shapes would exceed its limit, or make sizes symbols."""
    if not isinstance(forward, MethodType):
        wrapped = forward

        def call(*arguments: Any, **options: Any) -> Any:  # as torch.compile wraps other callables itself
            return wrapped(*arguments, **options)

        forward = call
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
