"""Verbs and reports of the extension, which import torch when they run."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from titan_exp.config.command_line.options import HELP
from titan_exp.config.groups.experiment import Experiment
from titan_exp.extensions.analysis import COORDINATES, NUMERICS

SMALL_MODEL = 50_000_000
"""Number of parameters up to which a run ends with a summary of its experts, since this takes only seconds."""


def numerics(argv: Sequence[str]) -> int:
    """Report the rounding error of a numeric recipe per layer."""
    if set(argv) & set(HELP):
        print(NUMERICS)
        return 0
    from titan_exp.extensions.analysis.numerics import numerics_command
    from titan_exp.launch.run_lookup import run_path

    return numerics_command(argv, run_path)


def coordinates(argv: Sequence[str]) -> int:
    """Draw the coordinate check of a parametrization."""
    if set(argv) & set(HELP):
        print(COORDINATES)
        return 0
    from titan_exp.extensions.analysis.coordinates import coordinates_command

    return coordinates_command(argv)


def report_experts(experiment: Experiment, folder: Path) -> Iterator[str]:
    """Lines about the specialization of experts, or the command that measures it if loading the model takes long."""
    from titan_exp.models.spec.lookup import has_routers, model_spec

    spec = model_spec(experiment.model)
    if spec is None or not has_routers(experiment.model) or experiment.checkpoint.mode == "off":
        return
    command = f"titan-exp evaluate {folder} --experts"
    if spec.parameters > SMALL_MODEL:
        yield f"what its experts learned: {command}"
        return
    from titan_exp.extensions.analysis.experts import learned_experts

    yield from learned_experts(folder)
    yield f"all experts: {command}"
