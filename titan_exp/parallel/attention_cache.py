"""Cache of FlexAttention's results for selective activation checkpointing of blocks without a compiler.

The kernel is compiled: its operators are hidden from torch's modes, which see one call of compiled code. This returns
the tensors that backward reads too, query, key and value among them. They are not kept, but those recomputed are taken.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch._higher_order_ops import inductor_compiled_code
from torch.utils._python_dispatch import TorchDispatchMode

FLEX_ATTENTION = "flex_attention"
"""Name of FlexAttention in a block's trace, which does not compile it."""
Kept = tuple[Sequence[Any], Sequence[int | None]]
"""Results of a call, and for each the number of the argument that it is; None for another."""


def with_attention_cache(contexts: Sequence[AbstractContextManager[Any]]) -> tuple[AbstractContextManager[Any], ...]:
    """Contexts of a block's forward pass and recomputation that keep and return results of compiled code too."""
    kept: list[Kept] = []
    forward, recomputation = contexts
    return _both(forward, _Cache(kept, _keep)), _both(recomputation, _Cache(kept, _restore))


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


class _Cache(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, kept: list[Kept], call: Callable[..., Any]) -> None:
        super().__init__()
        self._kept, self._call = kept, call

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: compiled code is run, rather than skipped."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call the operator; that of compiled code keeps or returns its results."""
        call = partial(self._call, self._kept) if func is inductor_compiled_code else func
        return call(*args, **(kwargs or {}))


def _keep(kept: list[Kept], code: Callable[..., Any], arguments: list[Any], **name: Any) -> Any:
    numbers = {id(argument): number for number, argument in enumerate(arguments) if isinstance(argument, Tensor)}
    alive = [*arguments]  # compiled code empties the list
    results = inductor_compiled_code(code, arguments, **name)
    origins = [numbers.get(id(result)) for result in results]
    del alive
    own = zip(results, origins, strict=True)
    kept.append(([_detached(result) if origin is None else None for result, origin in own], origins))
    return results


def _restore(kept: list[Kept], code: Callable[..., Any], arguments: list[Any], **_: Any) -> Any:
    results, origins = kept.pop(0)
    found = [result if origin is None else arguments[origin] for result, origin in zip(results, origins, strict=True)]
    arguments.clear()
    return found


def _detached(result: Any) -> Any:
    # Autograd makes the result a part of the graph, which holds this cache.
    return result.detach() if isinstance(result, Tensor) else result
