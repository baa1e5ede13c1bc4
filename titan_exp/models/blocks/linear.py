"""Linear layer whose matmul quantization recipes replace; the bias is added after it."""

from jaxtyping import Float
from torch import Tensor, nn

from titan_exp.models.blocks.initialization import InitSpec
from titan_exp.models.blocks.linear_impl import LinearImpl
from titan_exp.models.spec.model_spec import LayerSpec


class Linear(nn.Linear):
    """A linear layer initialized with standard deviation `std`.

    `bias_std` is that of its bias; None is a layer without bias. Recipes quantize `quantizable` layers only.
    """

    def __init__(
        self, fan_in: int, fan_out: int, std: float, bias_std: float | None = None, *, quantizable: bool = True
    ) -> None:
        super().__init__(fan_in, fan_out, bias=bias_std is not None)
        self.std, self.bias_std, self.quantizable = std, bias_std, quantizable
        self.linear_impl = LinearImpl()

    def forward(self, input: Float[Tensor, "*any fan_in"]) -> Float[Tensor, "*any fan_out"]:
        """input · weightᵀ, by `linear_impl`, plus the bias."""
        return add_bias(self.linear_impl(input, self.weight), self.bias)

    def init_spec(self) -> dict[str, InitSpec]:
        """Initialization of the parameters by name."""
        return weight_and_bias(self.std, self.bias_std)


def weight_and_bias(std: float, bias_std: float | None, bias: str = "bias") -> dict[str, InitSpec]:
    """Initialization of a weight, and of the parameter `bias` unless `bias_std` is None; 0 is zeros."""
    stds = {"weight": std} if bias_std is None else {"weight": std, bias: bias_std}
    return {name: InitSpec("normal", value) if value else InitSpec("zeros") for name, value in stds.items()}


def add_bias(x: Float[Tensor, "*any fan_out"], bias: Float[Tensor, " fan_out"] | None) -> Float[Tensor, "*any fan_out"]:
    """x + bias, in the dtype of `x`; `x` itself without bias."""
    return x if bias is None else x + bias.to(x.dtype)


def linear(layer: LayerSpec, name: str) -> Linear:
    """Linear layer that a block's spec describes, by module path."""
    spec = layer.linear(name)
    bias_std = spec.bias_std if spec.bias else None
    return Linear(spec.inputs, spec.outputs, spec.std, bias_std, quantizable=spec.quantizable)
