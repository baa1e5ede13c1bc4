"""Modules that compute in fp32 in a bf16 run."""

from collections.abc import Iterator
from fnmatch import fnmatchcase

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.activation_checkpoint import CompileConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.rules.rule import rules

FIELD = "training.fp32_modules"


def fp32_among_bf16(training: TrainingConfig) -> Iterator[Violation]:
    """The rest of the model is in bf16."""
    if training.fp32_modules and training.mixed_precision == "fp32":
        remedy = "training.mixed_precision=bf16, or leave it out"
        yield Violation(FIELD, training.fp32_modules, "everything computes in fp32 already", remedy)


def tied_embedding_stays_with_the_head(spec: ModelSpec, training: TrainingConfig) -> Iterator[Violation]:
    """A tied embedding is the head's weight too, and one weight has one precision."""
    for pattern in training.fp32_modules if spec.tied else ():
        if fnmatchcase("embedding", pattern):
            yield Violation(
                FIELD,
                pattern,
                "the embedding is the head's weight as well (model.tied_embeddings=true)",
                "model.tied_embeddings=false, or leave the embedding out",
            )


def compiled_blocks_have_one_precision(compile: CompileConfig, training: TrainingConfig) -> Iterator[Violation]:
    """A block that is compiled as one graph has one precision."""
    for pattern in training.fp32_modules if compile.compiles("blocks") else ():
        if fnmatchcase("blocks.0.part", pattern) or pattern.count(".") > 1:
            yield Violation(
                FIELD,
                pattern,
                "it names modules inside blocks, and compile=blocks makes one graph of a block",
                "whole blocks (blocks.0), modules outside of them (embedding), or compile=none",
            )


RULES = rules(fp32_among_bf16, tied_embedding_stays_with_the_head, compiled_blocks_have_one_precision)
