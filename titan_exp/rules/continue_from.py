"""Rules of a continued run: its parent has a checkpoint, and fits."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError, Violation, shown
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.groups.optimizer import OptimizerConfig
from titan_exp.config.groups.run import CheckpointConfig, DataConfig, PathsConfig, RunConfig
from titan_exp.config.groups.training import TrainingConfig, WeightAverageConfig
from titan_exp.config.paths.checkpoint_files import METADATA_FILE, intact_before, missing_part, step_of
from titan_exp.config.paths.foreign_file import parse_json, read_lines
from titan_exp.config.paths.remote_url import is_url, parent_checkpoint, parent_location, problem_of_url
from titan_exp.config.schema.identity_keys import flatten
from titan_exp.config.schema.typed_config import read_values
from titan_exp.rules.rule import Refuse, rules
from titan_exp.rules.weights.given_weights import from_config, model_misfits, tokenizer_misfit

FIELD = "checkpoint.continue_from"


def parent_has_a_checkpoint(checkpoint: CheckpointConfig, paths: PathsConfig) -> Iterator[Violation]:
    """The parent has a complete checkpoint of the step. URLs are opened when the run starts."""
    if checkpoint.continue_from is None:
        return
    location = parent_location(checkpoint.continue_from, Path(paths.runs).expanduser())
    if is_url(location):
        if (problem := problem_of_url(location)) is not None:
            yield Violation(FIELD, location.partition("://")[0] + "://…", *problem)
    elif (path := local_checkpoint(checkpoint, paths)) is None:
        step = "" if checkpoint.continue_step is None else f" of step {checkpoint.continue_step}"
        remedy = "a run with checkpoints: ls -d runs/*/*/checkpoints/step-* lists them"
        yield Violation(FIELD, checkpoint.continue_from, f"it has no complete checkpoint{step}", remedy)
    elif (missing := missing_part(path)) is not None:
        earlier = intact_before(path)
        step = None if earlier is None else step_of(earlier)
        remedy = "another copy of it" if step is None else f"checkpoint.continue_step={step}"
        yield Violation(FIELD, checkpoint.continue_from, f"{path.name} is not complete: {missing}", remedy)


def steps_are_left(checkpoint: CheckpointConfig, paths: PathsConfig, training: TrainingConfig) -> Iterator[Violation]:
    """The run has more steps than the checkpoint of a parent on this machine."""
    path = local_checkpoint(checkpoint, paths)
    step = None if path is None else step_of(path)
    if step is not None and step >= training.last_step:
        reason = f"the checkpoint of {checkpoint.continue_from} is of step {step}"
        key = "training.steps" if training.stop_after is None else "training.stop_after"
        yield Violation(key, training.last_step, reason, f"{key} above {step}")


def parent_has_this_model(
    checkpoint: CheckpointConfig, paths: PathsConfig, model: ModelConfig, data: DataConfig
) -> Iterator[Violation]:
    """A parent on this machine has the same model and tokenizer."""
    yield from model_misfits_of(_saved(checkpoint, paths), checkpoint, model, data)


def parent_has_this_state(
    checkpoint: CheckpointConfig, paths: PathsConfig, optimizer: OptimizerConfig, run: RunConfig
) -> Iterator[Violation]:
    """A parent on this machine has the same optimizer and seed."""
    yield from state_misfits(_saved(checkpoint, paths), checkpoint, paths, optimizer, run)


def tail_is_whole(
    checkpoint: CheckpointConfig, paths: PathsConfig, training: TrainingConfig, weight_average: WeightAverageConfig
) -> Iterator[Violation]:
    """A parent's averaged steps are none from before this run's tail, which would stay in the mean."""
    path = local_checkpoint(checkpoint, paths)
    step = None if path is None else step_of(path)
    first = weight_average.first_step(training.steps)
    if path is None or step is None or weight_average.mode != "tail" or not first <= step < training.last_step:
        return
    with suppress(UserError, KeyError, TypeError, ValueError):
        saved = read_values(path.parent.parent / "config.yaml")
        parents = WeightAverageConfig(saved["weight_average"]["mode"], steps=int(saved["weight_average"]["steps"]))
        begun = parents.first_step(int(saved["training"]["steps"]))
        if parents.mode == "tail" and begun < first:
            saved_steps = (step_of(other) for other in path.parent.iterdir() if (other / METADATA_FILE).is_file())
            earlier = [other for other in saved_steps if other is not None and other < first]
            reason = (
                f"the tail is of steps {first} to {training.steps}, and the checkpoint of step {step} has the mean of "
                f"steps {begun} to {step}, of which those before {first} cannot be taken out"
            )
            remedy = f"weight_average.steps={training.steps - step}"
            remedy += f"; or checkpoint.continue_step={max(earlier)}, which trains the others again" if earlier else ""
            yield Violation("weight_average.steps", weight_average.steps, reason, remedy)


def rows_have_the_parents_length(
    checkpoint: CheckpointConfig, paths: PathsConfig, training: TrainingConfig
) -> Iterator[Violation]:
    """A parent on this machine has cut its text into rows of the same length, or the data begin anew."""
    path = local_checkpoint(checkpoint, paths)
    if path is None or checkpoint.continue_data != "same":
        return
    length = recorded_data(path.parent.parent).get("training.seq_len", training.seq_len)
    if length != training.seq_len:
        reason = (
            f"{checkpoint.continue_from} cut its text into rows of {shown(length)} tokens, in an order of their own"
        )
        remedy = "checkpoint.continue_data=restart begins with the first row of the new length"
        yield Violation("training.seq_len", training.seq_len, reason, remedy)


def order_is_the_parents(checkpoint: CheckpointConfig, paths: PathsConfig, data: DataConfig) -> Iterator[Violation]:
    """A parent on this machine that has read tokens made before training is not continued by reading a stream."""
    path = local_checkpoint(checkpoint, paths)
    if path is None or not data.streaming or checkpoint.continue_data != "same":
        return
    if "data.streaming" in recorded_data(path.parent.parent):
        reason = f"{checkpoint.continue_from} has read documents that were tokenized before it, in another order"
        remedy = "data.streaming=false; or checkpoint.continue_data=restart"
        yield Violation("data.streaming", True, reason, remedy)


def recorded_data(run: Path) -> Mapping[str, Any]:
    """Identity of the data of a run's last attempt that recorded it; empty if none did."""
    found: Mapping[str, Any] = {}
    with suppress(OSError, UserError):
        for line in read_lines(run / "attempts.jsonl"):
            with suppress(ValueError):
                row = parse_json(line)
                if isinstance(row, dict) and isinstance(row.get("data"), dict):
                    found = row["data"]
    return found


