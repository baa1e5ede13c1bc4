"""The verb `titan-exp doctor --numerics [RUN|FOLDER] [overrides]`: which layers suffer under a recipe."""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint, open_checkpoint
from titan_exp.config.command_line.parse_options import HELP
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import load_experiment, to_experiment
from titan_exp.data.train_loader import TrainLoader
from titan_exp.doctor.numerics import NumericsReport, report_numerics
from titan_exp.models.build import build_model, choose_attention_backend, init_specs
from titan_exp.parallel.meta_init import copy_initial_weights, init_weights, materialize_parameters
from titan_exp.rules import check
from titan_exp.trainer.load_model import describe, load_source, training_length

USAGE = """\
titan-exp doctor --numerics [RUN|FOLDER] quantization=RECIPE [key=value ...]
  for example: titan-exp doctor --numerics runs/first/6ec54c999fca quantization=float8_rowwise data=text

  Runs the first training batch through the weights of a run (or any folder that generate reads; without one, through
  the initial weights of the model) in fp32 and with the recipe, and lists the projections by what the recipe does to
  them. training.micro_batch_size is the number of sequences, 4 without."""

SEQUENCES = 4
"""Of a batch, where `training.micro_batch_size` is not given."""


def doctor_command(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: an override is wrong, or the weights cannot be read.
    """
    if set(arguments) & set(HELP):
        print(USAGE)
        return 0
    places = [word for word in arguments if "=" not in word and not word.startswith("-")]
    flags = [word for word in arguments if word.startswith("-")]
    if flags != ["--numerics"] or len(places) > 1:
        raise UserError(USAGE)
    path = Path(places[0]).expanduser() if places else None
    source = None if path is None else open_checkpoint(path)
    experiment = _examined(path, source, [word for word in arguments if "=" in word])
    report = examine(experiment, source)
    weights = "initial weights" if path is None or source is None else describe(path, source)
    _print(report, f"{experiment.quantization.recipe} against fp32, {experiment.model.name}, {weights}")
    return 0


def examine(experiment: Experiment, source: OpenCheckpoint | None) -> NumericsReport:
    """The report on a source's weights, or on the experiment's initial ones, on the device that is there."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training = experiment.training
    rows = training.micro_batch_size or SEQUENCES
    with contextlib.closing(
        TrainLoader(
            experiment.data,
            training,
            experiment.experiment.seed,
            dp_rank=0,
            dp_degree=1,
            micro_batch_size=rows,
            pin_memory=False,
        )
    ) as loader:
        batch = next(loader).to(device)
    if source is not None:
        model = load_source(source, device, seq_len=training.seq_len, documents=experiment.data.document_mask)
    else:
        model = _initial(experiment, device)
    return report_numerics(model.train(), experiment, batch)


def _initial(experiment: Experiment, device: torch.device) -> nn.Module:
    # Everything here is in fp32, which few kernels of GPUs take.
    backend = choose_attention_backend(
        experiment.model, device, bf16=False, documents=experiment.data.document_mask, auto=device.type == "cuda"
    )

    def build() -> nn.Module:
        return build_model(experiment.model, seq_len=experiment.training.seq_len, attention_backend=backend)

    with torch.device("meta"):
        model = build()
    table, seed = init_specs(model), experiment.experiment.seed
    materialize_parameters(model, device)
    if table is None:
        copy_initial_weights(model, build, seed)
    else:
        init_weights(model, table, seed)
    return model


def _examined(path: Path | None, source: OpenCheckpoint | None, overrides: Sequence[str]) -> Experiment:
    """What was typed, around the weights that there are; their own data, tokenizer and length unless others are typed.

    Everything in it is on one device.
    """
    experiment = to_experiment(compose([*overrides, "training.mixed_precision=fp32"]))
    names = {word.partition("=")[0].lstrip("+") for word in overrides}
    if path is not None and source is not None:
        data, training = experiment.data, experiment.training
        saved = next((it for it in (path, path.parent.parent) if (it / "config.yaml").is_file()), None)
        if saved is not None and not any(name.partition(".")[0] == "data" for name in names):
            data = load_experiment(saved / "config.yaml").data
        if "data.tokenizer" not in names and source.tokenizer is not None:
            data = dataclasses.replace(data, tokenizer=source.tokenizer)
        if "training.seq_len" not in names:
            training = dataclasses.replace(training, seq_len=training_length(path, source))
        experiment = dataclasses.replace(experiment, model=source.model, data=data, training=training)
    if experiment.quantization.recipe == "none":
        raise UserError(f"It is a recipe that is examined, and there is none.\n{USAGE}")
    rows = experiment.training.micro_batch_size or SEQUENCES
    alone = dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp", "cp", "cp_ulysses", "ep", "etp"), 1)
    experiment = dataclasses.replace(
        experiment,
        parallelism=dataclasses.replace(experiment.parallelism, **alone),
        training=dataclasses.replace(experiment.training, micro_batch_size=rows, global_batch_size=rows),
        quantization=dataclasses.replace(experiment.quantization, emulate=True),
    )
    return check(resolve_layout(experiment, 1))


def _print(report: NumericsReport, title: str) -> None:
    table = Table("projection", "recipe", "own output", "output", "weight gradient", title=title)
    table.columns[0].no_wrap = True
    for column in table.columns[2:]:
        column.justify = "right"
    for error in report.projections:
        numbers = (_shown(value) for value in (error.own, error.output, error.weight_gradient))
        table.add_row(error.name, "yes" if error.quantized else "high", *numbers)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "Signal over noise in dB, worst gradient first; 20 dB is an error of a tenth, 40 dB of a hundredth. "
        "'own output' is the projection's own rounding, 'output' that of all before it as well."
    )
    if any(error.output is None for error in report.projections):
        console.print("'routed': what rounds before it has a router send tokens to other experts.")
    console.print(f"loss {report.loss:.5f}, with the recipe {report.recipe_loss:.5f}")


def _shown(value: float | None) -> str:
    if value is None:
        return "routed"
    return "exact" if value == math.inf else f"{value:.1f}"
