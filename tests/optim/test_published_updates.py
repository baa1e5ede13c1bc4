"""Updates on one device against torch's implementation, or against the paper's formula in fp64."""

import pytest
import torch
from torch import Tensor, nn

from tests.optim.updates import optimizer_config
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.optimizer import OptimizerConfig
from titan_exp.models.blocks.linear import GroupedLinear
from titan_exp.models.spec.tp_plan import FusedRows, RowPiece
from titan_exp.optim.muon import COEFFICIENTS
from titan_exp.optim.optimizer import HasGradientPoint, build_optimizer
from titan_exp.optim.soap import initial_basis, iterated_basis

SHAPES = [(24, 8), (8, 24), (16, 16)]


def trained(module: nn.Module, config: OptimizerConfig, gradients: list[list[Tensor]]) -> list[Tensor]:
    """Weights after an update from each list of gradients."""
    parameters = list(module.parameters())
    optimizer = build_optimizer([module], config)
    for step in gradients:
        if isinstance(optimizer, HasGradientPoint):
            optimizer.to_gradient_point()
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


def linears() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(columns, rows, bias=False) for rows, columns in SHAPES)


def gradients_of(module: nn.Module, steps: int = 4) -> list[list[Tensor]]:
    torch.manual_seed(1)
    return [[torch.randn(parameter.shape) for parameter in module.parameters()] for _ in range(steps)]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    for weight, other in zip(found, expected, strict=True):
        torch.testing.assert_close(weight.double(), other.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_muon_is_torchs(nesterov: bool, scale: str):
    words = ["optimizer=muon", "optimizer.lr=0.01", "optimizer.precision=bf16", f"optimizer.scale={scale}"]
    config, module = optimizer_config(*words, f"optimizer.nesterov={nesterov}"), linears()
    reference, gradients = linears(), gradients_of(module)
    optimizer = torch.optim.Muon(
        reference.parameters(), lr=0.01, weight_decay=0.1, momentum=0.95, nesterov=nesterov, adjust_lr_fn=scale
    )
    for step in gradients:
        for parameter, gradient in zip(reference.parameters(), step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    # One rounding of a bf16 update in [-1, 1], times lr and scale.
    assert_close(trained(module, config, gradients), [p.detach() for p in reference.parameters()], 2e-4)


def orthogonalized(matrix: Tensor) -> Tensor:
    x = matrix.double() if matrix.shape[0] <= matrix.shape[1] else matrix.double().T
    x, (a, b, c) = x / x.norm(), COEFFICIENTS
    for _ in range(5):
        x = a * x + (b * x @ x.T + c * x @ x.T @ x @ x.T) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def muon_by_hand(weight: Tensor, gradients: list[Tensor], lr: float = 0.01, decay: float = 0.1) -> Tensor:
    weight, momentum = weight.double(), torch.zeros_like(weight).double()
    for gradient in (gradient.double() for gradient in gradients):
        momentum = 0.95 * momentum + 0.05 * gradient
        update = orthogonalized(0.05 * gradient + 0.95 * momentum)
        weight = weight * (1 - lr * decay) - lr * 0.2 * max(weight.shape) ** 0.5 * update
    return weight


class Fused(nn.Module):
    """A fused projection, two units of two query heads, a key and a value of four rows each."""

    fused_rows = {  # noqa: RUF012
        "qkv": FusedRows("attention", (RowPiece("query", 4, 2), RowPiece("key", 4), RowPiece("value", 4)))
    }

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(12, 32, bias=False)


def soap_by_hand(weight: Tensor, gradients: list[Tensor], every: int = 2, largest: int | None = None) -> Tensor:
    """SOAP with bases of the sides up to `largest`, which is the smaller side unless given; lr 0.01, decay 0.1,
    betas 0.9 and 0.95."""
    weight, largest = weight.double(), largest or min(weight.shape)
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    covariances, bases = [], []
    for step, gradient in enumerate(gradient.double() for gradient in gradients):
        sides = [gradient @ gradient.T, gradient.T @ gradient]
        weight = weight * (1 - 0.01 * 0.1)
        if step == 0:
            covariances = [0.05 * side for side in sides]
            bases = [
                torch.linalg.eigh(side).eigenvectors if len(side) <= largest else torch.eye(len(side)).double()
                for side in covariances
            ]
            continue
        left, right = bases
        mean, square = 0.9 * mean + 0.1 * gradient, 0.95 * square + 0.05 * (left.T @ gradient @ right) ** 2
        root = (square / (1 - 0.95**step)).sqrt() + 1e-8
        update = left @ ((left.T @ mean @ right) / (1 - 0.9**step) / root) @ right.T
        weight = weight - 0.01 * update
        covariances = [0.95 * old + 0.05 * side for old, side in zip(covariances, sides, strict=True)]
        if step % every == 0:
            for dim in (dim for dim in (0, 1) if weight.shape[dim] <= largest):
                order = (bases[dim].T @ covariances[dim] @ bases[dim]).diagonal().argsort(descending=True)
                bases[dim], square = bases[dim][:, order], square.index_select(dim, order)
                bases[dim] = torch.linalg.qr(covariances[dim] @ bases[dim]).Q
    return weight


SOAP = ["optimizer=soap", "optimizer.lr=0.01", "optimizer.precondition_every=2", "optimizer.betas=[0.9,0.95]"]


@pytest.mark.parametrize("largest", [16, 8, 4])
def test_soap_is_the_published_update(largest: int):
    """Both sides of a square matrix, the smaller one of the others, or none, which is Adam."""
    config, module = optimizer_config(*SOAP, f"optimizer.max_dim={largest}"), linears()
    starts, gradients = [p.detach().clone() for p in module.parameters()], gradients_of(module, 8)
    expected = [
        soap_by_hand(start, [step[index] for step in gradients], largest=largest) for index, start in enumerate(starts)
    ]
    assert_close(trained(module, config, gradients), expected)


def test_gradients_that_are_not_finite_do_not_end_soap():
    """The trainer reports them, as it does for every optimizer."""
    module = linears()
    gradients = gradients_of(module, 5)
    gradients[0][0][0, 0] = torch.inf
    found = trained(module, optimizer_config(*SOAP), gradients)
    assert [bool(weight.isfinite().all()) for weight in found] == [False, True, True]


@pytest.mark.parametrize("size", [24, 8])
def test_bases_do_not_follow_rounding(size: int):
    """Covariances of eight columns have a null space, in which eigensolvers return any basis."""
    torch.manual_seed(0)
    spectrum = torch.logspace(0, -4, 8)
    gradients = [torch.randn(1, size, 8) * spectrum for _ in range(2)]
    rounded = [gradient * (1 + 1e-7 * torch.randn(gradient.shape)) for gradient in gradients]
    bases = []
    for first, second in (gradients, rounded):
        basis = initial_basis(first.double() @ first.double().mT).float()
        diagonal = basis.mT @ first @ first.mT @ basis
        torch.testing.assert_close(diagonal, diagonal.diagonal(dim1=1, dim2=2).diag_embed(), atol=1e-4, rtol=0)
        torch.testing.assert_close(basis.mT @ basis, torch.eye(size)[None])
        bases.append((basis, iterated_basis(first @ first.mT + second @ second.mT, basis)[0]))
    for basis, other, tolerance in zip(*bases, (1e-4, 0.03), strict=True):
        torch.testing.assert_close(basis.abs(), other.abs(), atol=tolerance, rtol=0)


BY_HAND = {
    "muon": (["optimizer=muon", "optimizer.lr=0.01"], muon_by_hand),
    "soap": ([*SOAP, "optimizer.sides=smaller"], soap_by_hand),
}


@pytest.mark.parametrize("name", ["muon", "soap"])
@pytest.mark.parametrize("split", ["fused", "projection", "head"])
def test_projections_of_a_fused_weight_are_updated_apart(name: str, split: str):
    words, by_hand = BY_HAND[name]
    config = optimizer_config(*words, f"optimizer.split_attention={split}")
    module = Fused()
    start, gradients = module.qkv.weight.detach().clone(), gradients_of(module)
    rows = torch.arange(32).view(2, 4, 4)  # unit, head, row
    projections = [rows[:, :2].flatten(), rows[:, 2].flatten(), rows[:, 3].flatten()]
    parts = {"fused": [torch.arange(32)], "projection": projections, "head": list(rows.flatten(0, 1))}[split]
    expected = torch.empty(32, 12).double()
    for part in parts:
        expected[part] = by_hand(start[part], [step[0][part] for step in gradients])
    assert_close(trained(module, config, gradients), [expected])


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_experts_are_updated_one_by_one(name: str):
    words, by_hand = BY_HAND[name]
    module = GroupedLinear(3, 8, 6, 0.02)
    nn.init.normal_(module.weight)
    start, gradients = module.weight.detach().clone(), gradients_of(module)
    config = optimizer_config(*words)
    expected = [by_hand(start[expert], [step[0][expert] for step in gradients]) for expert in range(3)]
    assert_close(trained(module, config, gradients), [torch.stack(expected)])


def test_other_parameters_have_torchs_adamw():
    module = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4))
    reference = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4))
    reference.load_state_dict(module.state_dict())
    gradients = gradients_of(module)
    found = trained(module, optimizer_config("optimizer=muon"), gradients)
    expected = trained(reference, optimizer_config("optimizer=adamw", "optimizer.implementation=fused"), gradients)
    assert all(torch.equal(weight, other) for weight, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lion_is_the_published_update(precision: str):
    """With a momentum that is rounded after each step in bf16."""
    words = ["optimizer=lion", "optimizer.lr=0.01", "optimizer.weight_decay=0.5"]
    words.append(f"optimizer.state_precision={precision}")
    config, module = optimizer_config(*words), linears()
    starts, gradients = [p.detach().double().clone() for p in module.parameters()], gradients_of(module)
    expected = []
    for index, start in enumerate(starts):
        weight, momentum = start, torch.zeros_like(start)
        for gradient in (step[index].double() for step in gradients):
            weight = weight - 0.01 * (torch.sign(0.9 * momentum + 0.1 * gradient) + 0.5 * weight)
            momentum = 0.99 * momentum + 0.01 * gradient
            momentum = momentum.bfloat16().double() if precision == "bf16" else momentum
        expected.append(weight)
    assert_close(trained(module, config, gradients), expected)


@pytest.mark.parametrize(
    ("rate", "size"),
    [
        (0.01, 1.0),
        # Above one over the root of the step, which is then the rate.
        (0.9, 1.0),
        # Second moments below the epsilon.
        (0.9, 1e-7),
    ],
)
def test_adafactor_is_torchs(rate: float, size: float):
    words = ["optimizer=adafactor", "optimizer.weight_decay=0.1", f"optimizer.lr={rate}"]
    words.append(f"optimizer.eps={torch.finfo(torch.float32).eps}")
    config, module = optimizer_config(*words), linears()
    module.append(nn.LayerNorm(7))
    reference = linears()
    reference.append(nn.LayerNorm(7))
    for own in (module, reference):
        own[0].weight.data.mul_(1e-4)  # type: ignore[operator]  # smaller than the smallest size that rates refer to
    gradients = [[size * gradient for gradient in step] for step in gradients_of(module)]
    decayed = [parameter for parameter in reference.parameters() if parameter.dim() > 1]
    kept = [parameter for parameter in reference.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}]
    optimizer = torch.optim.Adafactor(groups, lr=config.lr, foreach=False)
    for step in gradients:
        for parameter, gradient in zip(reference.parameters(), step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    assert_close(trained(module, config, gradients), [p.detach() for p in reference.parameters()])


def test_schedule_free_adamw_is_the_published_update():
    words = ["optimizer=schedule_free_adamw", "optimizer.lr=0.01", "optimizer.averaging_power=2"]
    config, module = optimizer_config(*words), linears()
    starts, gradients = [p.detach().double().clone() for p in module.parameters()], gradients_of(module)
    expected = []
    for index, start in enumerate(starts):
        x, z, square, total = start, start, torch.zeros_like(start), 0.0
        for step, gradient in enumerate((step[index].double() for step in gradients), 1):
            y = 0.1 * z + 0.9 * x
            square = 0.95 * square + 0.05 * gradient**2
            z = z - 0.01 * gradient / ((square / (1 - 0.95**step)).sqrt() + 1e-8) - 0.01 * 0.1 * y
            total += 0.01**2
            x = x + 0.01**2 / total * (z - x)
        expected.append(x)
    assert_close(trained(module, config, gradients), expected)


@pytest.mark.parametrize(("rates", "share"), [((0.01, 0.02), 0.8), ((0.02, 0.01), 0.5)])
def test_a_warm_up_counts_less_in_the_schedule_free_average(rates: tuple[float, float], share: float):
    """And a decay as much as its beginning, as in the authors' implementation."""
    config, module = optimizer_config("optimizer=schedule_free_adamw"), nn.Linear(4, 4, bias=False)
    optimizer, weights = build_optimizer([module], config), []
    assert isinstance(optimizer, HasGradientPoint)
    for lr in rates:
        optimizer.param_groups[0]["lr"] = lr
        optimizer.to_gradient_point()
        module.weight.grad = torch.ones(4, 4)
        optimizer.step()
        weights.append(module.weight.detach().clone())
    z = optimizer.state[module.weight]["z"]
    torch.testing.assert_close(weights[1], weights[0] + share * (z - weights[0]))


def test_dion_is_the_published_update():
    config, module = optimizer_config("optimizer=dion", "optimizer.lr=0.01", "optimizer.scale=original"), linears()
    starts, gradients = [p.detach().double().clone() for p in module.parameters()], gradients_of(module)
    other = linears()
    before = build_optimizer([other], config)
    for parameter in other.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before.step()  # a momentum of zeros leaves the right factor as it is drawn
    rights = [before.state[parameter]["right"].double().T for parameter in other.parameters()]
    expected = []
    for index, (start, drawn) in enumerate(zip(starts, rights, strict=True)):
        weight, right, momentum = start, drawn, torch.zeros_like(start)
        for gradient in (step[index].double() for step in gradients):
            momentum = momentum + gradient
            left = torch.linalg.qr(momentum @ right).Q
            factor = momentum.T @ left
            momentum = momentum - 0.05 * left @ factor.T
            right = factor / factor.norm(dim=0)
            scale = (weight.shape[0] / weight.shape[1]) ** 0.5
            weight = weight * (1 - 0.01 * 0.1) - 0.01 * scale * left @ right.T
        expected.append(weight)
    assert_close(trained(module, config, gradients), expected)


@pytest.mark.parametrize("name", ["muon", "dion", "soap", "lion", "adafactor", "schedule_free_adamw"])
def test_keys_of_other_optimizers_are_refused(name: str):
    with pytest.raises(UserError, match=r"optimizer\.implementation"):
        optimizer_config(f"optimizer={name}", "+optimizer.implementation=fused")
