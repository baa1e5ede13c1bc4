"""The verb `titan-exp evaluate RUN|FOLDER [overrides]`: loss and perplexity of weights on any data, on one device."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from titan_exp.checkpoint.located import local_copy
from titan_exp.checkpoint.source import Source, open_source
from titan_exp.config.compose import CONF_DIR, compose
from titan_exp.config.convert import load_experiment, to_dict, to_experiment
from titan_exp.config.errors import UserError, Violation
from titan_exp.config.experiment import Experiment
from titan_exp.config.options import HELP
from titan_exp.config.rules.data import RULES
from titan_exp.config.schema import value_keys
from titan_exp.config.suggest import did_you_mean, listed
from titan_exp.data.validation_loader import ValidationLoader
from titan_exp.parallel.mesh import build_mesh
from titan_exp.trainer.distributed import joined_process_group
from titan_exp.trainer.evaluate import Evaluation, evaluate_sources
from titan_exp.trainer.loss import TokenLoss
from titan_exp.trainer.model import WholeModel
from titan_exp.trainer.weights import describe, load_source

USAGE = """\
titan-exp evaluate RUN|FOLDER [step=N] [data=GROUP] [data.KEY=VALUE] [training.seq_len=N] [training.micro_batch_size=N]
  for example: titan-exp evaluate runs/first/6ec54c999fca data=text data.paths='[notes]'

  Without data=... it is the data of the run. What is evaluated on is the validation split, that is the documents that
  training would hold out: data.validation_fraction=0.99 is nearly all of a source that was never trained on."""

BATCH = 8
"""Sequences at a time, where `training.micro_batch_size` is not given."""


def evaluate_command(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: an override is wrong, the weights cannot be read, or there is nothing to evaluate on.
    """
    if set(arguments) & set(HELP):
        print(USAGE)
        return 0
    places = [word for word in arguments if "=" not in word]
    if len(places) != 1:
        raise UserError(USAGE)
    steps = [word.partition("=")[2] for word in arguments if word.startswith("step=")]
    if any(not step.isdigit() for step in steps):
        raise UserError(f"step={steps[0]}: the number of a step is meant.")
    step = int(steps[-1]) if steps else 0
    path = local_copy(places[0], step=step)
    source = open_source(path, step)
    overrides = [word for word in arguments if "=" in word and not word.startswith("step=")]
    experiment = evaluated_experiment(path, source, overrides)
    found = evaluate_source(source, experiment)
    described = describe(path, source)
    table = Table("weights", "data", "tokens", "loss (nats)", "perplexity")
    table.add_row(
        described, experiment.data.source, f"{found.tokens:,}", f"{found.loss:.4f}", f"{found.perplexity:.4g}"
    )
    Console(highlight=False).print(table)
    numbers = {"weights": str(source.path), "data": experiment.data.source, "tokens": found.tokens}
    print(json.dumps({**numbers, "loss": found.loss, "perplexity": found.perplexity}))
    return 0


def evaluate_source(source: Source, experiment: Experiment) -> Evaluation:
    """Loss and perplexity over the validation split of the experiment's data, on the device that is there."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = experiment.training.micro_batch_size or BATCH
    loader = ValidationLoader(experiment, dp_rank=0, dp_degree=1, micro_batch_size=rows)
    length = experiment.training.seq_len
    model = load_source(source, device, seq_len=length, documents=experiment.data.document_mask)
    alone = dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp", "cp", "cp_ulysses", "ep", "etp"), 1)
    with joined_process_group(device):
        mesh = build_mesh(dataclasses.replace(experiment.parallelism, **alone), device)
        whole = WholeModel(model, TokenLoss(experiment.training.loss_chunk_tokens), mesh)
        row = evaluate_sources(whole, loader.sources, mesh)
    return Evaluation(row["validation_loss"], int(row["validation_tokens"]))


def evaluated_experiment(path: Path, source: Source, overrides: Sequence[str]) -> Experiment:
    """The run's own configuration, or the default one around weights of elsewhere, with overrides laid over it.

    The tokenizer stays that of the weights unless it is named: a model only understands its own.

    Raises:
        UserError: an override names nothing that is there.
    """
    groups = [word for word in overrides if "." not in word.partition("=")[0]]
    values = [word for word in overrides if word not in groups]
    wrong = [word for word in groups if not word.startswith("data=")]
    keys = [key for key in value_keys() if key.startswith(("data.", "training.", "model.attention"))]
    names = [word.partition("=")[0].lstrip("+") for word in values]
    unknown = [name for name in names if name not in keys and not name.startswith("data.options.")]
    if wrong or unknown:
        raise UserError("This cannot be evaluated.", [_not_there(word, keys) for word in [*wrong, *unknown]])
    base = _base(path, source)
    if groups:
        base = OmegaConf.merge(base, {"data": _composed(groups).data})
        assert isinstance(base, DictConfig)
        base.data.tokenizer = source.tokenizer
    for word in values:
        key, _, value = word.lstrip("+").partition("=")
        OmegaConf.update(base, key, _parsed(word, value), force_add=key.startswith("data.options."))
    experiment = to_experiment(base)
    violations = [violation for rule in RULES for violation in rule(experiment)]
    if experiment.training.seq_len > source.model.context:
        reason = f"it is longer than the model's context, {source.model.context} tokens"
        violations.append(Violation("training.seq_len", experiment.training.seq_len, reason, "a shorter one"))
    if violations:
        raise UserError("This cannot be evaluated.", violations)
    return experiment


def _base(path: Path, source: Source) -> DictConfig:
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
