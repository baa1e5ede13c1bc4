"""Rules about modules that compute in another precision than the rest."""

from collections.abc import Iterator
from fnmatch import fnmatchcase

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.builtins import ARCHITECTURES
from titan_exp.config.groups.experiment import Experiment
from titan_exp.rules.rule import rules

FIELD = "training.fp32_modules"


def fp32_among_bf16(experiment: Experiment) -> Iterator[Violation]:
    """There is a lower precision that modules can be kept out of."""
    modules = experiment.training.fp32_modules
    if modules and experiment.training.mixed_precision == "fp32":
        remedy = "training.mixed_precision=bf16, or leave it out"
        yield Violation(FIELD, modules, "everything computes in fp32 already", remedy)


def tied_embedding_stays_with_the_head(experiment: Experiment) -> Iterator[Violation]:
    """A tied embedding is the head's weight too, and one weight has one precision."""
    model = experiment.model
    if model.architecture not in ARCHITECTURES or not model.tied_embeddings:
        return
    for pattern in experiment.training.fp32_modules:
        if fnmatchcase("embedding", pattern):
            yield Violation(
                FIELD,
                pattern,
                "the embedding is the head's weight as well (model.tied_embeddings=true)",
                "model.tied_embeddings=false, or leave the embedding out",
            )


def compiled_blocks_are_whole(experiment: Experiment) -> Iterator[Violation]:
    """A block that is compiled as one graph has one precision."""
    if not experiment.compile.compiles("blocks"):
        return
    for pattern in experiment.training.fp32_modules:
        if fnmatchcase("blocks.0.part", pattern) or pattern.count(".") > 1:
            yield Violation(
                FIELD,
                pattern,
                "it names modules inside blocks, and compile=blocks makes one graph of a block",
                "whole blocks (blocks.0), modules outside of them (embedding), or compile=none",
            )


RULES = rules(fp32_among_bf16, tied_embedding_stays_with_the_head, compiled_blocks_are_whole)
