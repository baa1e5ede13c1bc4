"""Largest attention logit of each head: row maxima of q·k, computed by tiles beside the kernel, which returns none."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from titan_exp.ops.autograd import is_recomputing

TILE_SCORES = 1 << 22
"""Scores that are held at a time, over batch and heads."""

TILE_ROWS = 256
"""Rows of a tile at most: of causal attention it has all keys up to its last row."""


class MaxLogits(nn.Module):
    """Largest logit of each query head over the visible keys of this rank's micro-batches of a step, recomputation
    excluded; reported as `model/max_logit` over all layers and heads, and by layer.

    It costs the first of attention's two forward matmuls once more, and a tile of scores.
    """

    def __init__(self, heads: int, layer: str, device: torch.device) -> None:
        super().__init__()
        self.largest = torch.full((heads,), -torch.inf, device=device)
        """Logits [heads], fp32; no buffer, since no checkpoint and no initialization knows it."""
        self.metric_reductions = {"max_logit": "max", f"max_logit/{layer}": "max"}

    def forward(
        self,
        query: Float[Tensor, "batch heads rows head_dim"],
        key: Float[Tensor, "batch kv_heads keys head_dim"],
        visible: Bool[Tensor, "batch_or_1 1 rows keys"] | None,
        *,
        causal: bool,
        scale: float,
    ) -> None:
        """Take the logits of these queries and keys into account, if this is a forward pass in training."""
        if torch.is_grad_enabled():
            add_max_logits(self.largest, query.detach(), key.detach(), visible, causal, scale)

    def add(self, found: Float[Tensor, " heads"]) -> None:
        """Take logits into account that another attention operator has found in a forward pass in training."""
        add_found_logits(self.largest, found.detach())

    def metrics(self) -> dict[str, Tensor]:
        """Largest logit, for the layer and for all."""
        return dict.fromkeys(self.metric_reductions, self.largest.amax())

    def reset_metrics(self) -> None:
        """Begin a step."""
        self.largest.fill_(-torch.inf)


# An operator, so that compiled code asks when it runs whether it recomputes.
@torch.library.custom_op("titan_exp::add_max_logits", mutates_args=("largest",))
def add_max_logits(  # noqa: PLR0917  # custom ops take positional arguments
    largest: Tensor, query: Tensor, key: Tensor, visible: Tensor | None, causal: bool, scale: float
) -> None:
    """Raise `largest` to the logits of each head, unless backward repeats a forward pass."""
    if not is_recomputing():
        raise_to_logits(largest, query, key, visible, causal=causal, scale=scale)


def raise_to_logits(
    largest: Float[Tensor, " heads"],
    query: Float[Tensor, "batch heads rows head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    visible: Bool[Tensor, "batch_or_1 1 rows keys"] | None,
    *,
    causal: bool,
    scale: float,
) -> None:
    """Raise `largest` to the logits of each head, by tiles of rows."""
    batch, heads, rows, _ = query.shape
    groups, keys = key.shape[1], key.shape[2]
    step = max(1, min(TILE_ROWS, TILE_SCORES // (batch * heads * keys)))
    columns = torch.arange(keys, device=query.device)
    for first in range(0, rows, step):
        tile, seen = query[:, :, first : first + step], first + step if causal else keys
        # Query heads of a group share their key: rows of one matrix.
        scores = tile.unflatten(1, (groups, -1)).flatten(2, 3) @ key[:, :, :seen].transpose(2, 3)
        scores = scores.unflatten(2, (heads // groups, -1))
        if causal:
            hidden = columns[:seen] > columns[first : first + step, None]
            scores.masked_fill_(hidden, -torch.inf)
        elif visible is not None:
            scores.masked_fill_(~visible[:, :, None, first : first + step], -torch.inf)
        torch.maximum(largest, scale * scores.amax((0, 3, 4)).flatten().float(), out=largest)


@add_max_logits.register_fake
def _added(  # noqa: PLR0917  # as above
    largest: Tensor, query: Tensor, key: Tensor, visible: Tensor | None, causal: bool, scale: float
) -> None:
    return None


@torch.library.custom_op("titan_exp::add_found_logits", mutates_args=("largest",))
def add_found_logits(largest: Tensor, found: Tensor) -> None:
    """Raise `largest` to other logits of each head."""
    torch.maximum(largest, found, out=largest)


@add_found_logits.register_fake
def _found(largest: Tensor, found: Tensor) -> None:
    return None
