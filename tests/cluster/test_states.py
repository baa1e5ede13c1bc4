"""Every verb on a run in every state that SLURM brings about, and on runs whose folders have lost a part."""

import contextlib
import io
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.submitting import SMALL, Submitting
from titan_exp.cli.main import main
from titan_exp.tracking.run_folder.run_folder import RunFolder

HOLD = "cluster.sbatch_args=['--hold']"
READING = [
    ["status"],
    ["status", "--json"],
    ["show"],
    ["show", "--json"],
    ["show", "--plot"],
    ["logs"],
    ["compare"],
    ["generate", "prompt=Once"],
    ["evaluate"],
    ["convert", "to=torch", "out=exported"],
]
"""Verbs that change no run; each is given one."""
CHANGING = [["cancel"], ["retry"], ["cancel"]]
PARTS = (
    "state.json",
    "attempts.jsonl",
    "logs",
    "code.json",
    "env.json",
    "overrides.yaml",
    "nondefault.yaml",
    "config.yaml",
)


def made_states(cluster: Submitting, stand_in: Callable[[str], None]) -> dict[str, RunFolder]:
    """Runs in all states, by state."""

    def submit(seed: int, *words: str) -> RunFolder:
        plan = cluster.plan(f"experiment.seed={seed}", *words)
        cluster.submit(plan)
        return plan.folder

    stand_in("succeed")
    runs = {"done": submit(0), "queued": submit(1, HOLD), "refused": submit(2, "cluster.partition=nowhere")}
    runs |= {
        "forgotten": submit(3, HOLD),
        "cancelled": submit(4, HOLD),
        "planned": cluster.plan("experiment.seed=5").folder,
    }
    cluster.slurm.run("scancel", runs["forgotten"].read_attempts()[-1].job_id or "")
    cluster.backend.cancel([runs["cancelled"]], reason="test")
    stand_in("exit_7")
    runs["failed"] = submit(6)
    stand_in("obey_stop")
    runs["running"] = submit(7)
    runs["preempted"] = submit(8, "cluster.requeue=never")
    cluster.running(runs["running"], "seen-0.json")
    cluster.running(runs["preempted"], "seen-0.json")
    runs["preempted"].request_stop("test")
    cluster.ended(runs["done"], "done")
    cluster.ended(runs["failed"], "failed")
    cluster.ended(runs["preempted"], "preempted", "done")
    return runs


def typed(words: list[str], runs: Path) -> str | None:
    """The traceback of a command, if it ends in one."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main([*words, f"paths.runs={runs}"])
        assert code in (0, 1, 2, 85), f"exit code {code}: {said.getvalue()}"
        assert words[0] == "logs" or "Traceback" not in said.getvalue(), said.getvalue()  # a rank's may be in its log
    except Exception:
        return f"{' '.join(words)}\n{said.getvalue()}{traceback.format_exc(limit=-3)}"
    return None


@pytest.mark.slow
def test_every_verb_on_a_run_in_every_state(
    cluster: Submitting, stand_in: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    runs = made_states(cluster, stand_in)
    for part in PARTS:
        for state in ("done", "queued"):
            copy = runs[state].path.with_name(f"{state}-without-{part.partition('.')[0]}")
            shutil.copytree(runs[state].path, copy)
            gone = copy / part
            shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
            runs[copy.name] = RunFolder(copy)
    stand_in("succeed")
    names = [folder.path.name for folder in runs.values()]
    failures = [typed([*verb, name], cluster.runs) for name in names for verb in READING]
    failures += [typed(["diff", names[0], name], cluster.runs) for name in names]
    failures += [typed(["compare", *names], cluster.runs), typed(["status"], cluster.runs)]
    for name in names:
        failures += [typed([*verb, name], cluster.runs) for verb in CHANGING]
    failures += [typed(["train", *SMALL, f"experiment.seed={seed}"], cluster.runs) for seed in range(9)]
    found = [text for text in failures if text is not None]
    assert not found, "\n\n".join([f"{len(found)} of {len(failures)}", *found])
