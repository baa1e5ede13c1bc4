"""Models on the meta device: requirements of a layout on their modules, and shards of their initial weights. Built-in
families meet them; your model may not, and a missing part would be ignored or fail in training."""

import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan_exp.config.errors.user_error import UserError, Violation, did_you_mean, listed
from titan_exp.config.groups.parallelism import ActivationCheckpointConfig, CompileConfig, ParallelismConfig
from titan_exp.config.layout.axes import regroups_experts
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.blocks.feed_forward import MoEFeedForward
from titan_exp.models.blocks.linear import InitSpec, Linear, ShardSpec, init_shard_
from titan_exp.models.blocks.transformer import attentions_of, iter_numbered_blocks
from titan_exp.models.spec.model_spec import ModelSpec, PipelinePlan
from titan_exp.models.spec.tp_plan import Rowwise, VocabEmbedding, VocabLogits
from titan_exp.ops.autograd import local_tensor
from titan_exp.ops.linear_attention import GatedDeltaCore
from titan_exp.parallel.tensor_parallel.styles import LINEARS, MODULES

BufferPlace = tuple[nn.Module, str]


def buffer_places(model: nn.Module) -> dict[str, BufferPlace]:
    """Places of a model's buffers by buffer name, since wrappers would change the names."""
    return {
        f"{path}.{name}" if path else name: (module, name)
        for path, module in model.named_modules()
        for name, _ in module.named_buffers(recurse=False)
    }


def materialize_parameters(
    model: nn.Module, device: torch.device, *, cpu_offload: bool = False
) -> Collection[BufferPlace]:
    """Allocate the parameters of a sharded meta model, unfilled, and compute its buffers. Offloaded parameters go to
    the CPU, everything else to `device`. Returns the buffers that no module's `reset_buffers` computed."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places[parameter].append((module, name))
    model.to_empty(device="cpu" if cpu_offload else device)
    for (owner, attribute), *others in places.values():
        for module, name in others:  # `to_empty` unties weights that leave the meta device
            setattr(module, name, getattr(owner, attribute))
    if cpu_offload:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                persistent = name not in module._non_persistent_buffers_set
                module.register_buffer(name, buffer.to(device), persistent=persistent)
    unfilled = {place: _buffer(place) for place in buffer_places(model).values()}
    versions = {place: buffer._version for place, buffer in unfilled.items()}
    for module in model.modules():
        if hasattr(module, "reset_buffers"):
            module.reset_buffers()  # type: ignore[operator]  # a method, not a submodule
    return [
        place for place, buffer in unfilled.items() if _buffer(place) is buffer and buffer._version == versions[place]
    ]


def _buffer(place: BufferPlace) -> Tensor:
    module, name = place
    return module.get_buffer(name)


def every_weight(name: str) -> bool:
    """True for any weight: the default selection of weights by full name."""
    return True


@torch.no_grad()
def init_weights(
    model: nn.Module, table: Mapping[str, InitSpec], seed: int, selected: Callable[[str], bool] = every_weight
) -> None:
    """Fill selected parameters from their initial distributions, the same in every layout and on every device."""
    for name, parameter in model.named_parameters():
        if selected(name):
            init_shard_(local_tensor(parameter), seed, name, table[name], local_shard(parameter))


@torch.no_grad()
def init_buffers(
    places: Mapping[str, BufferPlace], unfilled: Collection[BufferPlace], build: Callable[[], nn.Module], seed: int
) -> None:
    """Fill `unfilled` buffers from a whole model built on the CPU under the seed; `places` are of before sharding."""
    if names := [name for name, place in places.items() if place in unfilled]:
        whole = _build_whole(build, seed)
        for name in names:
            _buffer(places[name]).copy_(whole.get_buffer(name))


@torch.no_grad()
def copy_initial_weights(
    model: nn.Module, build: Callable[[], nn.Module], seed: int, selected: Callable[[str], bool] = every_weight
) -> None:
    """Fill selected parameters from a whole model built on the CPU under the seed. Serves models that do not declare
    their initial weights; each rank temporarily holds the whole model in memory."""
    targets = {name: parameter for name, parameter in model.named_parameters() if selected(name)}
    if not targets:
        return
    whole = _build_whole(build, seed).state_dict()
    for name in [name for name in targets if name in whole]:
        part = local_shard(targets[name])
        window = tuple(slice(first, first + size) for first, size in zip(part.start, part.size, strict=True))
        local_tensor(targets[name]).copy_(whole[name][window])


def _build_whole(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def local_shard(tensor: Tensor) -> ShardSpec:
    """Local shard of a tensor."""
    if not isinstance(tensor, DTensor):
        return ShardSpec.whole(tuple(tensor.shape))
    size, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return ShardSpec(tuple(tensor.shape), tuple(start), tuple(size))


def require_modules(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Raise UserError if a pattern of `fp32_modules` matches no module of the whole model."""
    named = _named(model)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            suggestion = did_you_mean(pattern, named) or "write a pattern such as blocks.*.attention_norm"
            violation = Violation("training.fp32_modules", pattern, "the model has no such module", suggestion)
            raise UserError("This run cannot start.", [violation])


