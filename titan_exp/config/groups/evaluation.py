"""Group `evaluation`: what is measured while training, when, and on which data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from titan_exp.config.errors.user_error import UserError, Violation, shown
from titan_exp.config.extension import extended
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.groups.types import Count, PositiveInt

FORMER = {"training.evaluate_every": "evaluation.every"}
"""Keys by their former names, which may still be typed and stand in files."""


@dataclass(frozen=True)
class ValidationSetConfig:
    """A validation set beside the run's own split."""

    data: dict[str, Any]
    """Keys of the group `data` that differ from the run's, such as `{paths: [code/*.py]}`.

    All documents are read, up to `validation_documents`. If the keys have a `validation_fraction` or a
    `validation_split`, only those are read that they hold out."""
    seq_len: PositiveInt | None = None
    """Sequence length in tokens, at most `training.seq_len`, which is the default."""

    @property
    def holds_out(self) -> bool:
        """True if only a part of the documents is read, which a run on the same source does not train on."""
        return bool(self.data.get("validation_fraction") or self.data.get("validation_split"))


@extended("evaluation")
@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluations while training. They change no training step."""

    every: Count = 500
    """Steps between evaluations on the whole validation split and the sets. The last step always has one. 0 never
    evaluates. E.g. `evaluation.every=1000`."""
    every_tokens: PositiveInt | None = None
    """Tokens of the global batches between evaluations, in place of `every`; null counts steps.
    E.g. `evaluation.every_tokens=1000000000`."""
    sets: dict[str, ValidationSetConfig] = field(default_factory=dict)
    """Further validation sets by name, each logged as `validation_loss/NAME`. They do not enter `validation_loss`.
    E.g. `+evaluation.sets.code='{data:{source:text,paths:[code],validation_documents:200}}'`."""

    @property
    def in_run_id(self) -> tuple[str, ...]:
        """Keys that are part of the run id at their default, too, as they were under their former names."""
        return ("every",)

    @property
    def enabled(self) -> bool:
        """True if there are evaluations."""
        return bool(self.every)

    def due(self, training: TrainingConfig, step: int) -> bool:
        """True if an evaluation follows this step, not counting the last step's."""
        if not self.every:
            return False
        if self.every_tokens is None:
            return step % self.every == 0
        now, before = (training.sequences_after(steps) * training.seq_len for steps in (step, step - 1))
        return now // self.every_tokens > before // self.every_tokens


def with_current_keys(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Values of a configuration with current keys in place of former ones, and a sentence about each that was there.

    Raises:
        UserError: a former key and its current one are both set, to different values.
    """
    found = dict(values)
    said = []
    for former, current in FORMER.items():
        (group, key), (to, name) = former.split("."), current.split(".")
        if not isinstance(found.get(group), dict) or key not in found[group]:
            continue
        found[group] = dict(found[group])
        if (value := found[group].pop(key)) is not None and isinstance(found.get(to, {}), dict):
            default = getattr(EvaluationConfig, name)
            if (own := found.get(to, {}).get(name, default)) not in (default, value):
                reason = f"this is the former name of {current}, which is set to {shown(own)}"
                remedy = f"use {former}=null, or {current}={shown(value)}"
                raise UserError("Two names of one key differ.", [Violation(former, value, reason, remedy)])
            found[to] = {**found.get(to, {}), name: value}
            said.append(f"{former}={value} is {current}={value} now.")
    return found, said
