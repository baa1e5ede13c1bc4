"""Device mesh: its axes are the rows of one table."""

import pytest
import torch

from tests.config.composing import experiment
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
    row = Axis("ep", "ep", lambda parallelism: 1, "experts", "all-to-all of tokens")
    monkeypatch.setattr(module, "AXES", (*AXES[:-1], row, AXES[-1]))
    with joined_process_group(CPU):
        mesh = build_mesh(PARALLELISM, CPU)
        assert mesh.world["ep"].size() == mesh.sharding["ep"].size() == 1
        assert mesh.world.mesh_dim_names == ("pp", "dp_replicate", "dp_shard", "cp_across", "cp_within", "ep", "tp")
