"""One linear layer per expert, with stacked weights [experts, out, in], whose matmul recipes replace."""

import torch
from jaxtyping import Float, Int32
from torch import Tensor, nn

from titan_exp.models.blocks.initialization import InitSpec
from titan_exp.models.blocks.linear_impl import GroupedLinearImpl
from titan_exp.ops.local_tensor import local_tensor


class GroupedLinear(nn.Module):
    """Linear layers without bias, one per expert, initialized with standard deviation `std`."""

    parameter_role = "expert"

    def __init__(self, experts: int, fan_in: int, fan_out: int, std: float) -> None:
        super().__init__()
        self.experts, self.in_features, self.out_features, self.std = experts, fan_in, fan_out, std
        self.weight = nn.Parameter(torch.empty(experts, fan_out, fan_in))
        self.linear_impl = GroupedLinearImpl()

    def forward(
        self, x: Float[Tensor, "tokens fan_in"], ends: Int32[Tensor, " experts"]
    ) -> Float[Tensor, "tokens fan_out"]:
        """x · weight[expert]ᵀ for rows sorted by expert, by `linear_impl`.

        `ends` are the ends of each expert's rows; rows after the last end give zeros and no gradient.
        """
        return self.linear_impl(x, local_tensor(self.weight), ends)

    def init_spec(self) -> dict[str, InitSpec]:
        """Initialization of the parameters by name."""
        return {"weight": InitSpec("normal", self.std)}

    def extra_repr(self) -> str:
        """Shape for `print(model)`."""
        return f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"