def model_misfits_of(
    saved: Mapping[str, Any], checkpoint: CheckpointConfig, model: ModelConfig, data: DataConfig
) -> Iterator[Violation]:
    """Values of the model and of the tokenizer that must be those of the parent's configuration, and are not."""
    if checkpoint.continue_from is not None and isinstance(saved.get("model"), Mapping):
        given, accepted = from_config(checkpoint.continue_from, saved), checkpoint.accept_changes
        yield from model_misfits(model, given, exclude=None, accepted=accepted)
        same = checkpoint.continue_data == "same"
        yield from tokenizer_misfit(data, model, given, exclude=None, accepted=accepted, same_data=same)


def state_misfits(
    saved: Mapping[str, Any],
    checkpoint: CheckpointConfig,
    paths: PathsConfig,
    optimizer: OptimizerConfig,
    run: RunConfig,
) -> Iterator[Violation]:
    """Values of the optimizer and of the data that must be those of the parent's configuration, and are not."""
    location = parent_location(str(checkpoint.continue_from), Path(paths.runs).expanduser())
    weights_alone = f"checkpoint.continue_from=null checkpoint.initial={location}, which takes the weights alone"
    theirs = flatten(saved)
    if (name := theirs.get("optimizer.name", optimizer.name)) != optimizer.name:
        reason = f"the optimizer state of {checkpoint.continue_from} is that of {name}"
        yield Violation("optimizer.name", optimizer.name, reason, f"optimizer={name}; or {weights_alone}")
    if checkpoint.continue_data == "same" and (seed := theirs.get("experiment.seed", run.seed)) != run.seed:
        remedy = f"experiment.seed={seed}; or checkpoint.continue_data=restart"
        yield Violation("experiment.seed", run.seed, f"the data of {checkpoint.continue_from} have seed {seed}", remedy)


def _saved(checkpoint: CheckpointConfig, paths: PathsConfig) -> Mapping[str, Any]:
    """Configuration of a parent on this machine. One that cannot be read is compared at the start, from the
    checkpoint."""
    path = local_checkpoint(checkpoint, paths)
    with suppress(UserError):
        return {} if path is None else read_values(path.parent.parent / "config.yaml")
    return {}


def local_checkpoint(checkpoint: CheckpointConfig, paths: PathsConfig) -> Path | None:
    """Checkpoint of a parent on this machine."""
    if checkpoint.continue_from is None:
        return None
    location = parent_location(checkpoint.continue_from, Path(paths.runs).expanduser())
    return None if is_url(location) else parent_checkpoint(location, checkpoint.continue_step)


PARENT_RULES = rules(
    Refuse(
        "checkpoint.continue_step",
        lambda checkpoint: checkpoint.continue_step is not None and checkpoint.continue_from is None,
        "checkpoint.continue_from is null, so that there is no such checkpoint",
        "checkpoint.continue_from=RUN, or leave it out",
    ),
    Refuse(
        "checkpoint.continue_from",
        lambda checkpoint: checkpoint.continue_from is not None and checkpoint.initial is not None,
        "checkpoint.initial gives the weights already",
        "one of the two: continue_from takes the whole state, initial the weights alone",
    ),
)
"""Rules checked at every start."""

PARENT_BEGINNING_RULES = rules(
    *(parent_has_a_checkpoint, steps_are_left, parent_has_this_model, parent_has_this_state),
    *(tail_is_whole, rows_have_the_parents_length, order_is_the_parents),
)
"""Rules about the parent, skipped once the run has a checkpoint of its own."""
