"""Cache of the choice of experts and the exchange of their tokens, for activation checkpointing without a compiler.

Unlike torch's selective checkpointing, it lets blocks be recomputed more than once, as a split backward does.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

ROUTING = (
    "titan_exp.topk_lowest_index",
    "titan_exp.start_count_exchange",
    "titan_exp.finish_count_exchange",
    "titan_exp.all_to_all_rows",
    "titan_exp.symmetric_dispatch",
)
"""Choice of experts and exchange of their tokens, which no mode of activation checkpointing repeats."""


def routing_cache() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Contexts of a block's forward pass, which keeps the results, and of its recomputations, which return them."""
    results: list[Any] = []
    return _Keep(results), _Return(results)


class _RoutingMode(TorchDispatchMode, ABC):
    supports_higher_order_operators = True

    def __init__(self, results: list[Any]) -> None:
        super().__init__()
        self._results, self._calls = results, 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: compiled code is run, rather than skipped."""
        return True

    def __enter__(self) -> "_RoutingMode":
        self._calls = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call the operator, or what stands for it."""
        call = partial(func, *args, **(kwargs or {}))
        return self._routed(call) if str(getattr(func, "overloadpacket", "")) in ROUTING else call()

    @abstractmethod
    def _routed(self, call: Callable[[], Any]) -> Any: ...


class _Keep(_RoutingMode):
    def _routed(self, call: Callable[[], Any]) -> Any:
        result = call()
        # Autograd makes the result a part of the graph, which holds this cache.
        self._results.append(_detached(result))
        return result


class _Return(_RoutingMode):
    def _routed(self, call: Callable[[], Any]) -> Any:
        self._calls += 1
        return _detached(self._results[self._calls - 1])


def _detached(result: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach(), result)
