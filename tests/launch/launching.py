"""Launches in their own process, as a user's are, with a fake trainer."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests import fast_hydra
from titan_exp.tracking.run_folder.run_folder import RunFolder

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT = 60.0
"""Seconds that anything here may take before the test fails."""


class Launch:
    """`launch` of a small model in `runs`, in a process group of its own, its ranks being `fake_ranks.<main>`."""

    def __init__(self, runs: Path, main: str, *overrides: str, **environment: str) -> None:
        arguments = ["model=llama_debug", f"paths.runs={runs}", "experiment.name=x", *overrides]
        self.runs = runs
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.launch.launching", *arguments],
            env=launch_environment(main, **environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=runs,
            start_new_session=True,
        )

    @property
    def folder(self) -> RunFolder:
        """The only run folder."""
        (path,) = (path for path in (self.runs / "x").iterdir() if not path.name.startswith("."))
        return RunFolder(path)

    def wait_for(self, *names: str) -> RunFolder:
        """Wait until the run folder has these files."""
        wait_until(lambda: any(all((path / name).exists() for name in names) for path in self.runs.glob("x/[!.]*")))
        return self.folder

    def finish(self) -> tuple[int, str, str]:
        """Wait for the end; returns exit code, standard output, standard error."""
        try:
            out, err = self.process.communicate(timeout=LIMIT)
        finally:
            self.kill()
        return self.process.returncode, out, err

    def kill(self) -> None:
        """Kill the launcher and all ranks."""
        for process in ranks_of(self.runs):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.environ().get("TITAN_EXP_LAUNCHER") == str(self.process.pid):
                    process.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=LIMIT)


def launch(runs: Path, main: str, *overrides: str, **environment: str) -> tuple[int, str, str]:
    """Launch and wait; returns exit code, standard output, standard error."""
    return Launch(runs, main, *overrides, **environment).finish()


def launch_environment(main: str, **changes: str) -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TITAN_EXP_", "SUBMITIT_"))}
    fake = {"TITAN_EXP_RANK_MAIN": f"tests.launch.fake_ranks.{main}", "PYTHONPATH": str(REPOSITORY)}
    return {**environment, **fake, **changes}


def start(rank_main: str, *words: str) -> subprocess.Popen[str]:
    """Start the command line in its own session, with a stand-in for ranks."""
    return subprocess.Popen(
        [sys.executable, "-m", "titan_exp", *words],
        env=launch_environment(rank_main),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ranks_of(runs: Path) -> list[psutil.Process]:
    """Live controllers and ranks of all runs below a folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        ours = "submitit" in line or "titan_exp.launch.local.ranks" in line
        if ours and str(runs) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def seen(folder: RunFolder, rank: int) -> dict[str, Any]:
    """What a rank found in its process."""
    return json.loads((folder.path / f"seen-{rank}.json").read_text())


def wait_until(condition: Callable[[], bool], limit: float = LIMIT) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


def main(overrides: list[str]) -> int:
    """What `titan-exp train` does with its overrides."""
    from titan_exp.config.command_line.output import safe_output
    from titan_exp.config.errors.user_error import UserError
    from titan_exp.config.hydra.compose import compose
    from titan_exp.config.schema.typed_config import to_experiment
    from titan_exp.launch.local.executor import run
    from titan_exp.launch.run_plan import plan_run

    fast_hydra.install()
    safe_output()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run(plan_run(to_experiment(compose(overrides)), overrides)).exit_code
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