def matching_modules(model: nn.Module, patterns: tuple[str, ...]) -> list[nn.Module]:
    """Outermost modules that match any of the patterns."""
    named = _named(model)
    found = {name: module for pattern in patterns for name, module in named.items() if fnmatchcase(name, pattern)}
    return [module for name, module in found.items() if not any(name.startswith(f"{other}.") for other in found)]


def _named(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if name and any(True for _ in module.parameters())}


INPUTS = ("tokens", "positions", "documents")
"""Positional arguments of a model's `forward`; the last two are None unless data.reset_positions or document_mask."""
STYLES = "titan_exp.parallel.tensor_parallel.styles"
BLOCKS = 'write self.blocks = nn.ModuleDict({"0": block, "1": block, ...}), keyed by layer number'


def module_violations(
    model: nn.Module,
    spec: ModelSpec | None,
    layout: ResolvedLayout,
    checkpointing: ActivationCheckpointConfig,
    compilation: CompileConfig,
) -> Iterator[Violation]:
    """Violations of an unsharded model on the meta device; `spec` is None for a plain class."""
    if spec is None or spec.inputs is None:
        yield from _forward(model, layout, INPUTS)
    else:
        yield from _forward(model, layout, spec.inputs.positional, spec.inputs.named)
    yield from _further_predictions(model, spec)
    yield from _buffers(model)
    yield from _blocks(model, checkpointing, compilation)
    yield from _tied_weights(model, layout)
    parallelism = layout.parallelism
    if spec is None:
        return
    if parallelism.tp > 1:
        yield from _tensor_parallel(model, spec, parallelism.tp)
    if regroups_experts(parallelism):
        yield from _expert_parallel(model, spec, parallelism)
    if parallelism.cp > 1:
        yield from _context_parallel(model, parallelism.cp)
    if parallelism.pp > 1:
        yield from _pipeline(model, spec, parallelism.pp)


def _forward(
    model: nn.Module, layout: ResolvedLayout, inputs: tuple[str, ...], named: tuple[str, ...] = ()
) -> Iterator[Violation]:
    """Check that `forward` takes the arguments that objectives pass."""
    kind, chunk = type(model).__name__, layout.training.loss_chunk_tokens
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*inputs, **dict.fromkeys(named))
    except TypeError as error:
        reason = f"we call {kind}.forward with ({', '.join((*inputs, *named))}): {error}"
        remedy = "write def forward(self, tokens, positions=None, documents=None), and return logits"
        remedy = f"write def forward(self, {', '.join(inputs)}, *, {', '.join(named)})" if named else remedy
        yield Violation("model.architecture", kind, reason, remedy)
        return
    try:
        signature.bind(*inputs, **dict.fromkeys(named), loss=None)
    except TypeError:
        if layout.training.has_given_chunks:
            reason = (
                f"a loss in chunks needs the argument `loss` of {kind}.forward, to be called with the last hidden "
                "states and the head, and it has no such argument"
            )
            remedy = "use training.loss_chunk_tokens=null, or add `loss` as titan_exp/models/decoder.py does"
            yield Violation("training.loss_chunk_tokens", chunk, reason, remedy)


def _further_predictions(model: nn.Module, spec: ModelSpec | None) -> Iterator[Violation]:
    """Check that `forward` takes the ids of further tokens if the spec has modules of multi-token prediction."""
    if spec is not None and spec.mtp_layers and "further" not in inspect.signature(model.forward).parameters:
        reason = (
            "the spec has modules of multi-token prediction, which need the argument `further` of "
            f"{type(model).__name__}.forward, and it has no such argument"
        )
        remedy = "add it as titan_exp/models/decoder.py does, or leave mtp_layers out of the spec"
        yield Violation("model.architecture", type(model).__name__, reason, remedy)


def computes_loss(model: nn.Module, spec: ModelSpec | None) -> bool:
    """True if a model's `forward` can compute the `loss` that it is given; `spec` is None for a plain class."""
    return spec is not None and "loss" in inspect.signature(model.forward).parameters


