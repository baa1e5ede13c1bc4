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
    from titan_exp.launch.rank.rank_env import waiting_threads

    # As the launcher sets them for ranks; torch reads them at import.
    os.environ |= waiting_threads()
    from titan_exp.doctor.machine import machine_command
    from titan_exp.launch.local.ranks import run_on_ranks

    return machine_command(argv, run_on_ranks)
