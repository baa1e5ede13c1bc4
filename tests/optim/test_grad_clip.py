import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.ranks import run_ranks
from titan_exp.optim.grad_clip import global_grad_norm, scale_gradients
from titan_exp.trainer.distributed import joined_process_group


def parameters_with_gradients() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((5, 3), (7,), (4, 4))]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return made


def test_norm_is_that_of_all_gradients_together():
    made = parameters_with_gradients()
    together = torch.cat([parameter.grad.flatten() for parameter in made if parameter.grad is not None])
    assert float(global_grad_norm(made)) == pytest.approx(float(together.norm()), rel=1e-6)


def test_a_generator_is_enough():
    made = parameters_with_gradients()
    assert float(global_grad_norm(p for p in made)) == float(global_grad_norm(made))


def test_gradients_above_the_limit_are_scaled_to_it_and_others_left_alone():
    made = parameters_with_gradients()
    norm = global_grad_norm(made)
    scale_gradients(made, norm, max_norm=float(norm) / 4)
    assert float(global_grad_norm(made)) == pytest.approx(float(norm) / 4, rel=1e-5)
    before = [parameter.grad.clone() for parameter in made if parameter.grad is not None]
    scale_gradients(made, global_grad_norm(made), max_norm=1e6)
    assert all(torch.equal(old, new.grad) for old, new in zip(before, made, strict=True) if new.grad is not None)


def test_no_gradients_is_zero():
    without = [torch.nn.Parameter(torch.ones(2))]
    assert float(global_grad_norm(without)) == 0
    scale_gradients(without, torch.zeros(()), max_norm=1.0)
    assert without[0].grad is None


def test_without_gradients_the_norm_is_where_the_parameters_are():
    """A pipeline stage of a GPU that has none sends its 0 as the others send theirs."""
    assert global_grad_norm([torch.nn.Parameter(torch.ones(2, device="meta"))]).device.type == "meta"


def sharded_norms() -> tuple[float, float]:
    with joined_process_group(torch.device("cpu")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        placements = [(Shard(0), Shard(0)), (Replicate(), Shard(0)), (Replicate(), Replicate())]
        sharded = []
        for parameter, placement in zip(parameters_with_gradients()[:2], placements, strict=False):
            made = torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, placement))
            made.grad = distribute_tensor(parameter.grad, mesh, placement)  # type: ignore[arg-type]  # set above
            sharded.append(made)
        sharded.append(parameters_with_gradients()[2])
        before = float(global_grad_norm(sharded))
        scale_gradients(sharded, global_grad_norm(sharded), max_norm=0.5)
        after = float(global_grad_norm(sharded))
        dist.barrier()
        return before, after


def test_norm_over_mixed_meshes_counts_every_element_once():
    """Sharded over both axes (unevenly), over one, and a plain tensor beside them."""
    expected = float(global_grad_norm(parameters_with_gradients()))
    for before, after in run_ranks(4, sharded_norms):
        assert before == pytest.approx(expected, rel=1e-6)
        assert after == pytest.approx(0.5, rel=1e-5)