def _buffers(model: nn.Module) -> Iterator[Violation]:
    """Check that every tensor of a module is a parameter or a buffer; others would stay on the meta device."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            held = value if isinstance(value, list | tuple) else [value]
            if any(isinstance(part, Tensor) and part.is_meta for part in held):
                attribute = f"{path}.{name}" if path else name
                reason = (
                    f"{attribute} is a tensor, but neither a parameter nor a buffer. We build models on the meta "
                    "device, and this tensor would never get values"
                )
                init = f"{type(module).__name__}.__init__"
                remedy = f'call self.register_buffer("{name}", ..., persistent=False) in {init}'
                yield Violation("model.architecture", type(model).__name__, reason, remedy)


def _blocks(
    model: nn.Module, checkpointing: ActivationCheckpointConfig, compilation: CompileConfig
) -> Iterator[Violation]:
    """Check that there are blocks to recompute and to compile."""
    if any(iter_numbered_blocks(model)):
        return
    reason = f"it works block by block, and {type(model).__name__} has no blocks"
    if checkpointing.mode != "none":
        remedy = f"{BLOCKS}; or use activation_checkpoint=none"
        yield Violation("activation_checkpoint.mode", checkpointing.mode, reason, remedy)
    if compilation.compiles("blocks"):
        remedy = f"{BLOCKS}; or use compile.components=[loss], or compile=none"
        yield Violation("compile.components", list(compilation.components), reason, remedy)


def _tied_weights(model: nn.Module, layout: ResolvedLayout) -> Iterator[Violation]:
    """Check that tied weights have one precision and one FSDP group: a block, or everything else together."""
    shards = layout.world_size > 1 or layout.parallelism.cpu_offload
    groups: dict[nn.Parameter, dict[str, str]] = {}
    named = (
        (f"{path}.{name}" if path else name, parameter)
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    )
    in_blocks = shards and isinstance(getattr(model, "blocks", None), nn.ModuleDict)
    patterns = layout.training.fp32_modules
    for name, parameter in named:
        first, *rest = name.split(".")
        fsdp_group = f"{first}.{rest[0]}" if first == "blocks" and in_blocks else "the rest"
        modules = itertools.accumulate((first, *rest[:-1]), "{}.{}".format) if rest else ()
        in_fp32 = (path for path in modules if any(fnmatchcase(path, pattern) for pattern in patterns))
        outermost = next((f"{path} (training.fp32_modules)" for path in in_fp32), None)
        groups.setdefault(parameter, {})[name] = outermost or fsdp_group
    for names in groups.values():
        owners = dict.fromkeys(names.values())
        if len(owners) > 1:
            apart = "which FSDP gathers apart" if shards else "one of which is in fp32"
            reason = f"{listed(names, 'and')} share a parameter across {listed(owners, 'and')}, {apart}"
            remedy = (
                "tie weights outside of blocks or within one block, or train on one rank without training.fp32_modules"
            )
            yield Violation("model.architecture", type(model).__name__, reason, remedy)


def _tensor_parallel(model: nn.Module, spec: ModelSpec, degree: int) -> Iterator[Violation]:
    """Check that shards can replace the embedding, the head, and every sharded linear of the spec."""
    field, kind = "parallelism.tp", type(model).__name__
    for name, style in (("embedding", VocabEmbedding), ("head", VocabLogits)) if spec.vocab_size else ():
        child = getattr(model, name, None)
        if not isinstance(getattr(child, "tp_style", None), style):
            reason = f"{kind}.{name} is a {type(child).__name__}, whose vocabulary we cannot shard"
            remedy = f"make it a titan_exp.models.blocks.transformer.{name.capitalize()}, or use parallelism.tp=1"
            yield Violation(field, degree, reason, remedy)
    styles = {
        f"{path}.{child}" if path else child: (module.get_submodule(child), style)
        for path, module in model.named_modules()
        if hasattr(module, "tp_plan")
        for child, style in module.tp_plan().items()  # type: ignore[operator]  # a method, not a submodule
    }
    planned, modules = {name: linear for name, (linear, _) in styles.items()}, dict(model.named_modules())
    yield from _handled(model, {name: style for name, (_, style) in styles.items()}, degree)
    for name, linear in spec.linears():
        if linear.tp is None or linear.experts > 1:
            continue
        if name not in planned:
            reason = f"the spec shards {name}, and no tp_plan() of a module of {kind} names it"
            remedy = "write def tp_plan(self): return layer_spec.tp_plan('attention'), as transformer.Attention does"
        elif (
            isinstance(linear.tp, Rowwise)
            and linear.tp.gathers
            and (beside := f"{name.rpartition('.')[0]}.{linear.tp.gathers}") not in modules
        ):
            reason = f"the spec lets {name} gather the input of {beside}, and {kind} has no such module"
            remedy = "write Rowwise(gathers=...) with the name of a module beside the linear"
        elif not isinstance(planned[name], Linear):
            reason = f"{name} is a {type(planned[name]).__name__}, which we cannot shard"
            remedy = "make it a titan_exp.models.blocks.linear.Linear, or write tp=None in the spec and use "
            remedy += "parallelism.tp=1"
        else:
            continue
        yield Violation(field, degree, reason, remedy)
        return


def _handled(model: nn.Module, plan: Mapping[str, object], degree: int) -> Iterator[Violation]:
    """Check that every tensor-parallel style has a handler."""
    named = ((name, module.tp_style) for name, module in model.named_modules() if hasattr(module, "tp_style"))
    for table, handlers, styles in (("MODULES", MODULES, named), ("LINEARS", LINEARS, plan.items())):
        for name, style in styles:
            if style is not None and type(style) not in handlers:
                kind = type(style).__name__
                reason = f"{name} has the style {kind}, for which there is no handler"
                remedy = f"write {table}[{kind}] = your_handler, with {table} of {STYLES}, or use parallelism.tp=1"
                yield Violation("parallelism.tp", degree, reason, remedy)
                return


def _expert_parallel(model: nn.Module, spec: ModelSpec, parallelism: ParallelismConfig) -> Iterator[Violation]:
    """Check that every layer with a router has the module whose dispatch expert parallelism replaces."""
    found = {name for name, module in model.named_modules() if isinstance(module, MoEFeedForward)}
    for number, layer in enumerate(spec.blocks):
        name = f"blocks.{number}.{'' if layer.router is None else layer.router.name.rpartition('.')[0]}"
        if layer.router is not None and name not in found:
            key, kind = "ep" if parallelism.ep > 1 else "tp", type(model).__name__
            reason = f"it replaces the token dispatch of MoEFeedForward, and {name} of {kind} is not one"
            remedy = f"make it a titan_exp.models.blocks.feed_forward.MoEFeedForward, or use parallelism.{key}=1"
            yield Violation(f"parallelism.{key}", getattr(parallelism, key), reason, remedy)
            return


def _context_parallel(model: nn.Module, degree: int) -> Iterator[Violation]:
    """Check that every block's `attention.core` is one that context parallelism can replace."""
    for number, block in iter_numbered_blocks(model):
        core = getattr(getattr(block, "attention", None), "core", None)
        if not attentions_of(block) and not isinstance(core, GatedDeltaCore):
            found = f"is a {type(core).__name__}" if core is not None else "is missing"
            reason = f"it replaces blocks.{number}.attention.core, which {found} in {type(model).__name__}"
            remedy = "make it a titan_exp.ops.attention.sdpa.CausalAttention, or use parallelism.cp=1"
            yield Violation("parallelism.cp", degree, reason, remedy)
            return


