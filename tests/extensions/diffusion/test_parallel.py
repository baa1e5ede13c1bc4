"""A diffusion transformer under data parallelism, recomputation and compilation: loss, unclipped gradient norm and
every gradient of one device."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.config.composing import experiment
from tests.parallel.test_meta_init import CPU
from tests.ranks import run_ranks
from titan_exp.config.layout.resolved_layout import ResolvedLayout, resolve_layout
from titan_exp.extensions.diffusion import spec as diffusion
from titan_exp.extensions.diffusion.samples import grid_positions
from titan_exp.optim.grad_clip import global_grad_norm
from titan_exp.parallel.fsdp import set_gradient_sync
from titan_exp.parallel.mesh import build_mesh
from titan_exp.trainer.distributed import joined_process_group
from titan_exp.trainer.train_state import BuiltModel

TEXT, ROWS, COLUMNS, SEQUENCES = 16, 4, 6, 4


def sequences() -> dict[str, Tensor]:
    """Inputs of the global batch and the velocities to predict."""
    random = torch.Generator().manual_seed(0)
    shapes = {"image": (ROWS * COLUMNS, 16), "target": (ROWS * COLUMNS, 16), "text": (TEXT, 32), "pooled": (24,)}
    drawn = {name: torch.randn(SEQUENCES, *shape, generator=random) for name, shape in shapes.items()}
    times, guidance = torch.rand(2, SEQUENCES, generator=random)
    return {**drawn, "times": times, "guidance": 1 + 4 * guidance}


def gradients(words: tuple[str, ...], world: int) -> tuple[float, float, dict[str, Tensor]]:
    """Mean squared error of the global batch in micro-batches of one, the norm of its gradients, and they."""
    plain = diffusion._linear

    def never_zero(*shape: Any, zero: bool = False, **how: Any) -> Any:
        return plain(*shape, **how)

    # Zeros would hide most gradients. The rank ends with this job.
    diffusion._linear = never_zero
    run = resolve_layout(experiment("model=flux_debug", "training.seq_len=40", "cluster.device=cpu", *words), world)
    with joined_process_group(CPU):
        layout = ResolvedLayout.of(run)
        mesh = build_mesh(layout.parallelism, CPU)
        built = BuiltModel(run, layout, mesh)
        built.init_weights()
        whole = sequences()
        total, count = torch.zeros(()), whole["target"].numel()
        rows = range(mesh.dp_rank, SEQUENCES, mesh.dp_degree)
        batches = [{name: tensor[row : row + 1] for name, tensor in whole.items()} for row in rows]
        for number, batch in enumerate(batches):
            set_gradient_sync(built.module, last=number == len(batches) - 1)
            target = batch.pop("target")
            velocity = built.module(**batch, positions=grid_positions(TEXT, ROWS, COLUMNS))
            loss = (velocity.float() - target).square().sum() / count
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        norm = global_grad_norm(built.module.parameters(), mesh.pp_group)
        found = {name: _whole(weight.grad) for name, weight in built.module.named_parameters()}
        return float(total), float(norm), found


def _whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


@pytest.fixture(scope="module")
def one_device() -> tuple[float, float, dict[str, Tensor]]:
    return run_ranks(1, gradients, (), 1)[0]


@pytest.mark.parametrize(
    "words",
    [
        "parallelism.dp_shard=2",
        "parallelism.dp_replicate=2 parallelism.dp_shard=1 activation_checkpoint=full",
        pytest.param(
            "parallelism.dp_shard=2 activation_checkpoint=selective compile=blocks compile.backend=aot_eager",
            marks=pytest.mark.night,
        ),
    ],
)
def test_gradients_are_those_of_one_device(words: str, one_device: tuple[float, float, dict[str, Tensor]]):
    loss, norm, expected = one_device
    for found_loss, found_norm, found in run_ranks(2, gradients, tuple(words.split()), 2):
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert found_norm == pytest.approx(norm, rel=1e-5)
        for name, gradient in expected.items():
            assert gradient.norm() > 0, name
            assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm(), name
