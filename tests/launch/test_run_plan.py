"""Run folder: published atomically, complete, without credentials."""

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.launch.launching import LIMIT, launch_environment
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import load_experiment, to_experiment
from titan_exp.launch.provenance import read_environment
from titan_exp.launch.run_plan import RunPlan, create_run_folder, plan_run, refresh_snapshot, run_id
from titan_exp.tracking.run_folder.run_folder import RunState

TOKEN = "hf_" + "aBcDeFgHiJkLmNoPqRsT"


def planned(runs: Path, *overrides: str) -> RunPlan:
    typed = ["model=llama_debug", f"paths.runs={runs}", *overrides]
    return plan_run(to_experiment(compose(typed)), typed)


def test_planning_writes_nothing(tmp_path: Path) -> None:
    made = planned(tmp_path / "runs", "experiment.name=idea")
    assert not (tmp_path / "runs").exists()
    assert made.folder.path == tmp_path / "runs" / "idea" / made.run_id
    assert made.experiment.parallelism.dp_shard == 1  # resolved


def test_all_violations_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        planned(tmp_path, "model.kv_heads=3", "training.fp32_modules=[head]", "parallelism.dp_shard=3")
    fields = {violation.field for violation in caught.value.violations}
    assert {"model.kv_heads", "training.fp32_modules", "training.global_batch_size"} <= fields


def test_run_folder_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    tmp_path.chmod(0o2775)  # a folder of a group's runs
    made = planned(tmp_path, "experiment.tags=['a: b',\"ü\"]", "training.steps=7")
    create_run_folder(made)
    folder = made.folder
    assert load_experiment(folder.config) == made.experiment
    assert run_id(load_experiment(folder.config)) == made.run_id
    import yaml

    assert yaml.safe_load(folder.overrides.read_text()) == list(made.overrides)
    code = json.loads(folder.code.read_text())
    assert (code["run_id"], code["experiment_id"]) == (made.run_id, made.experiment_id)
    assert code["version"]
    assert folder.diff.exists()
    env = json.loads(folder.env.read_text())
    assert env["torch"] == env["packages"]["torch"]
    assert env["python"].startswith("3.")
    assert env["cores"] >= 1
    assert env["memory_gib"] > 0
    assert env["environment"]["NCCL_DEBUG"] == "WARN"
    assert "HF_TOKEN" not in env["environment"]
    state = folder.read_state()
    assert state is not None
    assert (state.state, state.attempt) == ("pending", 0)
    assert [path.name for path in folder.path.parent.iterdir()] == [made.run_id]
    assert folder.path.stat().st_mode & stat.S_ISGID
    assert not any(TOKEN in path.read_text() for path in folder.path.iterdir())


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o2755), (0o002, 0o2775), (0o077, 0o2700)])
def test_a_run_folder_is_no_wider_than_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    made = planned(tmp_path)
    made.folder.path.parent.mkdir()
    made.folder.path.parent.chmod(0o2775)
    before = os.umask(umask)
    try:
        create_run_folder(made)
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.folder.path.stat().st_mode) == mode


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to other users")
def test_a_foreign_folder_of_runs_is_refused_unless_the_run_is_done(tmp_path: Path) -> None:
    made = planned(tmp_path)
    create_run_folder(made)
    os.chown(made.folder.path.parent, 1, 1)
    with pytest.raises(UserError, match="belongs to daemon"):
        create_run_folder(made)
    made.folder.write_state(RunState("done", 1, 1.0, 1, None))
    assert create_run_folder(made)


def test_no_secret_reaches_the_folder(tmp_path: Path) -> None:
    typed = ["model=llama_debug", f"paths.runs={tmp_path}", f"+data.options.api_key={TOKEN}"]
    with pytest.raises(UserError, match=r"data\.options\.api_key") as caught:
        plan_run(to_experiment(compose(typed)), typed)
    assert TOKEN not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    # What was typed need not be what is in the configuration.
    made = plan_run(to_experiment(compose(typed[:2])), [*typed, f"hydra.job.env_set.X={TOKEN}"])
    create_run_folder(made)
    assert TOKEN not in made.folder.overrides.read_text()


def test_the_environment_is_read_without_torch() -> None:
    script = (
        "import sys; import titan_exp.launch.local.executor;"
        "from titan_exp.launch.provenance import read_environment;"
        "assert read_environment()['torch']; assert 'torch' not in sys.modules and 'submitit' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=LIMIT)
    assert set(read_environment()) >= {"cpu", "gpus", "host", "packages"}


def test_committing_twice_changes_nothing(tmp_path: Path) -> None:
    made = planned(tmp_path)
    create_run_folder(made)
    before = {path.name: path.read_text() for path in made.folder.path.iterdir()}
    create_run_folder(planned(tmp_path, "tracking.log_every=3"))
    assert {path.name: path.read_text() for path in made.folder.path.iterdir()} == before


def test_concurrent_commits_create_one_folder(tmp_path: Path) -> None:
    plans = [planned(tmp_path) for _ in range(4)]
    errors: list[BaseException] = []

    def work(one: RunPlan) -> None:
        try:
            create_run_folder(one)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(plan,)) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert errors == []
    assert [path.name for path in (tmp_path / "first").iterdir()] == [plans[0].run_id]


def test_a_changed_configuration_is_refused(tmp_path: Path) -> None:
    made = planned(tmp_path)
    create_run_folder(made)
    made.folder.config.write_text(made.folder.config.read_text().replace("seed: 0", "seed: 1"))
    with pytest.raises(UserError, match="has changed"):
        create_run_folder(made)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    made = planned(tmp_path)
    made.folder.path.mkdir(parents=True)
    made.folder.metrics.touch()
    with pytest.raises(UserError, match="not a run"):
        create_run_folder(made)
    assert [path.name for path in made.folder.path.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    script = f"""
import resource, sys
from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.run_plan import create_run_folder
from tests.launch.test_run_plan import planned
from pathlib import Path
made = planned(Path({str(tmp_path)!r}) / "runs")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # the system refuses to write on, as on a full disk
try:
    create_run_folder(made)
except UserError as error:
    print(error)
"""
    answer = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=launch_environment("succeed"),
        check=True,
    )
    assert "Cannot write" in answer.stdout
    assert "paths.runs" in answer.stdout
    assert list(tmp_path.iterdir()) == []


def test_snapshot_of_the_previous_attempt_is_kept(tmp_path: Path) -> None:
    made = planned(tmp_path)
    create_run_folder(made)
    old = made.folder.config.read_text()
    other = planned(tmp_path, "tracking.log_every=3")
    refresh_snapshot(other, 1)
    assert load_experiment(other.folder.config) == other.experiment
    kept = made.folder.attempt_logs(1)
    assert (kept / "config.yaml").read_text() == old
    assert not (kept / "code.json").exists()  # it is the same


def test_initial_weights_need_not_exist_once_there_is_a_checkpoint(tmp_path: Path) -> None:
    source = tmp_path / "source" / "checkpoints" / "step-00000001"
    source.mkdir(parents=True)
    (source / ".metadata").touch()
    words = (f"checkpoint.initial={tmp_path / 'source'}",)
    begun = planned(tmp_path / "runs", *words)
    source.rename(tmp_path / "gone")
    with pytest.raises(UserError, match=r"checkpoint\.initial"):
        planned(tmp_path / "runs", *words)
    own = begun.folder.checkpoints / "step-00000002"
    own.mkdir(parents=True)
    (own / ".metadata").touch()
    assert planned(tmp_path / "runs", *words).run_id == begun.run_id
