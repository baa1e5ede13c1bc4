"""Activation checkpointing and torch.compile rules."""

from collections.abc import Iterator

from titan_exp.config.errors.user_error import Violation, did_you_mean, shown
from titan_exp.config.groups.parallelism import ActivationCheckpointConfig, CompileConfig
from titan_exp.config.machine.torch_features import known_operators, read_entry
from titan_exp.rules.rule import Refuse, rules

PARTITIONING_BACKENDS = ("inductor", "aot_eager")
"""Compile backends that choose a graph's saved activations."""


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
    if not compile.compiles("blocks"):
        reason = "the compiler chooses what fits into the budget, and does not compile the blocks"
    elif compile.backend not in PARTITIONING_BACKENDS:
        reason = f"compile.backend={compile.backend} does not choose what is saved"
    else:
        return
    remedy = f"{compiled_blocks(compile)}, or activation_checkpoint=selective, every_n or full"
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
            reason = "an entry is namespace.operator, with .overload or /number after it; or auto or auto/3 alone"
            remedy = "aten.mm saves every call, aten.mm/2 every second one; [auto/3] chooses within the budget"
            yield Violation(field, entry, reason, remedy)
            continue
        namespace, name = parsed.operator.split(".")[:2]
        known = known_operators(namespace)
        if known and name not in known:
            offer = did_you_mean(parsed.operator, [f"{namespace}.{operator}" for operator in known])
            remedy = offer or "names are those of torch.ops, as in aten.mm"
            yield Violation(field, entry, "torch has no such operator", remedy)


RECOMPUTE_RULES = rules(
    saved_operators_exist,
    Refuse(
        "activation_checkpoint.save",
        lambda activation_checkpoint: activation_checkpoint.mode == "selective" and not activation_checkpoint.save,
        "selective checkpointing that saves no operator recomputes everything",
        "activation_checkpoint=full, or activation_checkpoint.save='[auto/3]'",
    ),
    Refuse(
        "activation_checkpoint.every",
        lambda spec, activation_checkpoint: (
            activation_checkpoint.mode == "every_n" and activation_checkpoint.every > len(spec.blocks)
        ),
        "there are {model.layers} blocks, so that none would be recomputed",
        "at most activation_checkpoint.every={model.layers}, or activation_checkpoint=none",
    ),
    budget_is_chosen,
    Refuse(
        "compile.components",
        lambda compile: compile.enabled and not compile.components,
        "compile.enabled is true, and no part is given",
        "compile.components=[blocks], or [blocks,loss]; compile=none",
    ),
    Refuse(
        "compile.components",
        lambda compile: compile.compiles("loss") and compile.backend == "cudagraphs",
        "every replay of a CUDA graph would first copy all logits to the captured address",
        "compile.components=[blocks], or compile.backend=inductor",
    ),
)
