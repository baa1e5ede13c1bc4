"""AdamW with clipping in one pass: the formula in fp64, torch's fused AdamW after a clip, and their checkpoints."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.interpreted import DEVICES, needs_triton, run_kernels
from titan_exp.ops.adamw import adamw_update, bias_rates
from titan_exp.optim.adamw import FusedClipAdamW, LowPrecisionAdamW
from titan_exp.optim.grad_clip import clip_factor, global_grad_norm, scale_gradients
from titan_exp.trainer.distributed import joined_process_group

pytestmark = needs_triton

SHAPES = ((48, 65), (7,), (33, 40), (3, 5))
HOW = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8}
DECAY = 0.1
MAX_NORM = 0.5
ULP = 2**-23


def start(device: str) -> list[torch.nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=random).to(device)) for shape in SHAPES]


def gradients(step: int) -> list[torch.Tensor]:
    """Of very different sizes, so that some steps are clipped and others are not."""
    random = torch.Generator().manual_seed(step)
    size = 0.003 if step % 3 == 2 else 1.0
    return [
        torch.randn(shape, generator=random) * torch.randn(shape, generator=random).exp() * size for shape in SHAPES
    ]


def one_step(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], step: int) -> None:
    for parameter, gradient in zip(parameters, gradients(step), strict=True):
        value = gradient.to(parameter.device)
        parameter.grad = distribute_like(parameter, value) if isinstance(parameter, DTensor) else value
    norm = global_grad_norm(parameters)
    if isinstance(optimizer, FusedClipAdamW):
        optimizer.set_grad_scale(clip_factor(norm, MAX_NORM))
    else:
        scale_gradients(parameters, norm, MAX_NORM)
    optimizer.step()


def distribute_like(parameter: DTensor, whole: torch.Tensor) -> DTensor:
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)


def ours(parameters: list[torch.nn.Parameter], moments: torch.dtype = torch.float32) -> FusedClipAdamW:
    return FusedClipAdamW([{"params": parameters, "weight_decay": DECAY}], **HOW, moments=moments)


def torchs(parameters: list[torch.nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, **HOW, weight_decay=DECAY, fused=True)


def in_fp64(steps: int) -> list[torch.Tensor]:
    """Loshchilov and Hutter's formula after the clip, written out."""
    weights = [parameter.detach().double() for parameter in start("cpu")]
    means, squares = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    beta1, beta2 = HOW["betas"]
    for step in range(1, steps + 1):
        given = [gradient.double() for gradient in gradients(step)]
        norm = torch.cat([gradient.flatten() for gradient in given]).norm()
        factor = min(1.0, MAX_NORM / (float(norm) + 1e-6))
        for weight, mean, square, gradient in zip(weights, means, squares, given, strict=True):
            mean.mul_(beta1).add_((1 - beta1) * factor * gradient)
            square.mul_(beta2).add_((1 - beta2) * (factor * gradient) ** 2)
            root = (square / (1 - beta2**step)).sqrt() + HOW["eps"]
            weight.mul_(1 - HOW["lr"] * DECAY).sub_(HOW["lr"] / (1 - beta1**step) * mean / root)
    return weights


def both_trained(device: str, steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor], bool]:
    mine, theirs = start(device), start(device)
    optimizer, reference = ours(mine), torchs(theirs)
    for step in range(1, steps + 1):
        one_step(optimizer, mine, step)
        one_step(reference, theirs, step)
    same_states = all(
        {key: (value.shape, value.dtype) for key, value in optimizer.state[a].items()}
        == {key: (value.shape, value.dtype) for key, value in reference.state[b].items()}
        for a, b in zip(mine, theirs, strict=True)
    )
    return [tensor.detach().cpu() for tensor in mine], [tensor.detach().cpu() for tensor in theirs], same_states


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_the_formula_and_torchs_fused_adamw_after_a_clip(device: str):
    steps = 6
    [(mine, theirs, same_states)] = run_kernels(1, device, both_trained, steps)
    assert same_states
    for found, torch_found, exact in zip(mine, theirs, in_fp64(steps), strict=True):
        # Every step rounds a weight once or twice, and an update of at most lr/(1 - beta1) to a few units in its last
        # place.
        bound = 3 * steps * ULP * (exact.abs() + 4 * HOW["lr"])
        assert ((found.double() - exact).abs() <= bound).all()
        assert ((found - torch_found).double().abs() <= bound).all()


