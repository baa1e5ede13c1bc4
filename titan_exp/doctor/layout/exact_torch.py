"""Torch of a process that compares layouts: fp64 alone, and no dropout.

`in_double` comes before any other import that may read a dtype of torch: afterwards every floating dtype that Python
code names is fp64, in forward, backward and recomputation, in bodies of custom operators, and in your code.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def in_double() -> None:
    """Let every floating dtype of torch be fp64 in this process. Call it before other modules are imported."""
    torch.set_default_dtype(torch.float64)
    for name in ("float32", "float", "bfloat16", "float16", "half"):
        setattr(torch, name, torch.float64)
    for name in ("float", "bfloat16", "half"):
        setattr(torch.Tensor, name, torch.Tensor.double)


dropped = list[float]()  # rates of the dropout that this process left out
_attend = functional.scaled_dot_product_attention


def without_dropout() -> None:
    """Let torch's dropout drop nothing in this process, since each layout would draw other numbers, and keep its rates
    in `dropped`. Call it before your code is imported."""
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        setattr(functional, name, _keep)
    functional.scaled_dot_product_attention = _attend_to_all


def _keep(x: Tensor, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> Tensor:
    if training:
        dropped.append(p)
    return x


def _attend_to_all(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **options: Any
) -> Tensor:
    dropped.append(dropout_p)
    return _attend(query, key, value, attn_mask, 0.0, *rest, **options)
