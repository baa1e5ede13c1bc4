"""Ephemeral local ranks: run a function on all ranks, with a temporary run folder."""

import json
import socket
import time
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.typed_config import to_yaml
from titan_exp.launch.local.ranks import LocalRanks
from titan_exp.launch.rank.main import RANK_MAIN
from titan_exp.launch.rank.rank_env import environment
from titan_exp.launch.signals import Interrupts
from titan_exp.launch.state.attempt_end import AttemptResult
from titan_exp.tracking.run_folder.files import temporary_folder
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState, write_atomically

POLL_INTERVAL = 0.05


def run_on_ranks(main: str, experiment: Experiment, request: Any) -> Any:
    """Call `main`, an import path, on all ranks of an experiment's layout; returns rank 0's response.

    Request and response are JSON values. Raises UserError if a rank raised one, RuntimeError with the traceback or log
    tail if a rank failed otherwise, and KeyboardInterrupt after a signal.
    """
    from titan_exp.trainer.distributed import REQUEST, RESPONSE

    with temporary_folder() as scratch:
        folder = RunFolder(scratch)
        write_atomically(folder.config, to_yaml(experiment), durable=False)
        write_atomically(folder.path / REQUEST, json.dumps(request), durable=False)
        layout = ResolvedLayout.of(experiment)
        attempt = folder.add_attempt(world_size=layout.world_size, hosts=[socket.gethostname()]).attempt
        folder.write_state(RunState("running", 0, time.time(), attempt, None))
        result = _run(main, LocalRanks(layout, folder, attempt))
        if result.exit_code == UserError.exit_code:
            raise UserError(result.detail.strip())
        if result.exit_code:
            raise RuntimeError(f"{result.detail.strip()}\n{result.reason}")
        return json.loads((folder.path / RESPONSE).read_text(encoding="utf-8"))


def _run(main: str, ranks: LocalRanks) -> AttemptResult:
    with environment({RANK_MAIN: main}), Interrupts() as interrupts:
        try:
            ranks.start()
            while not ranks.poll():
                if interrupts.first is not None:
                    raise KeyboardInterrupt
                time.sleep(POLL_INTERVAL)
            return ranks.result()
        finally:
            ranks.close()
