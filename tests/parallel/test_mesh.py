"""Device mesh: its axes are the rows of one table, and its groups have the run's timeout."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.config.composing import experiment
from tests.ranks import run_ranks
from titan_exp.config.layout.axes import AXES, Axis
from titan_exp.parallel import mesh as module
from titan_exp.parallel.mesh import build_mesh
from titan_exp.trainer.distributed import joined_process_group

CPU = torch.device("cpu")
PARALLELISM = experiment("model=llama_debug", "parallelism.dp_shard=1").parallelism


def test_axes_are_those_of_the_table_and_fsdp_folds_its_own():
    with joined_process_group(CPU):
        mesh = build_mesh(PARALLELISM, CPU)
        assert mesh.world.mesh_dim_names == tuple(axis.name for axis in AXES)
        assert mesh.sharding.mesh_dim_names == ("pp", "dp_replicate", "fsdp", "tp")


def test_a_row_of_the_table_is_an_axis_of_both_meshes(monkeypatch: pytest.MonkeyPatch):
    row = Axis("ep", "experts", "all-to-all of tokens", "ep", lambda parallelism: 1)
    monkeypatch.setattr(module, "AXES", (*AXES[:-1], row, AXES[-1]))
    with joined_process_group(CPU):
        mesh = build_mesh(PARALLELISM, CPU)
        assert mesh.world["ep"].size() == mesh.sharding["ep"].size() == 1
        assert mesh.world.mesh_dim_names == ("pp", "dp_replicate", "dp_shard", "cp_across", "cp_within", "ep", "tp")


def _timeouts() -> dict[str, float]:
    """Timeouts in minutes of this rank's groups, by axis."""
    with joined_process_group(CPU, timeout=timedelta(minutes=77)):
        layout = experiment("model=qwen3_moe_debug", "parallelism.dp_shard=2", "parallelism.tp=2", "parallelism.ep=2")
        mesh = build_mesh(layout.parallelism, CPU, experts=True)
        assert mesh.experts is not None
        meshes = (mesh.world, mesh.sharding, mesh.experts)
        groups = {axis: each.get_group(axis) for each in meshes for axis in each.mesh_dim_names or ()}
        groups["cpu"] = mesh.cpu_group
        return {name: _timeout(group).total_seconds() / 60 for name, group in groups.items()}


def _timeout(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(CPU).options._timeout


def test_every_group_has_the_timeout_of_the_run():
    for found in run_ranks(4, _timeouts):
        assert set(found) > {"pp", "dp_shard", "fsdp", "tp", "ep", "cpu"}
        assert set(found.values()) == {77.0}
