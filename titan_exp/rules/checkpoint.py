"""Checkpoint rules: initial weights, exports, remote storage, and the parent of a continued run."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan_exp.config import checkpoint_files
from titan_exp.config.errors.user_error import UserError, Violation, listed, nearest, shown
from titan_exp.config.foreign_file import parse_json, read_lines
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.groups.optimizer import OptimizerConfig
from titan_exp.config.groups.run import CheckpointConfig, DataConfig, PathsConfig, RunConfig
from titan_exp.config.groups.training import TrainingConfig, WeightAverageConfig
from titan_exp.config.schema.identity_keys import flatten, is_among
from titan_exp.config.schema.typed_config import read_values
from titan_exp.models.convert.hf_config import export_violations
from titan_exp.models.convert.state_dict_map import checkpoint_formats
from titan_exp.rules.rule import Refuse, rules
from titan_exp.rules.weights import ACCEPT, TOKENIZER, from_config, given_weights, model_misfits, tokenizer_misfit


def initial_weights_exist(checkpoint: CheckpointConfig) -> Iterator[Violation]:
    """The path is a complete checkpoint. URLs are opened when the run starts."""
    path = checkpoint.initial
    if path is None:
        return
    if checkpoint_files.is_url(path):
        if (problem := checkpoint_files.problem_of_url(path)) is not None:
            yield Violation("checkpoint.initial", _without_credentials(path), *problem)
        return
    folder = checkpoint_files.initial_folder(path) if path else None
    if folder is None:
        remedy = (
            "give a run folder, one of its checkpoints (ls -d runs/*/*/checkpoints/* lists them), or a Hugging Face "
        )
        remedy += "folder with config.json and safetensors"
        yield Violation("checkpoint.initial", path or "''", "there is no complete checkpoint at this path", remedy)
    elif (missing := checkpoint_files.missing_part(folder)) is not None:
        earlier = checkpoint_files.intact_before(folder)
        remedy = "give another copy of it, or another checkpoint"
        remedy = remedy if earlier is None else f"use checkpoint.initial={earlier}"
        yield Violation("checkpoint.initial", path, f"{folder.name} is not complete: {missing}", remedy)


def initial_weights_fit(checkpoint: CheckpointConfig, model: ModelConfig, data: DataConfig) -> Iterator[Violation]:
    """Weights on this machine are of this model, and know the words of this tokenizer."""
    if checkpoint.initial is None or checkpoint_files.is_url(checkpoint.initial):
        return
    path = checkpoint_files.initial_folder(checkpoint.initial)
    if path is None or checkpoint_files.missing_part(path) is not None:
        return
    chosen: dict[str, Any] = {"exclude": checkpoint.initial_exclude, "accepted": checkpoint.accept_changes}
    try:
        given = given_weights(checkpoint.initial, path, model)
        if given is not None:
            yield from model_misfits(model, given, **chosen)
            yield from tokenizer_misfit(data, model, given, **chosen)
    except UserError as error:
        yield Violation("checkpoint.initial", checkpoint.initial, str(error), "give another copy, or other weights")


def accepted_changes_exist(checkpoint: CheckpointConfig, model: ModelConfig) -> Iterator[Violation]:
    """The changes to accept are keys of this model, or the tokenizer."""
    values = {"model": model, **_values_in(model, "model.")}
    accepted = checkpoint.accept_changes
    mappings = [key for key, value in values.items() if isinstance(value, Mapping)]
    wrong = [name for name in accepted if name not in (*values, TOKENIZER) and not is_among(name, mappings)]
    if wrong:
        near = [other for name in wrong for other in nearest(name, [*list(values)[1:], TOKENIZER], 1)]
        kept = dict.fromkeys([*(name for name in accepted if name not in wrong), *near])
        are = "is" if len(wrong) == 1 else "are"
        reason = f"{listed(wrong, 'and')} {are} neither {TOKENIZER} nor a key of this model"
        remedy = f"use {ACCEPT}='{shown([*kept])}' (titan-exp train --cfg job prints the keys of model)"
        yield Violation(ACCEPT, accepted, reason, remedy)


def _values_in(group: Any, prefix: str) -> dict[str, Any]:
    """Values of a group by key, its groups among them."""
    found: dict[str, Any] = {}
    for one in dataclasses.fields(group):
        found[f"{prefix}{one.name}"] = value = getattr(group, one.name)
        found |= _values_in(value, f"{prefix}{one.name}.") if dataclasses.is_dataclass(value) else {}
    return found


def remote_is_supported(checkpoint: CheckpointConfig) -> Iterator[Violation]:
    """The package for the remote URL's protocol is installed, and checkpoints are saved."""
    if checkpoint.remote is None:
        return
    url = _without_credentials(checkpoint.remote)
    if (problem := checkpoint_files.problem_of_url(checkpoint.remote)) is not None:
        yield Violation("checkpoint.remote", url, *problem)
    if checkpoint.mode == "off":
        reason = "with checkpoint.mode=off the run saves no checkpoint, so it has none to upload"
        yield Violation("checkpoint.remote", url, reason, "use checkpoint=async, or set checkpoint.remote=null")


