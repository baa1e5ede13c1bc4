"""Measure what this machine can do."""

import os
from collections.abc import Sequence

from titan_exp.config.command_line.options import HELP
from titan_exp.doctor.usage import usage


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    if set(argv) & set(HELP):
        print(usage())
        return 0
    # As the launcher sets it for ranks; torch reads it at import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from titan_exp.doctor.machine import machine_command
    from titan_exp.launch.local.ranks import run_on_ranks

    return machine_command(argv, run_on_ranks)
