"""One linear layer per expert, with stacked weights [experts, out, in], whose matmul recipes replace."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int32
from torch import Tensor, nn

from titan_exp.models.blocks.initialization import InitSpec
from titan_exp.models.blocks.linear import weight_and_bias
from titan_exp.models.blocks.linear_impl import GroupedLinearImpl
from titan_exp.ops.local_tensor import local_tensor
from titan_exp.ops.moe.grouped_mm import add_expert_bias
from titan_exp.ops.moe.permutation import PaddedOrder
from titan_exp.ops.swiglu_variant import SwiGLUVariant


class GroupedLinear(nn.Module):
    """Linear layers, one per expert, initialized with standard deviation `std`.

    `bias_std` is that of their biases; None is layers without biases.
    """

    parameter_role = "expert"

    def __init__(self, experts: int, fan_in: int, fan_out: int, std: float, bias_std: float | None = None) -> None:
        super().__init__()
        self.experts, self.in_features, self.out_features = experts, fan_in, fan_out
        self.std, self.bias_std = std, bias_std
        self.weight = nn.Parameter(torch.empty(experts, fan_out, fan_in))
        self.bias = None if bias_std is None else nn.Parameter(torch.empty(experts, fan_out))
        self.linear_impl = GroupedLinearImpl()
        self.bias_start = 0
        """First output that the bias on this rank is added to. Ranks whose outputs are summed each have other ones."""

    def forward(
        self,
        x: Float[Tensor, "tokens columns"],
        ends: Int32[Tensor, " experts"],
        row_weights: Float[Tensor, " tokens"] | None = None,
        *,
        of_swiglu: SwiGLUVariant | None = None,
        order: PaddedOrder | None = None,
        padded: bool = False,
    ) -> Float[Tensor, "_ fan_out"]:
        """x · weight[expert]ᵀ for rows sorted by expert, by `linear_impl`, plus the bias, times `row_weights` if given.

        `ends` are the ends of each expert's rows; rows after the last end give zeros and no gradient. `of_swiglu` takes
        fused gate and up, in place of this weighted variant of SwiGLU. `order` takes tokens in place of their rows in
        this order. `padded` is that of `GroupedLinearImpl`.
        """
        weight = local_tensor(self.weight)
        if of_swiglu is not None:
            assert row_weights is not None, "the SwiGLU is weighted"
            out = self.linear_impl.of_swiglu(x, weight, ends, row_weights, of_swiglu)
        elif order is not None:
            out = self.linear_impl.of_tokens(x, weight, order)
        else:
            out = self.linear_impl(x, weight, ends, padded=padded)
        if self.bias is None:
            return out
        bias = local_tensor(self.bias)
        if bias.shape[1] < out.shape[1]:
            bias = F.pad(bias, (self.bias_start, out.shape[1] - self.bias_start - bias.shape[1]))
        return add_expert_bias(out, bias, ends, row_weights)

    def init_spec(self) -> dict[str, InitSpec]:
        """Initialization of the parameters by name."""
        return weight_and_bias(self.std, self.bias_std)

    def extra_repr(self) -> str:
        """Shape for `print(model)`."""
        return f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"