def with_moments_in_bf16(device: str) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    """Weights, first and second moments after four steps; of each parameter."""
    mine, theirs = start(device), start(device)
    optimizer = ours(mine, torch.bfloat16)
    reference = LowPrecisionAdamW([{"params": theirs, "weight_decay": DECAY}], **HOW, precision="bf16")
    for step in range(1, 5):
        one_step(optimizer, mine, step)
        one_step(reference, theirs, step)

    def of(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
        return [
            [parameter.detach().cpu(), *(optimizer.state[parameter][key].cpu() for key in ("exp_avg", "exp_avg_sq"))]
            for parameter in parameters
        ]

    return of(mine, optimizer), of(theirs, reference)


@pytest.mark.parametrize("device", DEVICES)
def test_moments_in_bf16_are_rounded_as_elsewhere(device: str):
    [(mine, theirs)] = run_kernels(1, device, with_moments_in_bf16)
    for found, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(found[0], expected[0], rtol=1e-3, atol=1e-4)
        for moment, its in zip(found[1:], expected[1:], strict=True):
            assert moment.dtype == torch.bfloat16
            # A number on the border between two goes either way, and a later step starts from there.
            assert (moment == its).float().mean() > 0.98
            torch.testing.assert_close(moment, its, rtol=2**-6, atol=1e-30)


def continued(device: str) -> list[bool]:
    """Two steps with one optimizer and two with another, from its state; against four of either."""
    same = []
    for first, second in ((ours, torchs), (torchs, ours)):
        parameters = start(device)
        optimizer = first(parameters)
        for step in (1, 2):
            one_step(optimizer, parameters, step)
        successor = second(parameters)
        successor.load_state_dict(optimizer.state_dict())
        for step in (3, 4):
            one_step(successor, parameters, step)
        same.append(
            all(torch.allclose(a.cpu(), b.float(), atol=1e-6) for a, b in zip(parameters, in_fp64(4), strict=True))
        )
    return same


@pytest.mark.parametrize("device", DEVICES)
def test_a_state_goes_from_one_to_the_other(device: str):
    assert run_kernels(1, device, continued) == [[True, True]]


def divided(device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Three steps on shards, uneven and replicated ones among them, and on whole tensors."""
    with joined_process_group(torch.device(device)):
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        placements = [Shard(0), Shard(0), Shard(1), Replicate()]
        whole = start(device)
        shards = [
            torch.nn.Parameter(distribute_tensor(it.detach().clone(), mesh, [placement]))
            for it, placement in zip(whole, placements, strict=True)
        ]
        for parameters in (whole, shards):
            optimizer = ours(parameters)
            for step in (1, 2, 3):
                one_step(optimizer, parameters, step)
        return [tensor.detach().full_tensor().cpu() for tensor in shards], [tensor.detach().cpu() for tensor in whole]  # type: ignore[attr-defined]


@pytest.mark.parametrize("device", DEVICES)
def test_shards_are_updated_as_the_whole_is(device: str):
    """Three ranks, so that 7 rows leave one with fewer than the others and 3 rows of 5 leave none."""
    for shards, whole in run_kernels(3, device, divided):
        for found, expected in zip(shards, whole, strict=True):
            # The norm is summed in another order.
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def copied(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = start(device)[0].detach()
    moments = [torch.zeros_like(weight) for _ in range(2)]
    copy = torch.zeros_like(weight, dtype=torch.bfloat16)
    rates = bias_rates(torch.ones(1, device=device), lr=0.1, betas=HOW["betas"])[0]
    gradient = gradients(1)[0].to(device)
    before = gradient.clone()
    # Neither is laid out like the other.
    strange = gradient.t().contiguous().t()
    how = {"rates": rates, "decay": 0.01, "betas": HOW["betas"], "eps": 1e-8}
    adamw_update(weight, strange, *moments, **how, copy=copy)
    return weight.cpu(), copy.cpu(), before.cpu(), strange.cpu()


@pytest.mark.parametrize("device", DEVICES)
def test_the_copy_is_the_new_weight_rounded_and_the_gradient_stays(device: str):
    [(weight, copy, before, after)] = run_kernels(1, device, copied)
    assert torch.equal(copy, weight.bfloat16())
    assert not torch.equal(weight, start("cpu")[0])
    assert torch.equal(before, after)
