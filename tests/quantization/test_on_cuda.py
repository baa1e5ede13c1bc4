"""A device's own instructions against the emulated recipe: the same rounding, sums in another order."""

import pytest
import torch

from titan_exp.quantization.float8_product import Float8, float8_product
from titan_exp.quantization.instructions import LEAST
from titan_exp.quantization.mx_product import mx_product

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

RECIPES = {
    "float8_tensorwise": (False, False),
    "float8_rowwise": (True, False),
    "float8_rowwise_gw_hp": (True, True),
    "mxfp8": None,
}


@pytest.mark.parametrize("name", RECIPES)
def test_instructions_compute_what_is_emulated(name: str):
    if torch.cuda.get_device_capability() < LEAST[name]:
        pytest.skip(f"{torch.cuda.get_device_name()} lacks the instructions of {name}")
    random = torch.Generator("cuda").manual_seed(0)
    x, weight, gradient = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=random)
        for shape in ((2, 128, 256), (512, 256), (2, 128, 512))
    )

    def passes(emulated: bool) -> list[torch.Tensor]:
        ours, its_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        kind = RECIPES[name]
        if kind is None:
            output = mx_product(ours, its_weight, emulated=emulated)
        else:
            output = float8_product(ours, its_weight, None, Float8(*kind, power_of_two=True, emulated=emulated))
        return [output.detach(), *torch.autograd.grad(output, [ours, its_weight], gradient)]

    for real, emulated in zip(passes(False), passes(True), strict=True):
        error = (real.float() - emulated.float()).norm() / emulated.float().norm()
        assert error < 5e-3  # bf16 rounds results by up to 4e-3, and Hopper adds up in fewer than 24 bits
