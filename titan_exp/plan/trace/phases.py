"""Phase of the passes (forward or backward of a block, head and loss), set on the memory tracker by hooks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from titan_exp.models.blocks.transformer import iter_numbered_blocks
from titan_exp.plan.trace.memory_tracker import MemoryTracker


@contextmanager
def track_phases(
    tracker: MemoryTracker,
    parts: Sequence[nn.Module],
    compute_weights: Iterable[Tensor] = (),
) -> Iterator[None]:
    """Set a tracker's phase and categories by hooks on modules, for the `with` block."""
    hooks: list[Any] = []
    for part in parts:
        tracker.set_category(part.parameters(), "parameters")
        tracker.set_category(part.buffers(), "other")
        hooks += _on_part(tracker, part)
    tracker.set_category(compute_weights, "gathered parameters")
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _on_part(tracker: MemoryTracker, part: nn.Module) -> list[Any]:
    blocks = list(iter_numbered_blocks(part))
    head = getattr(part, "head", None)
    ends = "head and loss" if head is not None else "the stage's ends"

    def at(category: str, where: str) -> Callable[..., None]:
        def set_phase(*_: Any) -> None:
            tracker.begin_phase(category, where, "")

        return set_phase

    hooks = [part.register_forward_pre_hook(at("activations", "forward, embedding"), prepend=True)]
    after_blocks = at("loss" if head is not None else "activations", f"backward, {ends}")
    for place, (number, block) in enumerate(blocks):
        hooks.append(block.register_forward_pre_hook(at("activations", f"forward, block {number}"), prepend=True))
        done = after_blocks if place == 0 else None
        hooks.append(block.register_forward_hook(_backward_of(at("activations", f"backward, block {number}"), done)))
        hooks.append(block.register_forward_hook(lambda _, inputs, output: tracker.mark_block_output(output)))
    if head is not None:
        hooks.append(head.register_forward_pre_hook(at("loss", f"forward, {ends}"), prepend=True))
    return hooks


def _backward_of(begins: Callable[[], None], ends: Callable[[], None] | None) -> Callable[..., None]:
    """Forward hook that marks a block's backward pass, from its output's gradient to its input's."""

    def hook(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda _: begins())
            if isinstance(inputs[0], Tensor) and inputs[0].requires_grad:
                inputs[0].register_hook(lambda _: ends() if ends else None)

    return hook
