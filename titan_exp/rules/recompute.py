"""Rules about what is kept for backward, what is compiled, and the loss in chunks."""

from collections.abc import Iterator
from fnmatch import fnmatchcase

from titan_exp.config.errors.did_you_mean import did_you_mean
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.builtins import ARCHITECTURES
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.machine.aten_ops import known_operators, read_entry
from titan_exp.rules.rule import rules

PARTITIONING_BACKENDS = ("inductor", "aot_eager")
"""Compile backends that choose what a graph keeps for backward."""


def kept_operators_exist(experiment: Experiment) -> Iterator[Violation]:
    """Every operator to keep has a name that torch knows; operators of other libraries are looked up by the ranks."""
    checkpointing, field = experiment.activation_checkpoint, "activation_checkpoint.save"
    if checkpointing.mode != "selective":
        return
    if not checkpointing.save:
        yield Violation(
            field,
            checkpointing.save,
            "selective recomputation without an operator to keep recomputes everything",
            "activation_checkpoint=full, or activation_checkpoint.save='[aten.mm/2]'",
        )
    for entry in checkpointing.save:
        kept = read_entry(entry)
        if kept is None:
            reason = "an entry is namespace.operator, with .overload or /number after it"
            yield Violation(field, entry, reason, "aten.mm keeps every call, aten.mm/2 every second one")
            continue
        namespace, name = kept.operator.split(".")[:2]
        known = known_operators(namespace)
        if known and name not in known:
            offer = did_you_mean(kept.operator, [f"{namespace}.{one}" for one in known])
            yield Violation(
                field, entry, "torch has no such operator", offer or "names are those of torch.ops, as in aten.mm"
            )


def some_block_is_recomputed(experiment: Experiment) -> Iterator[Violation]:
    """Every n-th block: there are n blocks."""
    checkpointing, layers = experiment.activation_checkpoint, experiment.model.layers
    if checkpointing.mode != "every_n" or experiment.model.architecture not in ARCHITECTURES:
        return
    if checkpointing.every > layers:
        yield Violation(
            "activation_checkpoint.every",
            checkpointing.every,
            f"there are {layers} blocks, so that none would be recomputed",
            f"at most activation_checkpoint.every={layers}, or activation_checkpoint=none",
        )


def budget_is_for_compiled_blocks(experiment: Experiment) -> Iterator[Violation]:
    """It is the compiler that keeps to a memory budget."""
    compile_ = experiment.compile
    if experiment.activation_checkpoint.mode != "budget":
        return
    if not compile_.compiles("blocks"):
        lacking = "compile.components lacks blocks" if compile_.enabled else "compile.enabled is false"
        yield Violation(
            "activation_checkpoint.mode",
            "budget",
            f"the compiler chooses what fits into the budget, and {lacking}",
            "compile=blocks, or activation_checkpoint=selective, every_n or full",
        )
    elif compile_.backend not in PARTITIONING_BACKENDS:
        yield Violation(
            "activation_checkpoint.mode",
            "budget",
            f"compile.backend={compile_.backend} does not choose what is kept",
            f"compile.backend={' or '.join(PARTITIONING_BACKENDS)}",
        )


def something_is_compiled(experiment: Experiment) -> Iterator[Violation]:
    """Compilation that is on compiles a part, and the loss with a backend that takes it as it is."""
    compile_, field = experiment.compile, "compile.components"
    if compile_.enabled and not compile_.components:
        yield Violation(
            field,
            [],
            "compile.enabled is true, and no part is named",
            f"{field}=[blocks], or [blocks,loss]; compile=none",
        )
    if compile_.compiles("loss") and compile_.backend == "cudagraphs":
        yield Violation(
            field,
            compile_.components,
            "every replay of a CUDA graph would first copy all logits to where it expects them",
            f"{field}=[blocks], or compile.backend=inductor",
        )


def chunks_are_for_the_built_in_head(experiment: Experiment) -> Iterator[Violation]:
    """A model of one's own returns logits; there is nothing left to chunk."""
    chunk, architecture = experiment.training.loss_chunk_tokens, experiment.model.architecture
    if chunk is not None and architecture not in ARCHITECTURES:
        yield Violation(
            "training.loss_chunk_tokens",
            chunk,
            f"model.architecture={architecture} returns all logits at once",
            "training.loss_chunk_tokens=null",
        )


def chunks_and_a_head_in_fp32(experiment: Experiment) -> Iterator[Violation]:
    """The loss takes the head's weight from the group that it is gathered with, that of the whole model."""
    chunk = experiment.training.loss_chunk_tokens
    for pattern in experiment.training.fp32_modules:
        if chunk is not None and fnmatchcase("head", pattern):
            yield Violation(
                "training.loss_chunk_tokens",
                chunk,
                f"the head is one of the modules in fp32 (training.fp32_modules has {pattern})",
                "training.loss_chunk_tokens=null, or leave the head out of training.fp32_modules; "
                "softmax and the loss are computed in fp32 anyway",
            )


RULES = rules(
    kept_operators_exist,
    some_block_is_recomputed,
    budget_is_for_compiled_blocks,
    something_is_compiled,
    chunks_are_for_the_built_in_head,
    chunks_and_a_head_in_fp32,
)
