"""The language-model loss: a sum over tokens, so that dividing by the global token count is right in every layout."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a token that is not predicted."""


def cross_entropy_sum(logits: Float[Tensor, "batch seq vocab"], labels: Int[Tensor, "batch seq"]) -> Float[Tensor, ""]:
    """Sum over tokens of -log softmax(logits)[label], in nats and fp32; labels of `IGNORE_INDEX` count nothing."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
