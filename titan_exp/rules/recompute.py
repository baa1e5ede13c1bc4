"""Activation checkpointing and torch.compile rules."""

from collections.abc import Iterator

from titan_exp.config.errors.did_you_mean import did_you_mean
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.activation_checkpoint import ActivationCheckpointConfig
from titan_exp.config.machine.aten_ops import known_operators, read_entry
from titan_exp.rules.rule import Refuse, rules

PARTITIONING_BACKENDS = ("inductor", "aot_eager")
"""Compile backends that choose a graph's saved activations."""


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


RULES = rules(
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
    Refuse(
        "activation_checkpoint.mode",
        lambda activation_checkpoint, compile: (
            activation_checkpoint.mode == "budget" and not compile.compiles("blocks")
        ),
        "the compiler chooses what fits into the budget, and does not compile the blocks",
        "compile=blocks, or activation_checkpoint=selective, every_n or full",
    ),
    Refuse(
        "activation_checkpoint.mode",
        lambda activation_checkpoint, compile: (
            activation_checkpoint.mode == "budget"
            and compile.compiles("blocks")
            and compile.backend not in PARTITIONING_BACKENDS
        ),
        "compile.backend={compile.backend} does not choose what is saved",
        f"compile.backend={' or '.join(PARTITIONING_BACKENDS)}",
    ),
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
