"""Rules about jobs of a scheduler, and how many nodes a run asks for."""

import pytest

from tests.config.composing import experiment
from titan_exp.config.devices import offered_devices
from titan_exp.config.layout.resolved_layout import ResolvedLayout, resolve_layout
from titan_exp.rules import violations

SLURM = ["cluster=slurm", "model=llama_debug", "+experiment=smoke", "training.global_batch_size=64"]


@pytest.mark.parametrize(
    ("overrides", "field", "remedy"),
    [
        ([], "", ""),
        (["cluster.device=auto"], "cluster.device", "cluster.device=cuda"),
        (["cluster.gpus_per_node=null"], "cluster.gpus_per_node", "gpus_per_node=8"),
        (["cluster.time_limit=1h"], "cluster.time_limit", "24:00:00"),
        (["cluster.time_limit=1-12"], "", ""),
        (["cluster.time_limit=90"], "", ""),
        (["+cluster.environment={A-B:1}"], "cluster.environment", "letters"),
        (["cluster.srun_args=['mpi pmix']"], "cluster.srun_args", "--nice"),
        (["cluster.srun_args=['--export=NONE']"], "cluster.srun_args", """cluster.srun_args='["--export=ALL"]'"""),
        (["cluster.srun_args=['--export=A,B=1']"], "cluster.srun_args", '"--export=ALL,A,B=1"'),
        (["cluster.srun_args=['--export=ALL,B=1']"], "", ""),
        (["cluster.sbatch_args=['--nice=1']"], "", ""),
        (["cluster.sbatch_args=['--comment=mine']"], "cluster.sbatch_args", "set cluster.comment"),
        (["cluster.sbatch_args=['--comm=mine']"], "cluster.sbatch_args", "set cluster.comment"),
        (["cluster.sbatch_args=['-Jmine']"], "cluster.sbatch_args", "set experiment.name"),
        (["cluster.sbatch_args=['--array=0-3']"], "cluster.sbatch_args", "set cluster.array_limit"),
        (["cluster.sbatch_args=['--output=log']"], "cluster.sbatch_args", "leave it out"),
        (["cluster.sbatch_args=['--parsable']"], "cluster.sbatch_args", "leave it out"),
        (["cluster.sbatch_args=['-W']"], "cluster.sbatch_args", "leave it out"),
        (["cluster.sbatch_args=['--wrap=true']"], "cluster.sbatch_args", "leave it out"),
        (
            ["cluster.sbatch_args=['--gpus=8','--exclusive','--mem-per-cpu=4G','--wait-all-nodes=1','-w node1','-H']"],
            "",
            "",
        ),
        (["cluster.comment=project 42"], "", ""),
        (["cluster.stop_limit=300"], "cluster.stop_limit", "cluster.stop_limit below 300"),
        (["parallelism.dp_shard=4"], "", ""),
        (["parallelism.dp_shard=16"], "", ""),
        (["parallelism.tp=3", "parallelism.dp_shard=4"], "cluster.gpus_per_node", "8 or 16"),
        (["cluster.nodes=2"], "", ""),
        (["cluster.nodes=2", "parallelism.dp_shard=8"], "cluster.nodes", "cluster.nodes=null"),
        (["cluster.nodes=2", "parallelism.dp_shard=8"], "cluster.nodes", "parallelism.dp_shard=-1, which fills all 16"),
        (
            ["cluster.nodes=2", "parallelism.tp=8", "parallelism.pp=4"],
            "cluster.nodes",
            "lower parallelism.pp or parallelism.tp: their product 32 is above 16",
        ),
        (["cluster.nodes=2", "parallelism.pp=24"], "cluster.nodes", "lower parallelism.pp: 24 is above 16"),
        (["cluster.nodes=2", "parallelism.tp=3", "parallelism.dp_shard=8"], "cluster.nodes", "whose product is 16"),
        (["cluster.device=cpu", "cluster.processes_per_node=2", "parallelism.dp_shard=2"], "", ""),
        (
            ["cluster.device=cpu", "cluster.processes_per_node=3", "parallelism.dp_shard=4"],
            "cluster.processes_per_node",
            "processes_per_node=1 or 2",
        ),
    ],
)
def test_what_slurm_is_asked_for(overrides: list[str], field: str, remedy: str):
    found = [violation for violation in violations(experiment(*SLURM, *overrides)) if "cluster." in violation.field]
    assert [violation.field for violation in found] == ([field] if field else [])
    assert remedy in "".join(violation.remedy for violation in found)


@pytest.mark.parametrize("name", ["back\\slash", "new\nline", "it's\x1b[31m"])
def test_a_folder_that_a_script_cannot_name_is_refused(name: str):
    def paths(runs: str) -> list[str]:
        return ["paths.runs='" + runs.replace("'", r"\'") + "'"]

    (found,) = violations(experiment(*SLURM, *paths(f"/tmp/{name}")))
    assert (found.field, "backslash or a control character" in found.reason) == ("paths.runs", True)
    assert violations(experiment(*SLURM, found.remedy.removeprefix("use "))) == []
    assert violations(experiment("model=llama_debug", "+experiment=smoke", *paths(f"/tmp/{name}"))) == []


def test_another_scheduler_is_not_told_of_slurm():
    own = [*SLURM, "cluster.kind=tests.launch.own_executor.DetachedExecutor"]
    found = violations(experiment(*own, "cluster.device=auto"))
    assert [violation.field for violation in found] == ["cluster.device"]
    assert "the nodes of tests.launch.own_executor.DetachedExecutor" in found[0].reason
    assert not any("SLURM" in str(violation) for violation in found)
    assert violations(experiment(*own, "cluster.time_limit=1h", "cluster.sbatch_args=['--output=log']")) == []


@pytest.mark.parametrize(
    ("overrides", "world", "nodes"),
    [
        ([], 8, 1),
        (["cluster.nodes=2"], 16, 2),
        (["parallelism.dp_shard=1"], 1, 1),
        (["parallelism.tp=2", "parallelism.dp_shard=2"], 4, 1),
        (["parallelism.dp_shard=32"], 32, 4),
        (["cluster.device=cpu"], 1, 1),
        (["cluster.device=cpu", "parallelism.dp_shard=6"], 6, 1),
        (["cluster.device=cpu", "cluster.processes_per_node=2", "parallelism.dp_shard=6"], 6, 3),
    ],
)
def test_nodes(overrides: list[str], world: int, nodes: int):

    run = experiment(*SLURM, *overrides)
    resolved = resolve_layout(run, offered_devices(run.cluster))
    assert (ResolvedLayout.of(resolved).world_size, ResolvedLayout.of(resolved).nodes) == (world, nodes)
