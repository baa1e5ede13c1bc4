"""Measure what this machine can do, or check that a model computes the same in every layout."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from titan_exp.config.command_line.options import HELP, take_options
from titan_exp.doctor import usage


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    if set(argv) & set(HELP):
        print(usage())
        return 0
    if "--layout" in argv:
        return _layout(argv)
    from titan_exp.launch.rank.rank_env import waiting_threads

    # As the launcher sets them for ranks; torch reads them at import.
    os.environ |= waiting_threads()
    from titan_exp.doctor.machine import machine_command
    from titan_exp.launch.local.ranks import run_on_ranks

    return machine_command(argv, run_on_ranks)


@dataclass(frozen=True)
class DoctorLayoutOptions:
    """Options of `titan-exp doctor --layout`."""

    layout: bool = False
    """Check the layouts that a run asks for."""
    json: bool = False
    """Print only the verdict."""


def _layout(argv: Sequence[str]) -> int:
    from pathlib import Path

    from titan_exp.config.command_line.output import answer
    from titan_exp.config.command_line.terminal import Terminal
    from titan_exp.config.devices import offered_devices
    from titan_exp.config.errors.user_error import UserError
    from titan_exp.config.hydra.compose import compose
    from titan_exp.config.layout.resolved_layout import resolve_layout
    from titan_exp.config.schema.typed_config import to_experiment
    from titan_exp.doctor.layout.cases import asked_axes
    from titan_exp.launch.memory_gate import layout_verdicts
    from titan_exp.rules import check

    options, overrides = take_options(DoctorLayoutOptions, argv)
    if wrong := [word for word in overrides if "=" not in word]:
        raise UserError(f"{wrong[0]}: there is no such argument.\n{usage()}")
    experiment = to_experiment(compose(overrides))
    experiment = resolve_layout(check(experiment), offered_devices(experiment.cluster))
    if not asked_axes(experiment):
        remedy = "Add what it shall be checked in, for example parallelism.tp=2 parallelism.dp_shard=2"
        raise UserError(f"This run asks for one rank and one micro-batch, so there is nothing to compare. {remedy}")
    console = Terminal(stderr=options.json)
    (verdict,) = layout_verdicts([experiment], Path(experiment.paths.runs).expanduser() / ".cache", console.print)
    lines = [*(f"agrees with one rank: {name}" for name in verdict.agreeing), *verdict.notes]
    lines += [f"differs: {verdict.difference}"] if verdict.difference else []
    if options.json:
        answer(asdict(verdict))
    else:
        for line in lines:
            console.print(line, markup=False, soft_wrap=True)
    return 3 if verdict.difference else 0
