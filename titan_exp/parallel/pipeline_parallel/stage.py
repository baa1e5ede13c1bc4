"""One stage of a pipeline: its part of the model, and forward and backward passes of single micro-batches."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn

from titan_exp.parallel.fsdp.gradient_sync import accumulate_gradients
from titan_exp.parallel.pipeline_parallel.backward_split import BackwardSplit

Forward = Callable[["Stage", int, Tensor | None], Tensor]
"""Computes a stage's output for a micro-batch, from its number and the hidden states of the stage before (None for the
first); for the last stage the output is what is differentiated."""


def keep_compiled_buffers() -> None:
    """Let compiled graphs keep what a backward pass reads: where it is split in two, the second one reads it again."""
    functorch_config.donated_buffer = False


@dataclass
class _Pass:
    """State of a micro-batch between a stage's forward and backward pass."""

    input: Tensor | None
    output: Tensor
    gradient: Tensor | None = None
    rest: BackwardSplit | None = None


@dataclass
class Stage:
    """A stage on this rank."""

    number: int
    """Which of all stages it is."""
    last: bool
    """Whether it is the last one, whose output is the objective."""
    module: nn.Module
    """Its part of the model."""
    shared: tuple[str, ...] = ()
    """Its parameters that the last stage has a copy of."""
    copied: tuple[str, ...] = ()
    """Its parameters that are copies of the first stage's."""
    _passes: dict[int, _Pass] = field(default_factory=dict)

    def forward(self, microbatch: int, hidden: Tensor | None, compute: Forward) -> Tensor:
        """Compute a micro-batch's output; where gradients are enabled, keep what its backward pass needs.

        Args:
            microbatch: its number.
            hidden: output of the stage before; None for the first stage.
            compute: what the stage does.
        """
        train = torch.is_grad_enabled()
        if hidden is not None:
            hidden = hidden.detach().requires_grad_(train)
        output = compute(self, microbatch, hidden)
        if train:
            self._passes[microbatch] = _Pass(hidden, output)
        return output.detach()

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Add a micro-batch's gradients of the weights; returns that of its input, None for the first stage.

        Args:
            microbatch: its number.
            gradient: that of its output; None for the last stage, whose output is the objective.
        """
        kept = self._passes.pop(microbatch)
        torch.autograd.backward((kept.output,), (gradient,) if gradient is not None else None)
        return None if kept.input is None else kept.input.grad

    def backward_input(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """The gradient of a micro-batch's input alone; the arguments and the result are those of `backward`."""
        kept = self._passes[microbatch]
        kept.gradient = gradient
        if kept.input is None:
            return None  # No stage waits for it: all of the first stage's backward pass is done with the weights.
        kept.rest = BackwardSplit(kept.output, gradient, kept.input, self.module.parameters())
        return kept.rest.input_gradient

    def backward_weights(self, microbatch: int) -> None:
        """Add a micro-batch's gradients of the weights, after `backward_input`."""
        rest = self._passes[microbatch].rest
        if rest is None:
            self.backward(microbatch, self._passes[microbatch].gradient)
            return
        del self._passes[microbatch]
        rest.add_weight_gradients()
        accumulate_gradients(self.module)
