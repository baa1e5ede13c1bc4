"""Experts of a transformers class by our grouped matmul and our dispatch, which expert parallelism replaces.

The class's own router chooses experts and their weights. Nothing of ours balances the load, and nothing of the class
does in training without its auxiliary loss.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from titan_exp.extensions.transformers.anatomy import Anatomy
from titan_exp.models.blocks.feed_forward import Experts, Mixture
from titan_exp.models.blocks.linear import GroupedLinear
from titan_exp.ops.moe.routing import Routing
from titan_exp.ops.swiglu_variant import SWIGLU


def is_experts(module: nn.Module) -> bool:
    """True for a module of stacked experts behind the experts interface of transformers, which takes hidden states
    [tokens, dim], indices and weights [tokens, k]."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


def layout_violation(module: Any) -> str | None:
    """Reason why our grouped matmul does not take the weights of a module of experts; None if it does."""
    kind, up = type(module).__name__, _up(module)
    taken = {up, "down_proj", *([f"{up}_bias", "down_proj_bias"] if module.has_bias else [])}
    extra = [name for name, _ in module.named_parameters() if name not in taken]
    if extra or module.has_post_expert_norm:
        named = f"the weight {extra[0]}" if extra else "a norm"
        return f"{kind} has {named} beside {up} and down_proj, which our grouped matmul does not apply"
    return None


class ClassExperts(Experts):
    """Stacked experts of a class, with its gate; the weights are the class's parameters."""

    def __init__(self, theirs: Any) -> None:
        nn.Module.__init__(self)
        self.gate_up, self.down = _grouped(theirs, _up(theirs)), _grouped(theirs, "down_proj")
        self.variant, self.fused_rows, self.weighted_inputs = SWIGLU, {}, False
        self.count = self.gate_up.experts
        self._gate: Callable[[Tensor], Tensor] = theirs._apply_gate if theirs.has_gate else theirs.act_fn

    def _down(self, fused: Tensor, ends: Tensor, weights: Tensor | None, *, padded: bool = False) -> Tensor:
        hidden = self._gate(fused)
        if weights is not None:
            hidden = hidden * weights.to(hidden.dtype)[:, None]
        return self.down(hidden, ends, weights, padded=padded)


class ClassMixture(Mixture):
    """Experts in place of a class's own, called as those: with all choices of its router."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.experts = ClassExperts(theirs)
        self.active_experts = 0
        """Experts that a token is routed to; set by the first call."""

    def forward(
        self,
        hidden_states: Float[Tensor, "tokens dim"],
        top_k_index: Int64[Tensor, "tokens k"],
        top_k_weights: Float[Tensor, "tokens k"],
    ) -> Float[Tensor, "tokens dim"]:
        """Weighted sum of the outputs of each token's experts, in the dtype of the hidden states."""
        tokens, index, weights = hidden_states, top_k_index, top_k_weights.float()
        self.active_experts = index.shape[-1]
        if self.token_split is not None:
            tokens, index, weights = (self.token_split.split(part[None])[0] for part in (tokens, index, weights))
        found = self.dispatch(tokens, Routing(index, weights), self.experts)()
        if self.token_split is not None:
            found = self.token_split.join(found[None], hidden_states.shape[0])[0]
        return found.to(hidden_states.dtype)


def adopt_experts(anatomy: Anatomy) -> str | None:
    """Put our experts in the place of a class's, where their layout allows it; returns the reason where it does not."""
    found = [(path, module) for path, module in anatomy.model.named_modules() if is_experts(module)]
    refusal = next(filter(None, (layout_violation(module) for _, module in found)), None)
    for path, module in found if refusal is None else ():
        mixture = ClassMixture(module)
        for linear, name in ((mixture.experts.gate_up, _up(module)), (mixture.experts.down, "down_proj")):
            for own, theirs in ((linear.weight, name), (linear.bias, f"{name}_bias")):
                if own is not None:
                    anatomy.names[own] = f"{path}.{theirs}"
        anatomy.model.set_submodule(path, mixture)
    return refusal


def stand_in(hidden_states: Tensor, _: Tensor, weights: Tensor) -> Tensor:
    """Output of experts at each token as far as its shape and NaN are concerned, in place of their `forward`."""
    return hidden_states + weights.sum(-1, keepdim=True).to(hidden_states.dtype)


def _up(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _grouped(theirs: Any, name: str) -> GroupedLinear:
    """Grouped linear with a class's weight and bias; a weight [experts, inputs, outputs] is transposed, which no
    initial distribution sees."""
    weight, bias = getattr(theirs, name), getattr(theirs, f"{name}_bias", None)
    weight = nn.Parameter(weight.detach().mT.contiguous()) if theirs.is_transposed else weight
    experts, outputs, inputs = weight.shape
    with torch.device("meta"):
        linear = GroupedLinear(experts, inputs, outputs, 0.0, None if bias is None else 0.0)
    linear.weight, linear.bias = weight, bias
    linear.init_spec = dict  # type: ignore[method-assign]  # the model declares it
    return linear
