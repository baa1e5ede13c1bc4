"""Linear layer without bias, whose matmul quantization recipes replace."""

from jaxtyping import Float
from torch import Tensor, nn

from titan_exp.models.blocks.initialization import InitSpec
from titan_exp.models.blocks.linear_impl import LinearImpl
from titan_exp.models.spec.model_spec import LayerSpec


class Linear(nn.Linear):
    """A linear layer without bias, initialized with standard deviation `std`."""

    def __init__(self, fan_in: int, fan_out: int, std: float) -> None:
        super().__init__(fan_in, fan_out, bias=False)
        self.std = std
        self.linear_impl = LinearImpl()

    def forward(self, input: Float[Tensor, "*any fan_in"]) -> Float[Tensor, "*any fan_out"]:
        """input · weightᵀ, by `linear_impl`."""
        return self.linear_impl(input, self.weight)

    def init_spec(self) -> dict[str, InitSpec]:
        """Initialization of the parameters by name."""
        return {"weight": InitSpec("normal", self.std)}


def linear(layer: LayerSpec, name: str) -> Linear:
    """Linear layer that a block's spec describes, by module path."""
    spec = layer.linear(name)
    return Linear(spec.inputs, spec.outputs, spec.std)
