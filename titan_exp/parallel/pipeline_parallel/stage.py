"""Pipeline stage: forward and backward passes of single micro-batches through its part of the model."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn

from titan_exp.parallel.fsdp.gradient_sync import accumulate_gradients, restart_forward_order
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
    output: Tensor | None
    """None after `backward_input`, whose rest keeps the part of the graph that it needs."""
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
        restart_forward_order(self.module)
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
        assert kept.output is not None, "its backward pass is not split"
        torch.autograd.backward((kept.output,), (gradient,) if gradient is not None else None)
        kept.output = None  # Before its input, which its graph may hold.
        return None if kept.input is None else kept.input.grad

    def backward_input(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Gradient of the input only; arguments and result as in `backward`."""
        kept = self._passes[microbatch]
        kept.gradient = gradient
        if kept.input is None or kept.output is None:
            return None  # No stage waits for it: the first stage computes its whole backward with the weights.
        kept.rest = BackwardSplit(kept.output, kept.input, self.module.named_parameters())
        result = kept.rest.compute_input_gradient(gradient)
        if kept.rest.added_early:
            accumulate_gradients(self.module)
        kept.output = None
        return result

    def backward_weights(self, microbatch: int) -> None:
        """Accumulate the weight gradients, after `backward_input`."""
        if self._passes[microbatch].rest is None:
            self.backward(microbatch, self._passes[microbatch].gradient)
            return
        # Hidden states and their gradient are released at its end, as by `backward`.
        kept = self._passes.pop(microbatch)
        assert kept.rest is not None
        kept.rest.add_weight_gradients()
        accumulate_gradients(self.module)
