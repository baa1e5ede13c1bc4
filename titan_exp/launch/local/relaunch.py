"""Relaunch an existing run folder, for `retry` and concurrent local runs.

`python -m titan_exp.launch.local.relaunch RUN_FOLDER [--prediction]` launches its ranks on this machine and waits for
them; with the flag, plan.json is read from standard input.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from titan_exp.config.command_line.safe_output import safe_output
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.schema.typed_config import load_experiment
from titan_exp.launch.run_plan import RunPlan, plan_run
from titan_exp.tracking.run_folder.provenance_records import read_overrides
from titan_exp.tracking.run_folder.run_folder import RunFolder

PREDICTION_FLAG = "--prediction"


def plan_relaunch(folder: RunFolder, trust: bool = False) -> RunPlan:
    """Plan an existing run folder, which may have moved. Raises UserError if it is not a run, cannot start here, or is
    not trusted with the code that it names."""
    experiment = load_experiment(folder.config, trust)
    return plan_run(experiment, read_overrides(folder.overrides) or (), folder)


def main(arguments: Sequence[str]) -> int:
    """Launch a run folder's ranks and wait; returns the run's exit code."""
    from titan_exp.launch.local.run import run

    folder, *rest = arguments or [""]
    if not folder or rest not in ([], [PREDICTION_FLAG]):
        print(f"usage: python -m titan_exp.launch.local.relaunch RUN_FOLDER [{PREDICTION_FLAG}]", file=sys.stderr)
        return UserError.exit_code
    safe_output("utf-8", raw=True)
    prediction = sys.stdin.read() if rest else None
    try:
        return run(replace(plan_relaunch(RunFolder(Path(folder)), trust=True), prediction=prediction)).exit_code
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
