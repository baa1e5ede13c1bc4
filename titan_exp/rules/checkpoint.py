"""Checkpoint rules: initial weights, exports, remote storage."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from titan_exp.config.errors.user_error import UserError, Violation, listed, nearest, shown
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.groups.run import CheckpointConfig, DataConfig
from titan_exp.config.paths.checkpoint_files import initial_folder, intact_before, missing_part
from titan_exp.config.paths.remote_url import is_url, problem_of_url
from titan_exp.config.schema.identity_keys import is_among
from titan_exp.models.convert.hf_config import export_violations
from titan_exp.models.convert.state_dict_map import checkpoint_formats
from titan_exp.rules.rule import Refuse, rules
from titan_exp.rules.weights.given_weights import ACCEPT, TOKENIZER, given_weights, model_misfits, tokenizer_misfit


def initial_weights_exist(checkpoint: CheckpointConfig) -> Iterator[Violation]:
    """The path is a complete checkpoint. URLs are opened when the run starts."""
    path = checkpoint.initial
    if path is None:
        return
    if is_url(path):
        if (problem := problem_of_url(path)) is not None:
            yield Violation("checkpoint.initial", _without_credentials(path), *problem)
        return
    folder = initial_folder(path) if path else None
    if folder is None:
        yield Violation(
            "checkpoint.initial",
            path or "''",
            "there is no complete checkpoint",
            "a run folder with checkpoints/step-…, one of these (ls -d runs/*/*/checkpoints/* lists them), or a "
            "Hugging Face folder with config.json and safetensors",
        )
    elif (missing := missing_part(folder)) is not None:
        earlier = intact_before(folder)
        remedy = "another copy of it, or another checkpoint" if earlier is None else f"checkpoint.initial={earlier}"
        yield Violation("checkpoint.initial", path, f"{folder.name} is not complete: {missing}", remedy)


def initial_weights_fit(checkpoint: CheckpointConfig, model: ModelConfig, data: DataConfig) -> Iterator[Violation]:
    """Weights on this machine are of this model, and know the words of this tokenizer."""
    path = None if checkpoint.initial is None or is_url(checkpoint.initial) else initial_folder(checkpoint.initial)
    if path is None or missing_part(path) is not None:
        return
    assert checkpoint.initial is not None, "there is a path"
    chosen: dict[str, Any] = {"exclude": checkpoint.initial_exclude, "accepted": checkpoint.accept_changes}
    try:
        given = given_weights(checkpoint.initial, path, model)
        if given is not None:
            yield from model_misfits(model, given, **chosen)
            yield from tokenizer_misfit(data, model, given, **chosen)
    except UserError as error:
        yield Violation("checkpoint.initial", checkpoint.initial, str(error), "another copy, or other weights")


def accepted_changes_exist(checkpoint: CheckpointConfig, model: ModelConfig) -> Iterator[Violation]:
    """The changes to accept are keys of this model, or the tokenizer."""
    values = {"model": model, **_values_in(model, "model.")}
    accepted = checkpoint.accept_changes
    mappings = [key for key, value in values.items() if isinstance(value, Mapping)]
    wrong = [name for name in accepted if name not in (*values, TOKENIZER) and not is_among(name, mappings)]
    if wrong:
        near = [other for name in wrong for other in nearest(name, [*list(values)[1:], TOKENIZER], 1)]
        kept = dict.fromkeys([*(name for name in accepted if name not in wrong), *near])
        reason = (
            f"{listed(wrong, 'and')} {'is' if len(wrong) == 1 else 'are'} neither {TOKENIZER} nor a key of this model"
        )
        remedy = f"{ACCEPT}='{shown([*kept])}'; titan-exp train --cfg job prints the keys of model"
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
    if (problem := problem_of_url(checkpoint.remote)) is not None:
        yield Violation("checkpoint.remote", url, *problem)
    if checkpoint.mode == "off":
        reason = "no checkpoint is saved (checkpoint.mode=off), so none can be uploaded"
        yield Violation("checkpoint.remote", url, reason, "checkpoint=async, or checkpoint.remote=null")


def export_is_expressible(checkpoint: CheckpointConfig, model: ModelConfig) -> Iterator[Violation]:
    """Hugging Face's class of the family computes this model."""
    if checkpoint.export != "none" and "huggingface" in checkpoint_formats(model):
        for violation in export_violations(model):
            reason = f"{violation.reason}, and checkpoint.export={checkpoint.export} writes one of its class"
            remedy = f"{violation.remedy}, or checkpoint.export=none"
            yield Violation(violation.field, violation.value, reason, remedy)


def _without_credentials(url: str) -> str:
    return re.sub(r"://[^/]*@", "://***@", url.partition("?")[0]) or "''"


CHECKPOINT_RULES = rules(
    Refuse(
        "checkpoint.initial_exclude",
        lambda checkpoint: checkpoint.initial_exclude and checkpoint.initial is None,
        "checkpoint.initial is null, so that all weights are initialized anyway",
        "checkpoint.initial=RUN_FOLDER, or checkpoint.initial_exclude=[]",
    ),
    Refuse(
        "checkpoint.mode",
        lambda checkpoint, device: checkpoint.mode == "async_pinned" and device == "cpu",
        "memory is pinned for copies from a GPU, and training is on the CPU",
        "checkpoint.mode=async or async_process",
    ),
    Refuse(
        "training.steps",
        lambda checkpoint, training: training.steps == 0 and checkpoint.mode == "off",
        "nothing is trained, and checkpoint.mode=off saves nothing",
        "checkpoint=sync",
    ),
    accepted_changes_exist,
    remote_is_supported,
    Refuse(
        "checkpoint.export",
        lambda checkpoint, model: checkpoint.export != "none" and "huggingface" not in checkpoint_formats(model),
        "model.architecture={model.architecture} has no tensor names in Hugging Face's format",
        "checkpoint.export=none; titan-exp convert RUN weights.pt writes any model",
    ),
    export_is_expressible,
    Refuse(
        "checkpoint.export_every",
        lambda checkpoint: checkpoint.export == "none" and checkpoint.export_every is not None,
        "checkpoint.export is none, so that nothing is exported",
        "checkpoint.export=bf16 or fp32, or checkpoint.export_every=null",
    ),
)
"""Rules checked at every start."""

CHECKPOINT_BEGINNING_RULES = rules(initial_weights_exist, initial_weights_fit)
"""Rules about inputs of a run's first start, skipped on resume."""
