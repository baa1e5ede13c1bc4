"""Measure what this machine can do; with --numerics, find layers that a numeric recipe harms; with
--coordinates, check a parametrization."""

import os
from collections.abc import Sequence

from titan_exp.config.command_line.options import HELP
from titan_exp.doctor.usage import COORDINATES, MACHINE, NUMERICS


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    if set(argv) & set(HELP):
        print(NUMERICS if "--numerics" in argv else COORDINATES if "--coordinates" in argv else MACHINE)
        return 0
    if "--numerics" in argv:
        from titan_exp.doctor.numerics_command import doctor_command
        from titan_exp.launch.state.run_lookup import run_path

        return doctor_command(argv, run_path)
    if "--coordinates" in argv:
        from titan_exp.doctor.coordinates_command import doctor_command as coordinates_command

        return coordinates_command(argv)
    # As the launcher sets it for ranks; torch reads it at import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from titan_exp.doctor.machine import machine_command
    from titan_exp.launch.local.ephemeral_ranks import run_on_ranks

    return machine_command(argv, run_on_ranks)
