"""Runs as jobs of the tests' SLURM, with a fake trainer unless a test trains."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import stand_ins
from tests.cluster.slurm import Slurm
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.launch.executor import JobStatus, Submission, SubmitOptions
from titan_exp.launch.run_plan import RunPlan, plan_run
from titan_exp.launch.slurm.executor import SlurmExecutor
from titan_exp.tracking.run_folder.run_folder import Attempt, RunFolder

LIMIT = 90.0
"""Seconds that anything may take, on a busy machine, before the test fails."""
SMALL = ["model=llama_debug", "+experiment=smoke", "experiment.name=x", "cluster=slurm", "cluster.device=cpu"]


class Submitting:
    """What a user of the cluster does, with the runs below one folder."""

    def __init__(self, slurm: Slurm, runs: Path) -> None:
        self.slurm, self.runs, self.backend = slurm, runs, SlurmExecutor("slurm")
        self.said: list[str] = []

    def plan(self, *overrides: str) -> RunPlan:
        words = [*SMALL, f"paths.runs={self.runs}", *overrides]
        return plan_run(to_experiment(compose(words)), words)

    def submit(self, *plans: RunPlan) -> list[Submission]:
        return self.backend.submit(plans, SubmitOptions(echo=self.said.append))

    def submitted(self, *overrides: str) -> tuple[RunFolder, str]:
        """Submit one run; returns its folder and job."""
        (submission,) = self.submit(self.plan(*overrides))
        assert (submission.outcome, submission.reason) == ("submitted", None)
        assert submission.job_id is not None
        return submission.plan.folder, submission.job_id

    def status(self, folder: RunFolder) -> JobStatus:
        return self.backend.status([folder])[folder.path]

    def ended(self, folder: RunFolder, *states: str) -> str | None:
        """Wait until the run is in one of these states and its job is gone; returns the reason."""

        def status() -> bool:
            state = folder.read_state()
            return state is not None and state.state in states and self.status(folder).state == "gone"

        self.wait_until(status, lambda: self.story(folder))
        state = folder.read_state()
        assert state is not None
        return state.reason

    def running(self, folder: RunFolder, *names: str) -> None:
        """Wait until the run's folder holds these files, which its ranks write."""
        self.wait_until(lambda: all((folder.path / name).exists() for name in names), lambda: self.story(folder))

    def story(self, folder: RunFolder) -> str:
        texts = [path.read_text(errors="replace") for path in sorted(folder.path.rglob("logs/*.*"))]
        rows = [str(row) for row in folder.read_attempts()]
        return "\n".join([str(folder.read_state()), *rows, *texts, self.slurm.state()])

    def wait_until(self, status: Callable[[], bool], story: Callable[[], str]) -> None:
        deadline = time.monotonic() + LIMIT
        while not status():
            assert time.monotonic() < deadline, f"it took too long\n{story()}"
            time.sleep(0.2)


@pytest.fixture
def cluster(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submitting:
    monkeypatch.setenv("SLURM_CONF", str(slurm.config))
    return Submitting(slurm, tmp_path / "runs")


@pytest.fixture
def accounted(accounted_slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submitting:
    """The same where SLURM keeps accounts."""
    monkeypatch.setenv("SLURM_CONF", str(accounted_slurm.config))
    return Submitting(accounted_slurm, tmp_path / "runs")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets ranks run something of stand_ins.py, or of tests/launch/fake_ranks.py, in the place of the trainer."""

    def choose(name: str) -> None:
        module = "tests.cluster.stand_ins" if hasattr(stand_ins, name) else "tests.launch.fake_ranks"
        monkeypatch.setenv("TITAN_EXP_RANK_MAIN", f"{module}.{name}")

    return choose


def ends(folder: RunFolder) -> list[int | None]:
    return [row.exit for row in folder.read_attempts()]


def last(folder: RunFolder) -> Attempt:
    return folder.read_attempts()[-1]
