"""Rules about the shape of the built-in model."""

from collections.abc import Iterator

from titan_exp.config.errors.did_you_mean import divisors, listed, multiples_near, nearest_numbers
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.builtins import ARCHITECTURES
from titan_exp.config.groups.experiment import Experiment
from titan_exp.rules.rule import rules

FFN_MULTIPLE = 32
"""What `model.ffn_dim` is a multiple of: gate and up rows alternate in groups of so many in the fused projection."""


def heads_in_groups(experiment: Experiment) -> Iterator[Violation]:
    """Every key and value head serves the same number of query heads."""
    model = experiment.model
    if model.heads % model.kv_heads:
        yield Violation(
            "model.kv_heads",
            model.kv_heads,
            f"{model.heads} query heads cannot share {model.kv_heads} key and value heads evenly",
            f"nearest: model.kv_heads={listed(nearest_numbers(model.kv_heads, divisors(model.heads)))}",
        )


def even_head_dim(experiment: Experiment) -> Iterator[Violation]:
    """Rotary embedding turns pairs of numbers."""
    head_dim = experiment.model.head_dim
    if head_dim % 2:
        yield Violation(
            "model.head_dim",
            head_dim,
            "rotary embedding turns pairs, so a head's width must be even",
            f"nearest: model.head_dim={listed(multiples_near(head_dim, 2))}",
        )


def aligned_ffn_dim(experiment: Experiment) -> Iterator[Violation]:
    """The feed-forward width holds whole groups."""
    width = experiment.model.ffn_dim
    if width % FFN_MULTIPLE:
        yield Violation(
            "model.ffn_dim",
            width,
            f"it is not a multiple of {FFN_MULTIPLE}, the groups in which gate and up rows alternate",
            f"nearest: model.ffn_dim={listed(multiples_near(width, FFN_MULTIPLE))}",
        )


def sequence_within_context(experiment: Experiment) -> Iterator[Violation]:
    """Positions beyond the model's context were never meant."""
    seq_len, context = experiment.training.seq_len, experiment.model.context
    if seq_len > context:
        yield Violation(
            "training.seq_len",
            seq_len,
            f"it is longer than the context of {experiment.model.name}, {context} tokens",
            f"at most training.seq_len={context}, or a longer context: model.context={seq_len}",
        )


def rope_means_something(experiment: Experiment) -> Iterator[Violation]:
    """A stretching factor is only given with a stretching, whose bounds are in order."""
    rope = experiment.model.rope
    if rope.scaling == "none" and rope.factor != 1:
        yield Violation(
            "model.rope.factor",
            rope.factor,
            "without a scaling it changes nothing",
            "choose the scaling (model.rope.scaling=llama3), or model.rope.factor=1",
        )
    if rope.scaling == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        yield Violation(
            "model.rope.low_freq_factor",
            rope.low_freq_factor,
            f"it must be below model.rope.high_freq_factor, {rope.high_freq_factor:g}",
            "Llama 3.1 has model.rope.low_freq_factor=1 and model.rope.high_freq_factor=4",
        )


def shape_of_the_decoder(experiment: Experiment) -> Iterator[Violation]:
    """The rules of this file, for the built-in model; one of the user's own has its own rules."""
    if experiment.model.architecture in ARCHITECTURES:
        for rule in (heads_in_groups, even_head_dim, aligned_ffn_dim, sequence_within_context, rope_means_something):
            yield from rule(experiment)


RULES = rules(
    shape_of_the_decoder,
)
