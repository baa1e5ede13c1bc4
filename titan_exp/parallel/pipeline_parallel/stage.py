"""Pipeline stage: forward and backward passes of single micro-batches through its part of the model."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn

from titan_exp.parallel.fsdp.gradient_sync import accumulate_gradients
from titan_exp.parallel.pipeline_parallel.backward_split import BackwardSplit

Forward = Callable[["Stage", int, Tensor | None], Tensor]
"""Computes a stage's output, or the last stage's loss, from a micro-batch's number and the hidden states of the
previous stage (None for the first)."""


def keep_compiled_buffers() -> None:
    """Let compiled graphs keep the buffers of backward passes, which a split backward reads twice."""
    functorch_config.donated_buffer = False


@dataclass
class _Pass:
    """State of a micro-batch between forward and backward."""

    input: Tensor | None
    output: Tensor
    gradient: Tensor | None = None
    rest: BackwardSplit | None = None


@dataclass
class Stage:
    """A pipeline stage on this rank."""

    number: int
    """Index among all stages."""
    last: bool
    """True for the last stage, whose output is the loss."""
    module: nn.Module
    """This stage's part of the model."""
    shared: tuple[str, ...] = ()
    """Parameters that the last stage has a copy of."""
    copied: tuple[str, ...] = ()
    """Parameters that are copies of the first stage's."""
    _passes: dict[int, _Pass] = field(default_factory=dict)

    def forward(self, microbatch: int, hidden: Tensor | None, compute: Forward) -> Tensor:
        """Compute the output of a micro-batch; with gradients enabled, keep the graph for backward."""
        train = torch.is_grad_enabled()
        if hidden is not None:
            hidden = hidden.detach().requires_grad_(train)
        output = compute(self, microbatch, hidden)
        if train:
            self._passes[microbatch] = _Pass(hidden, output)
        return output.detach()

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Accumulate weight gradients; returns the gradient of the input, None for the first stage.

        `gradient` is that of the output; None for the last stage.
        """
        kept = self._passes.pop(microbatch)
        torch.autograd.backward((kept.output,), (gradient,) if gradient is not None else None)
        return None if kept.input is None else kept.input.grad

    def backward_input(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Gradient of the input only; arguments and result as in `backward`."""
        kept = self._passes[microbatch]
        kept.gradient = gradient
        if kept.input is None:
            return None  # No stage waits for it: the first stage computes its whole backward with the weights.
        kept.rest = BackwardSplit(kept.output, gradient, kept.input, self.module.parameters())
        if kept.rest.added_early:
            accumulate_gradients(self.module)
        if not kept.rest.needs_graph:
            kept.output = kept.output.detach()
        return kept.rest.input_gradient

    def backward_weights(self, microbatch: int) -> None:
        """Accumulate the weight gradients, after `backward_input`."""
        rest = self._passes[microbatch].rest
        if rest is None:
            self.backward(microbatch, self._passes[microbatch].gradient)
            return
        del self._passes[microbatch]
        rest.add_weight_gradients()
        accumulate_gradients(self.module)
