"""Batch scripts: golden text, bash syntax, and signal handling."""

import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.config.composing import experiment
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.launch.code_snapshot import CodeSnapshot
from titan_exp.launch.run_plan import RunPlan
from titan_exp.launch.slurm.script import Script, render
from titan_exp.launch.slurm.submit import _without_outer_jobs, group_by_resources, resources_of
from titan_exp.tracking.run_folder.run_folder import RunFolder, shown_state

GOLDEN = Path(__file__).parent / "golden"
SITE = [
    "cluster=slurm_h100",
    "cluster.account=my_group",
    "cluster.qos=normal",
    "cluster.constraint=ib",
    "cluster.reservation=friday",
    "cluster.exclude=node7",
    "cluster.setup=['module load cuda', 'ulimit -n 65536']",
    "+cluster.environment={NCCL_DEBUG:WARN,WORDS:'two words'}",
    "cluster.sbatch_args=['--nice=100']",
    "cluster.srun_args=['--cpu-bind=none']",
]
CASES = {
    "one_gpu": ["cluster=slurm"],
    "two_nodes": ["cluster=slurm_h100", "parallelism.dp_shard=16"],
    "site": [*SITE, "parallelism.dp_shard=8"],
    "cpu": ["cluster=slurm", "cluster.device=cpu", "cluster.processes_per_node=4", "parallelism.dp_shard=8"],
    "pyxis": [
        "cluster=slurm_h100",
        "cluster.container_image=/i/torch.sqsh",
        "cluster.container_mounts=['/data:/data']",
    ],
    "apptainer": ["cluster=slurm", "cluster.container_image=/i/torch.sif", "cluster.container_runtime=apptainer"],
    "chain": ["cluster=slurm", "cluster.requeue=chain"],
    "never": ["cluster=slurm", "cluster.requeue=never"],
}


def planned(*overrides: str) -> RunPlan:
    run = resolve_layout(experiment("model=llama_debug", "parallelism.dp_shard=1", *overrides), 1)
    return RunPlan(run, (), "0123456789ab", "ba9876543210", RunFolder("/runs/x/0123456789ab"))


def script(*overrides: str) -> Script:
    plan = planned(*overrides)
    return Script(
        name="x-0123456789ab",
        token="feedbeefcafe",
        resources=resources_of(plan),
        snapshot=CodeSnapshot("/runs/.code/0011223344556677", None, ()),
        python="/venv/bin/python",
        import_path=["/home/me/project"],
        folder=str(plan.folder.path),
        submission="/runs/.slurm/feedbeefcafe",
        runs="/runs",
    )


@pytest.mark.parametrize("case", CASES)
def test_golden_text(case: str, golden: Callable[[Path, str], None]):
    golden(GOLDEN / f"{case}.sh", render(script(*CASES[case])))


def test_golden_text_of_an_array(golden: Callable[[Path, str], None]):
    one = script("cluster=slurm_h100", "cluster.array_limit=8")
    golden(GOLDEN / "array.sh", render(replace(one, name="x", folder="/runs/.slurm/feedbeefcafe", array=16)))


def test_no_stale_golden_text():
    assert {path.stem for path in GOLDEN.iterdir()} == {*CASES, "array"}


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.sh")), ids=lambda path: path.stem)
def test_bash_can_read_it(path: Path):
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False).stderr == ""


def test_runs_with_equal_resources_share_an_array():
    plans = [planned("cluster=slurm", f"parallelism.tp={tp}") for tp in (1, 2, 1, 4)]
    assert [[plans.index(plan) for plan in group] for group in group_by_resources(plans)] == [[0, 2], [1], [3]]


def fake_cluster(folder: Path, srun: str, after: int) -> dict[str, str]:
    """Folder of fake SLURM programs, for the script's own logic."""
    programs = {"srun": srun, "scontrol": f'echo "$@" >> {folder}/said', "python": f"exit {after}"}
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node[1-2]"}


def script_in(folder: Path) -> Script:
    one = script("cluster=slurm")
    return replace(one, python=f"{folder}/python", folder=str(folder / "run"), submission=str(folder))


def make_run(path: Path, token: str):
    path.mkdir()
    (path / "config.yaml").touch()
    RunFolder(path).add_attempt(world_size=1, hosts=(), token="0123456789ab")
    RunFolder(path).add_attempt(world_size=1, hosts=(), token=token)


