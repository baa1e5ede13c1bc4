"""Where a step is: forward or backward of which block, in the head and the loss, in the optimizer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titan_exp.models.blocks.block_list import iter_numbered_blocks
from titan_exp.plan.trace.memory_tracker import MemoryTracker


@dataclass
class Phases:
    """What was found on the way."""

    gradients: int = 0
    """Bytes of this rank's reduced gradients, when the optimizer last took them."""


@contextmanager
def track_phases(
    ledger: MemoryTracker, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> Iterator[Phases]:
    """Tell a ledger, for the time of the block, what its memory is for: by hooks on modules and the optimizer.

    Args:
        ledger: is told.
        parts: this rank's parts of the model.
        optimizer: over their parameters.
    """
    hooks: list[Any] = []
    phases = Phases()
    for part in parts:
        ledger.is_for(part.parameters(), "parameters")
        ledger.is_for(part.buffers(), "other")
        hooks += _on_part(ledger, part)

    def before(*_: Any) -> None:
        gradients = [weight.grad for part in parts for weight in part.parameters() if weight.grad is not None]
        ledger.is_for(gradients, "gradients")
        phases.gradients = ledger.sizes(gradients)
        ledger.category, ledger.where = "optimizer", "optimizer"

    def after(*_: Any) -> None:
        state = [value for its in optimizer.state.values() for value in its.values() if isinstance(value, Tensor)]
        ledger.is_for(state, "optimizer")
        ledger.category, ledger.where = "other", "between steps"

    hooks += [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    try:
        yield phases
    finally:
        for hook in hooks:
            hook.remove()


def _on_part(ledger: MemoryTracker, part: nn.Module) -> list[Any]:
    blocks = list(iter_numbered_blocks(part))
    head = getattr(part, "head", None)
    ends = "head and loss" if head is not None else "the stage's ends"

    def at(category: str, where: str) -> Callable[..., None]:
        def tell(*_: Any) -> None:
            ledger.category, ledger.where = category, where

        return tell

    hooks = [part.register_forward_pre_hook(at("activations", "forward, embedding"), prepend=True)]
    after_blocks = at("loss" if head is not None else "activations", f"backward, {ends}")
    for place, (number, block) in enumerate(blocks):
        hooks.append(block.register_forward_pre_hook(at("activations", f"forward, block {number}"), prepend=True))
        done = after_blocks if place == 0 else None
        hooks.append(block.register_forward_hook(_backward_of(at("activations", f"backward, block {number}"), done)))
        hooks.append(block.register_forward_hook(lambda _, inputs, output: ledger.hidden(output)))
    if head is not None:
        hooks.append(head.register_forward_pre_hook(at("loss", f"forward, {ends}"), prepend=True))
    return hooks


def _backward_of(begins: Callable[[], None], ends: Callable[[], None] | None) -> Callable[..., None]:
    """A forward hook: the gradient of a block's output begins its backward pass, that of its input ends it."""

    def hook(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda _: begins())
            if isinstance(inputs[0], Tensor) and inputs[0].requires_grad:
                inputs[0].register_hook(lambda _: ends() if ends else None)

    return hook
