"""SwiGLU feed-forward (Shazeer 2020) with gate and up fused."""

from jaxtyping import Float
from torch import Tensor, nn

from titan_exp.models.blocks.linear import linear
from titan_exp.models.spec.model_spec import LayerSpec
from titan_exp.models.spec.swiglu import FFN_GROUP
from titan_exp.models.spec.tp_plan import TPStyle
from titan_exp.ops.autograd import recompute_input
from titan_exp.ops.swiglu import GROUP, swiglu


class FeedForward(nn.Module):
    """SwiGLU feed-forward with gate and up fused, their rows alternating in groups (see `ops.swiglu`)."""

    def __init__(self, layer: LayerSpec, name: str = "feed_forward") -> None:
        super().__init__()
        assert FFN_GROUP == GROUP, "rows are fused as the operator reads them"
        assert layer.linear(f"{name}.down").inputs % GROUP == 0, "checked by the family's rules"
        self._plan, self.fused_rows = layer.tp_plan(name), layer.fused_rows(name)
        self.group, self.variant = GROUP, layer.swiglu
        self.gate_up = linear(layer, f"{name}.gate_up")
        self.down = linear(layer, f"{name}.down")

    def tp_plan(self) -> dict[str, TPStyle]:
        """Tensor-parallel sharding of the linears."""
        return self._plan

    def forward(self, x: Float[Tensor, "batch seq dim"]) -> Float[Tensor, "batch seq dim"]:
        """down(silu(gate(x)) · up(x)), or a variant."""
        return recompute_input(lambda fused: swiglu(fused, self.group, self.variant), self.gate_up(x), self.down)
