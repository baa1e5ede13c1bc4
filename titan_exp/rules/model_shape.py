"""The model's shape, as its family supports it."""

from collections.abc import Iterator

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.models.spec.lookup import family_violations
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.rules.rule import rules


def family_supports_the_shape(model: ModelConfig) -> Iterator[Violation]:
    """The family's own rules hold."""
    yield from family_violations(model)


def sequence_within_context(spec: ModelSpec, model: ModelConfig, training: TrainingConfig) -> Iterator[Violation]:
    """Positions stay within the context that the model was made for; a plain class has no such bound."""
    if training.seq_len > model.context:
        yield Violation(
            "training.seq_len",
            training.seq_len,
            f"it is longer than the context of {model.name}, {model.context} tokens",
            f"at most training.seq_len={model.context}, or a longer context: model.context={training.seq_len}",
        )


RULES = rules(family_supports_the_shape, sequence_within_context)
