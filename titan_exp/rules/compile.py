"""Compilation and recomputation rules: what is saved, compiled and captured in CUDA graphs."""

from collections.abc import Iterator

from titan_exp.config.errors.user_error import Violation, did_you_mean, listed, shown
from titan_exp.config.groups.parallelism import (
    ActivationCheckpointConfig,
    CompileConfig,
    ParallelismConfig,
    QuantizationConfig,
)
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.layout.axes import DEGREES
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.torch_features import ATTENTION_BACKEND, known_operators, read_entry
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.rules.rule import Refuse, rules

PARTITIONING_BACKENDS = ("inductor", "aot_eager")  # compile backends that choose a graph's saved activations


def compiled_blocks(compile: CompileConfig) -> str:
    """Overrides with which a backend that chooses what is saved compiles the blocks."""
    words = [] if compile.enabled else ["compile=blocks"]
    if "blocks" not in compile.components:
        words.append(f"compile.components='{shown(['blocks', *compile.components])}'")
    if compile.backend not in PARTITIONING_BACKENDS:
        words.append(f"compile.backend={PARTITIONING_BACKENDS[0]}")
    return " ".join(words)


def budget_is_chosen(activation_checkpoint: ActivationCheckpointConfig, compile: CompileConfig) -> Iterator[Violation]:
    """Mode `budget` is the compiler's choice of what the graph of a block saves."""
    if activation_checkpoint.mode != "budget":
        return
    cannot = f"compile.backend={compile.backend} cannot" if compile.backend not in PARTITIONING_BACKENDS else ""
    if problem := cannot if compile.compiles("blocks") else "this run does not compile the blocks":
        reason = f"in mode budget the compiler chooses what to save, and {problem}"
        remedy = f"use {compiled_blocks(compile)}, or activation_checkpoint=selective, every_n or full"
        yield Violation("activation_checkpoint.mode", "budget", reason, remedy)


def saved_operators_exist(activation_checkpoint: ActivationCheckpointConfig) -> Iterator[Violation]:
    """Every operator to save exists in torch; ranks look up other libraries' operators."""
    field = "activation_checkpoint.save"
    automatic = activation_checkpoint.automatic
    if automatic is not None and automatic.more is None:
        return
    for entry in activation_checkpoint.save if activation_checkpoint.mode == "selective" else ():
        parsed = read_entry(entry)
        if parsed is None:
            reason = (
                "an entry is namespace.operator, with an optional .overload or /number, or else auto or auto/3 alone"
            )
            remedy = "write aten.mm to save every call, aten.mm/2 to save every second one"
            yield Violation(field, entry, reason, f"{remedy}, or [auto/3] to let the budget choose")
            continue
        namespace, name = parsed.operator.split(".")[:2]
        if (known := known_operators(namespace)) and name not in known:
            offer = did_you_mean(parsed.operator, [f"{namespace}.{operator}" for operator in known])
            remedy = offer or "use a name of torch.ops, such as aten.mm"
            yield Violation(field, entry, "torch has no such operator", remedy)


_RECOMPUTE_RULES = rules(
    saved_operators_exist,
    Refuse(
        "activation_checkpoint.save",
        lambda activation_checkpoint: activation_checkpoint.mode == "selective" and not activation_checkpoint.save,
        "selective checkpointing that saves no operator recomputes everything, as full does",
        "use activation_checkpoint=full, or activation_checkpoint.save='[auto/3]'",
    ),
    Refuse(
        "activation_checkpoint.every",
        lambda spec, activation_checkpoint: (
            activation_checkpoint.mode == "every_n" and activation_checkpoint.every > len(spec.blocks)
        ),
        "the model has {model.layers} blocks, so it would recompute none of them",
        "use activation_checkpoint.every={model.layers} or less, or activation_checkpoint=none",
    ),
    budget_is_chosen,
    Refuse(
        "compile.components",
        lambda compile: compile.enabled and not compile.components,
        "compile.enabled is true, and the list of parts to compile is empty",
        "use compile.components=[blocks], compile.components=[blocks,loss], or compile=none",
    ),
    Refuse(
        "compile.components",
        lambda compile: compile.compiles("loss") and compile.backend == "cudagraphs",
        "the loss reads all logits, and a CUDA graph would copy them to its captured address at every replay",
        "use compile.components=[blocks], or compile.backend=inductor",
    ),
)


BACKENDS = ("inductor", "aot_eager", "eager")  # backends of torch.compile that do not capture CUDA graphs themselves
KERNELS = ("auto", "cudnn", "flash", "efficient", "math")  # attention kernels of torch itself, mask included
RECIPES = ("none", "float8_tensorwise", "float8_rowwise", "float8_rowwise_gw_hp")
"""Recipes with casts of torch or titan_exp."""