def export_is_expressible(checkpoint: CheckpointConfig, model: ModelConfig) -> Iterator[Violation]:
    """Hugging Face's class of the family computes this model."""
    if checkpoint.export != "none" and "huggingface" in checkpoint_formats(model):
        for violation in export_violations(model):
            reason = f"{violation.reason}, and checkpoint.export={checkpoint.export} writes weights for that class"
            remedy = f"{violation.remedy}, or set checkpoint.export=none"
            yield Violation(violation.field, violation.value, reason, remedy)


def _without_credentials(url: str) -> str:
    return re.sub(r"://[^/]*@", "://***@", url.partition("?")[0]) or "''"


RULES = rules(
    Refuse(
        "checkpoint.initial_exclude",
        lambda checkpoint: checkpoint.initial_exclude and checkpoint.initial is None,
        "checkpoint.initial is null, so the run initializes all weights anyway",
        "set checkpoint.initial=RUN_FOLDER, or checkpoint.initial_exclude=[]",
    ),
    Refuse(
        "checkpoint.mode",
        lambda checkpoint, device: checkpoint.mode == "async_pinned" and device == "cpu",
        "pinned memory speeds up copies from a GPU, and this run trains on the CPU",
        "use checkpoint.mode=async or async_process",
    ),
    Refuse(
        "training.steps",
        lambda checkpoint, training: training.steps == 0 and checkpoint.mode == "off",
        "a run of 0 steps only saves its initial weights, and checkpoint.mode=off saves nothing",
        "use checkpoint=sync",
    ),
    accepted_changes_exist,
    remote_is_supported,
    Refuse(
        "checkpoint.export",
        lambda checkpoint, model: checkpoint.export != "none" and "huggingface" not in checkpoint_formats(model),
        "the weights of model.architecture={model.architecture} have no names in Hugging Face's format",
        "set checkpoint.export=none (titan-exp convert RUN weights.pt writes the weights of any model)",
    ),
    export_is_expressible,
    Refuse(
        "checkpoint.export_every",
        lambda checkpoint: checkpoint.export == "none" and checkpoint.export_every is not None,
        "checkpoint.export is none, so the run exports nothing",
        "use checkpoint.export=bf16 or fp32, or set checkpoint.export_every=null",
    ),
    Refuse(
        "checkpoint.continue_step",
        lambda checkpoint: checkpoint.continue_step is not None and checkpoint.continue_from is None,
        "checkpoint.continue_from is null, so there is no run to take this step of",
        "set checkpoint.continue_from=RUN, or leave this key out",
    ),
    Refuse(
        "checkpoint.continue_from",
        lambda checkpoint: checkpoint.continue_from is not None and checkpoint.initial is not None,
        "checkpoint.initial gives the weights as well",
        "give one of the two: continue_from takes the whole state, initial takes the weights alone",
    ),
)
"""Rules checked at every start."""

PARENT = "checkpoint.continue_from"


def parent_has_a_checkpoint(checkpoint: CheckpointConfig, paths: PathsConfig) -> Iterator[Violation]:
    """The parent has a complete checkpoint of the step. URLs are opened when the run starts."""
    if checkpoint.continue_from is None:
        return
    location = checkpoint_files.parent_location(checkpoint.continue_from, Path(paths.runs).expanduser())
    if checkpoint_files.is_url(location):
        if (problem := checkpoint_files.problem_of_url(location)) is not None:
            yield Violation(PARENT, location.partition("://")[0] + "://…", *problem)
    elif (path := local_checkpoint(checkpoint, paths)) is None:
        step = "" if checkpoint.continue_step is None else f" of step {checkpoint.continue_step}"
        remedy = "give a run that has one (ls -d runs/*/*/checkpoints/step-* lists all checkpoints)"
        yield Violation(PARENT, checkpoint.continue_from, f"this run has no complete checkpoint{step}", remedy)
    elif (missing := checkpoint_files.missing_part(path)) is not None:
        earlier = checkpoint_files.intact_before(path)
        step = None if earlier is None else checkpoint_files.step_of(earlier)
        remedy = "give another copy of it" if step is None else f"use checkpoint.continue_step={step}"
        yield Violation(PARENT, checkpoint.continue_from, f"{path.name} is not complete: {missing}", remedy)


