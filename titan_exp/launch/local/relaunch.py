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
from titan_exp.launch.run_plan import plan_relaunch
from titan_exp.tracking.run_folder.run_folder import RunFolder

PREDICTION_FLAG = "--prediction"


def main(arguments: Sequence[str]) -> int:
    """Launch a run folder's ranks and wait; returns the run's exit code."""
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
