"""Rules about the model's shape, asked of its family."""

from collections.abc import Iterator

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.experiment import Experiment
from titan_exp.models.spec.lookup import family_violations, model_spec


def family_computes_the_shape(experiment: Experiment) -> Iterator[Violation]:
    """The family has no objection to its config."""
    yield from family_violations(experiment.model)


def sequence_within_context(experiment: Experiment) -> Iterator[Violation]:
    """Positions stay within the context that the model was made for; a plain class has no such bound."""
    seq_len, context = experiment.training.seq_len, experiment.model.context
    if seq_len > context and model_spec(experiment.model) is not None:
        yield Violation(
            "training.seq_len",
            seq_len,
            f"it is longer than the context of {experiment.model.name}, {context} tokens",
            f"at most training.seq_len={context}, or a longer context: model.context={seq_len}",
        )


RULES = (family_computes_the_shape, sequence_within_context)