def steps_are_left(checkpoint: CheckpointConfig, paths: PathsConfig, training: TrainingConfig) -> Iterator[Violation]:
    """The run has more steps than the checkpoint of a parent on this machine."""
    path = local_checkpoint(checkpoint, paths)
    step = None if path is None else checkpoint_files.step_of(path)
    if step is not None and step >= training.last_step:
        reason = f"{checkpoint.continue_from} has already trained {step} steps"
        key = "training.steps" if training.stop_after is None else "training.stop_after"
        yield Violation(key, training.last_step, reason, f"use {key}={step + 1} or more")


def tail_is_whole(
    checkpoint: CheckpointConfig, paths: PathsConfig, training: TrainingConfig, weight_average: WeightAverageConfig
) -> Iterator[Violation]:
    """A parent's averaged steps are none from before this run's tail, which would stay in the mean."""
    path = local_checkpoint(checkpoint, paths)
    step = None if path is None else checkpoint_files.step_of(path)
    first = weight_average.first_step(training.steps)
    if path is None or step is None or weight_average.mode != "tail" or not first <= step < training.last_step:
        return
    with suppress(UserError, KeyError, TypeError, ValueError):
        saved = read_values(path.parent.parent / "config.yaml")
        parents = WeightAverageConfig(saved["weight_average"]["mode"], steps=int(saved["weight_average"]["steps"]))
        begun = parents.first_step(int(saved["training"]["steps"]))
        if parents.mode == "tail" and begun < first:
            complete = (one for one in path.parent.iterdir() if (one / checkpoint_files.METADATA_FILE).is_file())
            steps = [saved_step for saved_step in map(checkpoint_files.step_of, complete) if saved_step is not None]
            reason = (
                f"the tail to average is steps {first} to {training.steps}. The checkpoint of step {step} holds the "
                f"mean of steps {begun} to {step}, and nothing can remove the steps before {first} from it"
            )
            remedy = f"use weight_average.steps={training.steps - step}"
            if earlier := [saved_step for saved_step in steps if saved_step < first]:
                remedy += f", or checkpoint.continue_step={max(earlier)}, which trains the later steps again"
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
        rows = f"rows of {shown(length)} tokens, and rows of another length come in another order"
        reason = f"{checkpoint.continue_from} cut its text into {rows}"
        remedy = "use checkpoint.continue_data=restart, which begins with the first row of the new length"
        yield Violation("training.seq_len", training.seq_len, reason, remedy)


def order_is_the_parents(checkpoint: CheckpointConfig, paths: PathsConfig, data: DataConfig) -> Iterator[Violation]:
    """A parent on this machine that has read tokens made before training is not continued by reading a stream."""
    path = local_checkpoint(checkpoint, paths)
    if path is None or not data.streaming or checkpoint.continue_data != "same":
        return
    if "data.streaming" in recorded_data(path.parent.parent):
        reason = f"{checkpoint.continue_from} tokenized its documents before it trained"
        remedy = "use data.streaming=false, or checkpoint.continue_data=restart"
        yield Violation("data.streaming", True, f"{reason}, and a stream has them in another order", remedy)


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
    location = checkpoint_files.parent_location(str(checkpoint.continue_from), Path(paths.runs).expanduser())
    weights_alone = f"take the weights alone with checkpoint.continue_from=null checkpoint.initial={location}"
    theirs = flatten(saved)
    if (name := theirs.get("optimizer.name", optimizer.name)) != optimizer.name:
        reason = f"{checkpoint.continue_from} was trained by {name}, and this optimizer cannot read its state"
        yield Violation("optimizer.name", optimizer.name, reason, f"use optimizer={name}, or {weights_alone}")
    if checkpoint.continue_data == "same" and (seed := theirs.get("experiment.seed", run.seed)) != run.seed:
        remedy = f"use experiment.seed={seed}, or checkpoint.continue_data=restart"
        reason = f"{checkpoint.continue_from} shuffled its data by seed {seed}"
        yield Violation("experiment.seed", run.seed, reason, remedy)


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
    location = checkpoint_files.parent_location(checkpoint.continue_from, Path(paths.runs).expanduser())
    if checkpoint_files.is_url(location):
        return None
    return checkpoint_files.parent_checkpoint(location, checkpoint.continue_step)


BEGINNING_RULES = rules(
    *(initial_weights_exist, initial_weights_fit, parent_has_a_checkpoint, steps_are_left),
    lambda checkpoint, paths, model, data: model_misfits_of(_saved(checkpoint, paths), checkpoint, model, data),
    lambda checkpoint, paths, optimizer, run: state_misfits(
        _saved(checkpoint, paths), checkpoint, paths, optimizer, run
    ),
    *(tail_is_whole, rows_have_the_parents_length, order_is_the_parents),
)
"""Rules about inputs of a run's first start and about its parent, skipped on resume."""
