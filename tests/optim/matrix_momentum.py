"""A user's optimizer in one file: momentum on matrices, AdamW on everything else, and a metric of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from titan_exp.config.groups.optimizer import AdamWConfig

if TYPE_CHECKING:
    from titan_exp.optim.parameter_groups import NamedParameter


@dataclass(frozen=True, kw_only=True)
class Config(AdamWConfig):
    """AdamW's fields, and those of the matrices."""

    momentum: float = 0.9
    """Decay rate of a matrix's momentum."""


def build(parameters: Sequence["NamedParameter"], config: Config) -> Any:
    """A torch optimizer whose groups know their role."""
    import torch

    from titan_exp.ops.autograd import local_tensor
    from titan_exp.optim.parameter_groups import parameter_groups

    class MatrixMomentum(torch.optim.AdamW):
        metric_reductions: ClassVar = {"largest_momentum": "max"}

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            groups, self._found = self.param_groups, []
            for group in (group for group in groups if group["role"] == "matrix"):
                for weight in group["params"]:
                    state = self.state[weight]
                    momentum = state.setdefault("momentum", torch.zeros_like(weight))
                    momentum.mul_(config.momentum).add_(weight.grad)
                    weight.add_(momentum, alpha=-group["lr"])
                    self._found.append(momentum)
            self.param_groups = [group for group in groups if group["role"] != "matrix"]
            super().step(closure)
            self.param_groups = groups

        def metrics(self) -> dict[str, torch.Tensor]:
            return {
                "largest_momentum": torch.stack(
                    [local_tensor(momentum).abs().amax() for momentum in self._found]
                ).amax()
            }

    groups = parameter_groups(parameters, config, by_role=True)
    return MatrixMomentum(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps)
