"""A mixture of experts adds nothing up in an order that a GPU leaves open, as `training.deterministic` asks."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.config.composing import experiment
from titan_exp.models.blocks.feed_forward import MoEFeedForward
from titan_exp.models.build import build_model

OPEN = ("index_add", "index_add_", "index_put", "index_put_", "put_", "bincount", "histc", "index_reduce")
"""Operators that add with atomics on a GPU."""


class Orders(TorchDispatchMode):
    """Collects calls whose sums have no fixed order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        # Each place of a row gets one number at most: the gradient of a gather.
        shared = name.startswith("scatter_add") and any(row.unique().numel() < row.numel() for row in _rows(args[2]))
        if name in OPEN or shared or (name == "cumsum" and args[0].is_floating_point()):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def _rows(index: torch.Tensor) -> torch.Tensor:
    return index.reshape(-1, index.shape[-1])


@pytest.mark.parametrize("balance", ["switch", "sequence", "global_batch"])
def test_no_order_is_left_open(balance: str):
    made = experiment(
        "model=qwen3_moe_debug",
        f"model.moe.balance.loss={balance}",
        "model.moe.balance.coefficient=1e-2",
        *("model.moe.router_bias=true", "model.moe.groups=4", "model.moe.active_groups=2"),
    )
    model = build_model(made.model, seq_len=16, attention_backend="math")
    mixture = next(module for module in model.modules() if isinstance(module, MoEFeedForward))
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    mixture.router.reset_buffers()
    x = torch.randn(2, 16, 64, requires_grad=True)
    with Orders() as orders:
        mixture(x).square().sum().backward()
    assert orders.found == []
    assert mixture.router.weight.grad is not None