ALIGNED = 8  # multiple that torch's grouped matmul requires of dims

_FIELD = "compile.cuda_graphs"
_OFF = f"{_FIELD}=false"


def one_rank_captures(parallelism: ParallelismConfig, layout: ResolvedLayout) -> Iterator[Violation]:
    """A single rank, so that a pass has no collectives and no gathered weights."""
    if layout.world_size > 1:
        used = {key: degree for key in DEGREES if (degree := getattr(parallelism, key)) > 1}
        ranks = f"{layout.world_size} ranks ({', '.join(f'{key}={degree}' for key, degree in used.items())})"
        why = (
            "They gather sharded weights at another address in every pass, and we have not tested captured collectives"
        )
        within = [key for key in ("ep", "etp") if getattr(parallelism, key) > 1]
        one = " ".join(f"parallelism.{key}=1" for key in [*used, *within])
        yield Violation(_FIELD, True, f"the layout has {ranks}. {why}", f"use {_OFF}, or one rank: {one}")


def experts_stay_on_the_device(
    spec: ModelSpec, training: TrainingConfig, quantization: QuantizationConfig
) -> Iterator[Violation]:
    """The grouped matmul of experts does not read on the host how many rows each of them has."""
    experts, rows = spec.expert_linears, "on the host how many rows each expert has"
    if experts and training.mixed_precision != "bf16":
        reason = f"a CUDA graph takes no work of the host, and outside of bf16 the grouped matmul reads {rows}"
        yield Violation(_FIELD, True, reason, f"use {_OFF}, or training.mixed_precision=bf16")
    for name, linear in spec.linears():
        shape = linear.inputs, linear.outputs
        if linear.experts == 1:
            continue
        if any(size % ALIGNED for size in shape):
            reason = (
                f"the dims of {name}, {shape[0]} and {shape[1]}, are not both multiples of {ALIGNED}. So its grouped "
                f"matmul reads {rows}, which a CUDA graph cannot capture"
            )
            remedy = f"give experts dims that are multiples of {ALIGNED}"
        elif quantization.recipe in RECIPES[1:] and quantization.quantizes(name, *shape, layers=len(spec.blocks)):
            unknown = f"what the grouped matmul of {name} does on the host in {quantization.recipe}"
            reason = f"we do not know {unknown}, which a CUDA graph would not replay"
            remedy = "quantization.filter=['*.experts.*']"
        else:
            continue
        yield Violation(_FIELD, True, reason, f"use {_OFF}, or {remedy}")
        return


_GRAPH_RULES = rules(
    Refuse(
        _FIELD,
        lambda device: device == "cpu",
        "a CUDA graph records the work of a GPU, and this run trains on the CPU",
        f"use {_OFF}",
    ),
    Refuse(
        _FIELD,
        lambda parallelism: parallelism.cpu_offload,
        "with parallelism.cpu_offload every pass copies the weights to another address, and a CUDA graph reads fixed "
        "ones",
        f"use {_OFF}, or parallelism.cpu_offload=false",
    ),
    Refuse(
        _FIELD,
        lambda compile: compile.enabled and compile.backend not in BACKENDS,
        "compile.backend={compile.backend} may capture CUDA graphs itself, and captures cannot nest",
        f"use {_OFF}, or compile.backend={listed(BACKENDS)}",
    ),
    Refuse(
        _FIELD,
        lambda model: model_spec(model) is None,
        "a CUDA graph is only right if every pass does the same work, and {model.architecture} does not say so",
        f"use {_OFF}, or model.architecture=llama",
    ),
    Refuse(
        _FIELD,
        lambda spec: spec.attention_backend not in KERNELS,
        f"we do not know what {ATTENTION_BACKEND}={{spec.attention_backend}} does on the host in each pass, which a "
        "CUDA graph would not replay",
        f"use {_OFF}, or {ATTENTION_BACKEND}={listed(KERNELS)}",
    ),
    Refuse(
        _FIELD,
        lambda quantization: quantization.recipe not in RECIPES,
        "we do not know what the casts of quantization.recipe={quantization.recipe} do on the host, which a CUDA "
        "graph would not replay",
        f"use {_OFF}, or quantization={listed(RECIPES)}",
    ),
    experts_stay_on_the_device,
    when=lambda compile: compile.cuda_graphs,
)
RULES = (*_RECOMPUTE_RULES, *_GRAPH_RULES)
LAYOUT_RULES = rules(one_rank_captures, when=lambda compile: compile.cuda_graphs)