def _pipeline(model: nn.Module, spec: ModelSpec, degree: int) -> Iterator[Violation]:
    """Check that the model names the children of the first and last stage, and numbers its blocks."""
    field, kind = "parallelism.pp", type(model).__name__
    blocks = getattr(model, "blocks", None)
    numbers = [str(number) for number in range(len(spec.blocks))]
    plan = model.pp_plan() if hasattr(model, "pp_plan") else None  # type: ignore[operator]  # a method
    if not isinstance(blocks, nn.ModuleDict) or list(blocks) != numbers:
        reason = f"{kind}.blocks is not a ModuleDict with the keys 0 to {len(numbers) - 1}"
        yield Violation(field, degree, reason, f"{BLOCKS}; or use parallelism.pp=1")
    elif not isinstance(plan, PipelinePlan):
        reason = f"{kind} has no pp_plan() to name the children of the first and of the last stage"
        remedy = "write def pp_plan(self): return self.spec.pipeline, as in titan_exp/models/decoder.py; "
        remedy += "or use parallelism.pp=1"
        yield Violation(field, degree, reason, remedy)
    else:
        children = dict(model.named_children())
        if missing := [child for child in (*plan.first, *plan.last) if child not in children]:
            reason = f"pp_plan() names {listed(missing, 'and')}, which {kind} does not have as a child"
            yield Violation(field, degree, reason, f"name its children: {listed(children, 'and')}")
