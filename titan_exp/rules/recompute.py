"""Activation checkpointing, torch.compile, and the chunked loss."""

from collections.abc import Iterator
from fnmatch import fnmatchcase

from titan_exp.config.errors.did_you_mean import did_you_mean
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.activation_checkpoint import ActivationCheckpointConfig, CompileConfig
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.machine.aten_ops import known_operators, read_entry
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.rules.rule import rules

PARTITIONING_BACKENDS = ("inductor", "aot_eager")
"""Compile backends that choose which activations a graph saves for backward."""


def saved_operators_exist(activation_checkpoint: ActivationCheckpointConfig) -> Iterator[Violation]:
    """torch has every operator whose output is saved; operators of other libraries are looked up by the ranks."""
    saved, field = activation_checkpoint.save, "activation_checkpoint.save"
    if activation_checkpoint.mode != "selective":
        return
    if not saved:
        yield Violation(
            field,
            saved,
            "selective checkpointing that saves no operator recomputes everything",
            "activation_checkpoint=full, or activation_checkpoint.save='[aten.mm/2]'",
        )
    for entry in saved:
        parsed = read_entry(entry)
        if parsed is None:
            reason = "an entry is namespace.operator, with .overload or /number after it"
            yield Violation(field, entry, reason, "aten.mm saves every call, aten.mm/2 every second one")
            continue
        namespace, name = parsed.operator.split(".")[:2]
        known = known_operators(namespace)
        if known and name not in known:
            offer = did_you_mean(parsed.operator, [f"{namespace}.{operator}" for operator in known])
            yield Violation(
                field, entry, "torch has no such operator", offer or "names are those of torch.ops, as in aten.mm"
            )


def some_block_is_recomputed(spec: ModelSpec, activation_checkpoint: ActivationCheckpointConfig) -> Iterator[Violation]:
    """The model has a block to recompute."""
    layers, every = len(spec.layers), activation_checkpoint.every
    if activation_checkpoint.mode == "every_n" and every > layers:
        yield Violation(
            "activation_checkpoint.every",
            every,
            f"there are {layers} blocks, so that none would be recomputed",
            f"at most activation_checkpoint.every={layers}, or activation_checkpoint=none",
        )


def budget_has_a_compiler(
    activation_checkpoint: ActivationCheckpointConfig, compile: CompileConfig
) -> Iterator[Violation]:
    """The compiler keeps to a memory budget."""
    field = "activation_checkpoint.mode"
    if activation_checkpoint.mode != "budget":
        return
    if not compile.compiles("blocks"):
        missing = "compile.components lacks blocks" if compile.enabled else "compile.enabled is false"
        reason = f"the compiler chooses what fits into the budget, and {missing}"
        yield Violation(field, "budget", reason, "compile=blocks, or activation_checkpoint=selective, every_n or full")
    elif compile.backend not in PARTITIONING_BACKENDS:
        reason = f"compile.backend={compile.backend} does not choose what is saved"
        yield Violation(field, "budget", reason, f"compile.backend={' or '.join(PARTITIONING_BACKENDS)}")


def compiled_parts_are_given(compile: CompileConfig) -> Iterator[Violation]:
    """Compilation that is on compiles a part, and the loss only with a backend that takes inputs in place."""
    field = "compile.components"
    if compile.enabled and not compile.components:
        reason = "compile.enabled is true, and no part is given"
        yield Violation(field, [], reason, f"{field}=[blocks], or [blocks,loss]; compile=none")
    if compile.compiles("loss") and compile.backend == "cudagraphs":
        yield Violation(
            field,
            compile.components,
            "every replay of a CUDA graph would first copy all logits to the captured address",
            f"{field}=[blocks], or compile.backend=inductor",
        )


def chunked_loss_has_a_head(model: ModelConfig, training: TrainingConfig) -> Iterator[Violation]:
    """The model hands its LM head to the loss; a plain class returns logits."""
    if training.loss_chunk_tokens is not None and model_spec(model) is None:
        yield Violation(
            "training.loss_chunk_tokens",
            training.loss_chunk_tokens,
            f"model.architecture={model.architecture} returns all logits at once",
            "training.loss_chunk_tokens=null",
        )


def chunked_loss_has_one_precision(training: TrainingConfig) -> Iterator[Violation]:
    """The chunked loss takes the head's weight from FSDP's root group, whose precision it has."""
    for pattern in training.fp32_modules if training.loss_chunk_tokens is not None else ():
        if fnmatchcase("head", pattern):
            yield Violation(
                "training.loss_chunk_tokens",
                training.loss_chunk_tokens,
                f"the head is one of the modules in fp32 (training.fp32_modules has {pattern})",
                "training.loss_chunk_tokens=null, or leave the head out of training.fp32_modules; "
                "softmax and the loss are computed in fp32 anyway",
            )


RULES = rules(
    saved_operators_exist,
    some_block_is_recomputed,
    budget_has_a_compiler,
    compiled_parts_are_given,
    chunked_loss_has_a_head,
    chunked_loss_has_one_precision,
)
