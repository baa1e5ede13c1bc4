"""The verb `titan-exp evaluate RUN|FOLDER [overrides]`: loss and perplexity of weights on any data, in any layout."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from torch import nn

from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint, open_checkpoint
from titan_exp.checkpoint.remote.checkpoint_cache import local_copy
from titan_exp.config.command_line.parse_options import HELP, parse_options
from titan_exp.config.command_line.verb_options import EvaluateOptions
from titan_exp.config.errors.did_you_mean import did_you_mean, listed
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import CONF_DIR, compose
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.schema import value_keys
from titan_exp.config.schema.typed_config import load_experiment, to_dict, to_experiment
from titan_exp.data.validation_loader import ValidationLoader
from titan_exp.parallel.apply import parallelize
from titan_exp.parallel.mesh import Mesh, build_mesh
from titan_exp.parallel.tensor_parallel.apply import vocab_shard
from titan_exp.rules import context_parallel as context
from titan_exp.rules import data
from titan_exp.rules import degrees as layout
from titan_exp.rules import tensor_parallel as tensor
from titan_exp.rules.rule import ask
from titan_exp.trainer.distributed import joined_process_group
from titan_exp.trainer.forward_backward import EagerModel
from titan_exp.trainer.load_model import Rows, describe, load_source
from titan_exp.trainer.objective.language_modeling import LanguageModeling
from titan_exp.trainer.rank_call import RunOnRanks, answer
from titan_exp.trainer.validate import ValidationResult, evaluate_sources

USAGE = """\
titan-exp evaluate RUN|FOLDER [step=N] [split=held_out|all] [data=GROUP] [data.KEY=VALUE] [training.seq_len=N]
                   [training.micro_batch_size=N] [parallelism.KEY=VALUE]
  for example: titan-exp evaluate runs/first/6ec54c999fca data=text data.paths='[notes]' split=all

  Without data=... it is the data of the run. What is evaluated on is the validation split, that is the documents that
  training would hold out, or with split=all every document of the source; data.validation_documents=N is the first N.
  Without parallelism... it is one process; parallelism.tp=2 or dp_shard=2 start two, whatever layout the run had."""

BATCH = 8
"""Sequences at a time, where `training.micro_batch_size` is not given."""


def evaluate_command(arguments: Sequence[str], spread: RunOnRanks | None = None) -> int:
    """Run the verb; returns the exit code.

    Args:
        arguments: the words typed.
        spread: starts the ranks that a layout asks for.

    Raises:
        UserError: an override is wrong, the weights cannot be read, or there is nothing to evaluate on.
    """
    if set(arguments) & set(HELP):
        print(USAGE)
        return 0
    places = [word for word in arguments if "=" not in word]
    if len(places) != 1:
        raise UserError(USAGE)
    own = [word for word in arguments if word.startswith(("step=", "split="))]
    options = parse_options(EvaluateOptions, own)
    path = local_copy(places[0], step=options.step)
    source = open_checkpoint(path, options.step)
    overrides = [word for word in arguments if "=" in word and word not in own]
    everything = options.split == "all"
    experiment = evaluated_experiment(path, source, overrides, everything)
    if ResolvedLayout.of(experiment).world_size == 1:
        with joined_process_group(device := _device()):
            found = evaluate_source(source, experiment, build_mesh(experiment.parallelism, device), everything)
    else:
        assert spread is not None, "the command line has it"
        question = {"path": str(source.path), "everything": everything}
        found = ValidationResult(**spread(f"{__name__}.rank_main", experiment, question))
    described = describe(path, source)
    table = Table("weights", "data", "tokens", "loss (nats)", "perplexity")
    table.add_row(
        described, experiment.data.source, f"{found.tokens:,}", f"{found.loss:.4f}", f"{found.perplexity:.4g}"
    )
    Console(highlight=False).print(table)
    numbers = {"weights": str(source.path), "data": experiment.data.source, "split": options.split}
    print(json.dumps({**numbers, "tokens": found.tokens, "loss": found.loss, "perplexity": found.perplexity}))
    return 0


def evaluate_source(
    source: OpenCheckpoint, experiment: Experiment, mesh: Mesh, everything: bool = False
) -> ValidationResult:
    """Loss and perplexity over the validation split of the experiment's data, or over `everything`; all ranks of the
    mesh together, each of which reads its part of the weights."""
    loader = ValidationLoader(
        experiment.data,
        experiment.training.seq_len,
        dp_rank=mesh.dp_rank,
        dp_degree=mesh.dp_degree,
        micro_batch_size=experiment.training.micro_batch_size or BATCH,
        all_documents=everything,
    )
    parallelism = experiment.parallelism

    def divide(model: nn.Module) -> Rows:
        parallelize(model, mesh, ResolvedLayout.of(experiment), experiment.activation_checkpoint, experiment.compile)
        return {}

    model = load_source(
        source,
        mesh.device,
        seq_len=experiment.training.seq_len,
        documents=experiment.data.document_mask,
        divide=divide if mesh.world.size() > 1 else None,
        parts=parallelism.cp > 1 and parallelism.cp_method != "ulysses",
    )
    words = vocab_shard(mesh, source.model.vocab_size) if parallelism.loss_parallel else None
    whole = EagerModel(model, LanguageModeling(experiment.training.loss_chunk_tokens, vocab_shard=words), mesh)
    row = evaluate_sources(whole, loader.sources, mesh)
    return ValidationResult(row["validation_loss"], int(row["validation_tokens"]))


def rank_main(run_folder: str) -> None:
    """What each of several ranks runs."""

    def evaluation(experiment: Experiment, question: Any, device: torch.device) -> dict[str, Any]:
        source, mesh = open_checkpoint(Path(question["path"])), build_mesh(experiment.parallelism, device)
        return dataclasses.asdict(evaluate_source(source, experiment, mesh, question["everything"]))

    answer(run_folder, evaluation)


def evaluated_experiment(
    path: Path, source: OpenCheckpoint, overrides: Sequence[str], everything: bool = False
) -> Experiment:
    """The run's own configuration, or the default one around weights of elsewhere, with overrides laid over it.

    The tokenizer stays that of the weights unless it is named: a model only understands its own. Where `everything` is
    evaluated on, no documents need be held out.

    Raises:
        UserError: an override names nothing that is there.
    """
    groups = [word for word in overrides if "." not in word.partition("=")[0]]
    values = [word for word in overrides if word not in groups]
    wrong = [word for word in groups if not word.startswith("data=")]
    keys = [key for key in value_keys() if key.startswith(("data.", "training.", "model.attention", "parallelism."))]
    names = [word.partition("=")[0].lstrip("+") for word in values]
    unknown = [name for name in names if name not in keys and not name.startswith("data.options.")]
    if wrong or unknown:
        raise UserError("This cannot be evaluated.", [_not_there(word, keys) for word in [*wrong, *unknown]])
    base = _alone(_base(path, source))
    if groups:
        base = OmegaConf.merge(base, {"data": _composed(groups).data})
        assert isinstance(base, DictConfig)
        base.data.tokenizer = source.tokenizer
    for word in values:
        key, _, value = word.lstrip("+").partition("=")
        OmegaConf.update(base, key, _parsed(word, value), force_add=key.startswith("data.options."))
    experiment = to_experiment(base)
    every = 0 if everything else experiment.training.evaluate_every
    asked = dataclasses.replace(experiment, training=dataclasses.replace(experiment.training, evaluate_every=every))
    violations = ask((*data.RULES, *tensor.RULES, *context.RULES, *layout.RULES), asked)
    if experiment.parallelism.pp > 1:
        reason = "a pipeline pays in training; evaluation spreads a model over ranks by its matrices and its layers"
        remedy = f"parallelism.tp or parallelism.dp_shard={experiment.parallelism.pp}"
        violations.append(Violation("parallelism.pp", experiment.parallelism.pp, reason, remedy))
    if experiment.training.seq_len > source.model.context:
        reason = f"it is longer than the model's context, {source.model.context} tokens"
        violations.append(Violation("training.seq_len", experiment.training.seq_len, reason, "a shorter one"))
    if violations:
        raise UserError("This cannot be evaluated.", violations)
    return experiment


def _alone(whole: DictConfig) -> DictConfig:
    """A configuration on one device, and nothing in it that only training needs."""
    degrees = dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp", "cp", "cp_ulysses", "ep", "etp"), 1)
    alone = {
        "parallelism": {**degrees, "async_tp": False, "cpu_offload": False},
        "activation_checkpoint": {"mode": "none"},
        "compile": {"enabled": False, "cuda_graphs": False},
        "training": {"mixed_precision": "fp32"},
    }
    merged = OmegaConf.merge(whole, alone)
    assert isinstance(merged, DictConfig)
    return merged


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _base(path: Path, source: OpenCheckpoint) -> DictConfig:
    for folder in (path, path.parent.parent):
        if source.format == "dcp" and (folder / "config.yaml").is_file():
            return OmegaConf.create(to_dict(load_experiment(folder / "config.yaml")))
    if source.tokenizer is None:
        raise UserError(f"{source.path} has no tokenizer beside its weights. Put its tokenizer.json there.")
    experiment = to_experiment(compose(["training.seq_len=1024"]))
    length = min(experiment.training.seq_len, source.model.context)
    whole = to_dict(dataclasses.replace(experiment, model=source.model))
    whole["data"]["tokenizer"], whole["training"]["seq_len"] = source.tokenizer, length
    return OmegaConf.create(whole)


def _composed(groups: list[str]) -> DictConfig:
    options = sorted(path.stem for path in (CONF_DIR / "data").glob("*.yaml"))
    for word in groups:
        option = word.partition("=")[2]
        if option not in options:
            remedy = did_you_mean(option, options) or f"choose {listed(options)}"
            raise UserError("This cannot be evaluated.", [Violation("data", option, "no such group", remedy)])
    return OmegaConf.create(to_dict(to_experiment(compose(groups))))


def _parsed(word: str, value: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(f"x={value}").value()
    except HydraException as error:
        raise UserError(f"{word}: the value cannot be read; quote it.") from error


def _not_there(word: str, keys: list[str]) -> Violation:
    name, _, value = word.partition("=")
    remedy = did_you_mean(name, ["data", *keys]) or "data=..., data.* and training.seq_len can be given"
    return Violation(name, value, "evaluate has no such key", remedy)
