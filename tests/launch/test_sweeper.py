"""Sweeps from the command line: all points are checked first, then run one after another."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.launch.launching import LIMIT, launch_environment, ranks_of, wait_until
from titan_exp.cli.main import main
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.launch.executor import Submission, SubmitOptions
from titan_exp.launch.run_plan import RunPlan, create_run_folder
from titan_exp.launch.slurm.executor import SlurmExecutor
from titan_exp.launch.sweep.sweeper import points
from titan_exp.tracking.run_folder.run_folder import RunFolder


def start(runs: Path, main: str, *overrides: str) -> subprocess.Popen[str]:
    arguments = ["-m", "model=llama_debug", f"paths.runs={runs}", *overrides]
    return subprocess.Popen(
        [sys.executable, "-m", "titan_exp", "train", *arguments],
        env=launch_environment(main),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    return process.returncode, out, err


def expand(*overrides: str) -> list[tuple[tuple[str, ...], str]]:
    found = points(OverridesParser.create().parse_overrides(list(overrides)))
    return [(point.overrides, point.label) for point in found]


def test_points_are_every_combination() -> None:
    assert expand("a=1,2", "model=x", "b=3,4") == [
        (("a=1", "model=x", "b=3"), "a=1 b=3"),
        (("a=1", "model=x", "b=4"), "a=1 b=4"),
        (("a=2", "model=x", "b=3"), "a=2 b=3"),
        (("a=2", "model=x", "b=4"), "a=2 b=4"),
    ]
    assert [overrides for overrides, _ in expand("a=range(1,4)")] == [("a=1",), ("a=2",), ("a=3",)]
    assert [overrides for overrides, _ in expand("+a=choice(x,y)", "~b")] == [("+a=x", "~b"), ("+a=y", "~b")]
    assert [overrides for overrides, _ in expand("a=[1,2],[3]")] == [("a=[1,2]",), ("a=[3]",)]
    assert len(expand("a=1")) == 1


def test_objects_of_one_key_are_merged_as_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    typed = ["+data.options={a: 1, b: 1}", "data.options={b: 2}", "+data.options={c: {d: 3}}", "training.steps=1"]
    words = ["model=llama_debug", "plan.gate=off", *typed, "training.steps=2"]
    once = composed(words)
    assert (once.data.options, once.training.steps) == ({"a": 1, "b": 2, "c": {"d": 3}}, 2)
    for swept in ("optimizer.lr=1e-3,2e-3", "data.options={b: 3},{b: 4}"):
        found = [composed([*overrides]) for overrides, _ in expand(*words, swept)]
        assert [run.data.options for run in found] == [
            {**once.data.options, "b": run.data.options["b"]} for run in found
        ]
        assert {run.training.steps for run in found} == {2}
    assert [run.data.options["b"] for run in found] == [3, 4]


def composed(words: Sequence[str]) -> Experiment:
    return to_experiment(compose(list(words)))


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("a=1,2", "a=3,4"), "a=1,2,3,4"),
        (("a=1,2", "b=1", "+a=range(3,5)"), "a=1,2,range(3,5)"),
        (("a=1,2", "a=3"), "a=1,2"),
    ],
)
def test_a_key_is_swept_once(words: tuple[str, ...], remedy: str) -> None:
    with pytest.raises(UserError, match=r"already sweeps this key") as caught:
        expand(*words)
    assert str(caught.value).endswith(f"Give all its values at once: {remedy}")
    if "range" not in remedy:
        expand(remedy)
    assert [overrides for overrides, _ in expand("a=3", "a=1,2")] == [("a=3", "a=1"), ("a=3", "a=2")]


def test_a_scheduler_gets_all_points_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted: list[list[RunPlan]] = []
    required: list[int] = []

    class Scheduler(SlurmExecutor):
        def require(self, plans: Sequence[RunPlan]) -> None:
            assert not submitted, "asked before anything is submitted"
            required.append(len(plans))

        def submit(self, plans: Sequence[RunPlan], options: SubmitOptions) -> list[Submission]:
            submitted.append([*plans])
            for plan in plans:
                create_run_folder(plan)
            return [Submission(plan, "submitted", job_id=str(number)) for number, plan in enumerate(plans)]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("titan_exp.launch.sweep.sweeper.executor_for", lambda kind: {"slurm": Scheduler(kind)}[kind])
    assert main(["sweep", "parallelism_degrees", "size=cluster", "cluster.nodes=2", "cluster.time_limit=1:30:00"]) == 0
    ((first, *others),) = submitted
    assert required == [7]
    layout = ResolvedLayout.of(first.experiment)
    assert (len(others), layout.world_size, layout.nodes) == (6, 16, 2)
    assert (len({plan.run_id for plan in submitted[0]}), len({plan.experiment_id for plan in submitted[0]})) == (7, 1)
    assert {plan.run_id in plan.folder.code.read_text() for plan in submitted[0]} == {True}
    said, asks = capsys.readouterr().out, "\nThis asks for 7 × 16 GPUs × 1:30:00 = 168.0 GPU-hours.\n"
    assert "titan-exp status parallelism_degrees_cluster" in said
    assert asks in said
    monkeypatch.setattr("titan_exp.launch.run_status.executor_for", lambda kind: {}[kind])
    words = ["cluster.nodes=2", "cluster.time_limit=1:30:00", "--dry-run"]
    assert main(["sweep", "parallelism_degrees", "size=cluster", *words]) == 0
    assert f"7 to start.{asks}" in capsys.readouterr().out


def test_skip_leaves_out_impossible_points(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "-m", "model=llama_debug", "cluster.device=cpu", "parallelism.tp=1,8", "--dry-run"]
    assert main(words) == 2
    assert "nothing has started" in capsys.readouterr().err
    assert main([*words, "--skip"]) == 0
    out = capsys.readouterr().out
    assert "1 to start, 1 skipped." in out
    assert "parallelism.tp=8: 8 ranks cannot share 4 query heads" in out


def test_a_sweep_of_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "-m", "model=llama_debug", "cluster.device=cpu", "--dry-run"]
    assert main([*words, "training.seq_len=64"]) == 0
    assert "-m sweeps nothing here, so this is one run" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "training.seq_len=64,128"]) == 0
    assert "sweeps nothing" not in capsys.readouterr().out


def test_key_that_one_model_lacks_is_explained_by_point(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=llama_debug,qwen3_moe_debug", "model.moe.balance.coefficient=1e-3", "cluster.device=cpu"]
    assert main(["train", "-m", *words, "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "1 point of the sweep cannot run" in said
    assert "model=llama_debug does not have this key\n" in said
    assert "use it with model=deepseek_debug" in said
    assert "+model" not in said


def test_repeated_reading_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    seeds = ["parallelism.dp_replicate=3", "training.global_batch_size=12", "experiment.seed=0,1", "--dry-run"]
    assert main(["train", "-m", "model=llama_debug", "cluster.device=cpu", "data.streaming=true", *seeds]) == 0
    assert capsys.readouterr().out.count("Use data.virtual_shards=63 or 66 to read it once") == 1


def test_interval_is_refused() -> None:
    with pytest.raises(UserError, match="range"):
        expand("a=interval(0,1)")


def test_sweep_continues_after_a_failure_and_ends_with_a_table(tmp_path: Path) -> None:
    code, out, err = finish(start(tmp_path, "die_unless_lucky", "training.steps=2,3,2", "experiment.seed=0,1"))
    assert code == 1
    assert "seed 1 is unlucky" in err
    assert len(list((tmp_path / "first").iterdir())) == 4
    table = out[out.rindex("validation loss") :].splitlines()[1:]
    states = [line.split()[3] for line in table[:4]]
    assert states == ["done", "failed", "done", "failed"]
    assert table[0].startswith("training.steps=2 experiment.seed=0")
    assert "1.5000" in table[0]
    assert "2 further points repeat a run" in table[4]

    # Once more: only what failed is started.
    code, out, _ = finish(start(tmp_path, "succeed", "training.steps=2,3", "experiment.seed=0,1"))
    assert code == 0
    assert out.count("already done") == 2
    attempts = sorted(len(RunFolder(path).read_attempts()) for path in (tmp_path / "first").iterdir())
    assert attempts == [1, 1, 2, 2]


def test_nothing_starts_if_one_point_cannot_run(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    process = start(runs, "succeed", "training.steps=2", "parallelism.dp_shard=1,3", "optimizer.lr=1e-3,-1")
    code, _, err = finish(process)
    assert code == 2
    assert "Traceback" not in err
    assert "3 points" in err
    assert "[parallelism.dp_shard=3 optimizer.lr=0.001]" in err
    assert "[parallelism.dp_shard=1 optimizer.lr=-1]" in err
    assert "training.global_batch_size" in err
    assert not runs.exists()


def test_ctrl_c_stops_the_sweep_and_leaves_the_rest(tmp_path: Path) -> None:
    process = start(tmp_path, "obey_stop", "experiment.seed=0,1")
    wait_until(lambda: any(tmp_path.glob("first/*/seen-0.json")))
    os.killpg(process.pid, signal.SIGINT)
    code, out, _ = finish(process)
    assert code == 130
    assert "1 stopped, 1 new" in out, "as status says"
    assert len(list((tmp_path / "first").iterdir())) == 1
    assert ranks_of(tmp_path) == []