def run_script(folder: Path, one: Script, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (folder / "job.sh").write_text(render(one))
    (folder / "slurm-12.out").touch()
    return subprocess.run(
        ["bash", str(folder / "job.sh")], env=environment, capture_output=True, text=True, timeout=30, check=False
    )


@pytest.mark.parametrize(("after", "code", "said"), [(0, 0, ""), (1, 1, ""), (130, 130, ""), (85, 0, "requeue 12\n")])
def test_exit_code_of_the_script(tmp_path: Path, after: int, code: int, said: str):
    """A signal while srun runs writes the stop flag, and the script still waits for srun."""
    environment = fake_cluster(tmp_path, 'kill -USR2 "$PPID"; sleep 0.5; echo srun is over; exit 3', after)
    one = script_in(tmp_path)
    make_run(tmp_path / "run", "feedbeefcafe")
    done = run_script(tmp_path, one, environment)
    said_first, *others = done.stdout.splitlines()
    assert said_first.startswith("titan_exp: job 12, start 0 on node[1-2], ")
    assert (done.returncode, others, done.stderr) == (code, ["srun is over"], "")
    assert (tmp_path / "run" / "stop").read_text().startswith("SLURM is about to end the job")
    assert (tmp_path / "said").read_text() if said else not (tmp_path / "said").exists()


@pytest.mark.parametrize(
    ("left", "reason"),
    [
        (None, "SLURM is about to end the job (time limit, or preemption)\n"),
        (100, "SLURM is about to end the job (time limit)\n"),
        (9000, "SLURM preempted the job before its time limit\n"),
    ],
)
def test_reason_of_a_signal_by_the_time_left(tmp_path: Path, left: int | None, reason: str):
    environment = fake_cluster(tmp_path, 'kill -USR2 "$PPID"; sleep 0.5', 0)
    if left is not None:
        environment["SLURM_JOB_END_TIME"] = str(round(time.time()) + left)
    make_run(tmp_path / "run", "feedbeefcafe")
    assert run_script(tmp_path, script_in(tmp_path), environment).stderr == ""
    assert (tmp_path / "run" / "stop").read_text() == reason
    assert shown_state("preempted", reason) == ("preempted" if left == 9000 else "stopped")


@pytest.mark.parametrize(
    ("token", "words"),
    [(None, "the run folder was deleted or moved, so job 12 ends"), ("feedbeefcafe_1", "this run was started anew")],
)
def test_job_of_another_run_folder_ends_at_once(tmp_path: Path, token: str | None, words: str):
    environment = fake_cluster(tmp_path, f"touch {tmp_path}/started", 0)
    if token is not None:
        make_run(tmp_path / "run", token)
    done = run_script(tmp_path, script_in(tmp_path), environment)
    assert (done.returncode, done.stderr) == (2, "")
    assert words in done.stdout
    assert not (tmp_path / "started").exists()
    assert (tmp_path / "run").exists() == (token is not None)


def test_log_has_a_second_name_in_the_run_folder(tmp_path: Path):
    environment = fake_cluster(tmp_path, "true", 0)
    make_run(tmp_path / "run", "feedbeefcafe")
    for _ in range(2):  # a requeued job appends
        assert run_script(tmp_path, script_in(tmp_path), environment).returncode == 0
    assert (tmp_path / "run" / "logs" / "slurm-12.out").samefile(tmp_path / "slurm-12.out")


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ([], {"TIMELIMIT", "MEM_PER_CPU", "ACCOUNT", "EXCLUSIVE", "CPUS_PER_GPU"}),
        (["cluster.time_limit=10", "cluster.account=mine"], {"MEM_PER_CPU", "EXCLUSIVE", "CPUS_PER_GPU"}),
        (["cluster.memory_gb=0"], {"TIMELIMIT", "ACCOUNT", "EXCLUSIVE", "CPUS_PER_GPU"}),
        (["cluster.sbatch_args=['--exclusive=user']"], {"TIMELIMIT", "MEM_PER_CPU", "ACCOUNT", "CPUS_PER_GPU"}),
        (["cluster.cpus_per_gpu=3"], {"TIMELIMIT", "MEM_PER_CPU", "ACCOUNT", "EXCLUSIVE"}),
        (["cluster.device=cpu"], {"TIMELIMIT", "MEM_PER_CPU", "ACCOUNT", "EXCLUSIVE", "CPUS_PER_GPU", "GPUS", "GRES"}),
    ],
)
def test_defaults_of_sbatch_count_for_open_keys(monkeypatch: pytest.MonkeyPatch, words: list[str], kept: set[str]):
    names = {"TIMELIMIT", "MEM_PER_CPU", "ACCOUNT", "EXCLUSIVE", "CPUS_PER_GPU", "GPUS", "GRES"}
    for name in (*names, "OUTPUT", "ARRAY_INX", "WAIT", "JOB_NAME", "NO_REQUEUE"):
        monkeypatch.setenv(f"SBATCH_{name}", "gpu:2" if name == "GRES" else "1")
    one = script("cluster=slurm", *words)
    assert {*_without_outer_jobs(one)} & {f"SBATCH_{name}" for name in kept} == set()
    rest = {f"SBATCH_{name}" for name in names - kept}
    assert rest < {*_without_outer_jobs(one)}
    monkeypatch.setenv("SBATCH_GRES", "nvme:1")
    assert "SBATCH_GRES" not in _without_outer_jobs(one)
