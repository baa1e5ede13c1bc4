"""AdaGC, adaptive gradient clipping (Wang et al. 2025, arXiv 2502.11034): a threshold for every parameter.

A parameter is a whole tensor: a fused projection, or a stack of experts. The average norm of each is a scalar of its
optimizer state, so checkpoints hold it by name, in any layout.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_exp.config.groups.grad_clip import GradClipConfig
from titan_exp.ops.local_tensor import local_tensor
from titan_exp.optim.grad_clip import clip_factor

AVERAGE_NORM = "average_grad_norm"
"""Name of the average norm in a parameter's optimizer state."""


class AdaGC:
    """Average gradient norms of an optimizer's parameters; infinite where no gradient has been seen."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], config: GradClipConfig) -> None:
        self._optimizer, self._parameters, self._config = optimizer, list(parameters), config
        device = local_tensor(self._parameters[0]).device if self._parameters else None
        self.averages = torch.full((len(self._parameters),), torch.inf, device=device)
        """Average norm of each parameter."""
        self.begun = 0
        """Step after which averages began, from which the warm-up counts."""

    @torch.no_grad()
    def factors(self, norms: Tensor, *, step: int, grad_norm: Tensor, max_norm: float | None) -> Tensor:
        """Factors [parameters] of the gradients with these norms, whose average they join.

        A gradient of zero sets no threshold, which would freeze its parameter; nor does one that is not finite.
        """
        averages = self.averages
        if step - self.begun <= self._config.warmup_steps:
            factor = torch.ones_like(norms) if max_norm is None else clip_factor(grad_norm, max_norm).expand_as(norms)
            joined = torch.minimum(averages, factor * norms)
        else:
            thresholds = self._config.relative * averages
            factor = torch.where(norms > thresholds, thresholds / norms, 1.0)
            decay, clipped = self._config.decay, factor * norms
            joined = torch.where(averages.isinf(), clipped, decay * averages + (1 - decay) * clipped)
        averages.copy_(torch.where((norms > 0) & norms.isfinite(), joined, averages))
        return factor

    @torch.no_grad()
    def restore(self, begun: int | None, step: int) -> None:
        """Take over the averages that a checkpoint after `step` has given the optimizer's state, and keep them there.
        None is a checkpoint that does not say when they began: with the run, or, if it has none, now."""
        known = False
        for parameter, average in zip(self._parameters, self.averages.unbind(), strict=True):
            state = self._optimizer.state.get(parameter, {})
            if AVERAGE_NORM in state:
                average.copy_(state[AVERAGE_NORM])
                state[AVERAGE_NORM] = average
                known = True
        self.begun = begun if begun is not None else 0 if known else step

    def keep(self) -> None:
        """Keep the averages in the optimizer's state; after its step, since optimizers create their own state where
        there is none."""
        for parameter, average in zip(self._parameters, self.averages.unbind(), strict=True):
            if parameter.grad is not None:
                self._optimizer.state[parameter].setdefault(AVERAGE_NORM, average)
