"""Build the objective that `training.objective` names."""

from dataclasses import replace
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.extension import load, provided
from titan_exp.config.groups.activation_checkpoint import CompileConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.schema.builtins import LANGUAGE_MODELING
from titan_exp.config.schema.call_signature import Call, call_violations, require_members
from titan_exp.config.schema.import_path import import_dotted, is_dotted
from titan_exp.config.secrets import revealed
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.transformer import MTP_DEPTH
from titan_exp.ops.loss.cross_entropy import VocabShard
from titan_exp.trainer.objective.base import Objective
from titan_exp.trainer.objective.language_modeling import LanguageModeling
from titan_exp.trainer.objective.multi_token_prediction import MultiTokenPrediction


def build_objective(
    training: TrainingConfig,
    compile_: CompileConfig,
    vocab_shard: VocabShard | None,
    automatic_chunk: int | None = None,
    spec: ModelSpec | None = None,
) -> Objective:
    """Build `language_modeling`, an extension's objective, or a class of the user's by its import path.

    `automatic_chunk` is the chunk of `training.loss_chunk_tokens=auto`, for objectives that compute a loss in chunks.
    With multi-token prediction in the model's `spec`, the objective is also that of its modules.

    A class has a classmethod `build(training, vocab_shard, *, compile_backend, **options)`, as `LanguageModeling`.

    Raises:
        UserError: the import path cannot be imported, a subclass with its own `loss` cannot compute it in chunks or
            from a shard of the vocabulary, or the class cannot compute the loss of further predictions.
    """
    name, backend = training.objective, compile_.backend if compile_.compiles("loss") else None
    kind: Any = LanguageModeling
    if name != LANGUAGE_MODELING:
        kind = _own_class(training) if is_dotted(name) else load(provided("objectives")[name])
    if training.loss_chunk_tokens == "auto":
        training = replace(training, loss_chunk_tokens=None if _overrides_loss(kind) else automatic_chunk)
    options = revealed(training.objective_options, "training.objective_options")
    objective = kind.build(training, vocab_shard, compile_backend=backend, **options)
    if spec is not None and hasattr(objective, "bind"):
        objective = objective.bind(spec)
    if training.loss_chunk_tokens is not None and _overrides_loss(kind):
        raise UserError(
            f"training.loss_chunk_tokens={training.loss_chunk_tokens}: {name} overrides `loss`, which takes whole "
            "logits. Use training.loss_chunk_tokens=null, or override `__call__` as well."
        )
    if vocab_shard is not None and _needs_whole_logits(kind):
        raise UserError(
            f"parallelism.loss_parallel=true: {name} has its own loss, which would take this rank's shard of the "
            "vocabulary for all of it. Use parallelism.loss_parallel=false, or set `takes_vocab_shard = True` in the "
            "class if it computes with `self.vocab_shard`."
        )
    if spec is None or not spec.mtp_layers:
        return objective
    if not isinstance(objective, LanguageModeling) or kind.__call__ is not LanguageModeling.__call__:
        raise UserError(
            f"{MTP_DEPTH}={len(spec.mtp_layers)}: {name} has its own `__call__`, which computes no loss of further "
            f"predictions. Use {MTP_DEPTH}=0, or extend LanguageModeling and override `loss` alone."
        )
    return MultiTokenPrediction(objective, len(spec.mtp_layers), spec.mtp_weight)


def _own_class(training: TrainingConfig) -> Any:
    name, field = training.objective, "training.objective"
    kind = import_dotted(name, field)
    require_members(kind, name, field, ("build", "metrics", "count"), "titan_exp/trainer/objective/base.py")
    options = training.objective_options
    call = Call(("training", "vocab_shard"), ("compile_backend",), "training.objective_options", options)
    violations = call_violations(kind.build, f"{name}.build", field, call)
    if violations:
        raise UserError("This run cannot be started.", violations)
    return kind


def _overrides_loss(kind: type) -> bool:
    base = LanguageModeling
    return issubclass(kind, base) and kind.loss is not base.loss and kind.__call__ is base.__call__


def _needs_whole_logits(kind: type) -> bool:
    base = LanguageModeling
    own = issubclass(kind, base) and (kind.loss is not base.loss or kind.__call__ is not base.__call__)
    return own and not kind.takes_vocab_shard
