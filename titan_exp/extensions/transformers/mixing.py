"""Probe of a transformers class for modules that mix tokens outside attention: one token is NaN, and no other must be.

Modules run on the CPU with weights that take no memory, so the class has its real sizes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface

from titan_exp.extensions.transformers.anatomy import Anatomy, take_apart
from titan_exp.extensions.transformers.experts import is_experts, stand_in

if TYPE_CHECKING:
    from titan_exp.extensions.transformers.repository import Config


PASSING = "titan_exp_passing"  # name of the attention implementation in which no token sees another token

TOKENS = 23  # number of tokens in the forward pass; no other dim is likely to have this size

FEWEST_BLOCKS = 8
"""Minimum number of blocks that are called, if there are as many; more are called if it takes more to include one of
each kind."""

LARGEST_TENSOR = 2**24
"""Maximum number of elements of a tensor that the pass may compute, if the class can be called with fewer."""


@torch.no_grad()
def token_mixing(config: "Config") -> str | None:
    """Sentence about a module that mixes tokens outside attention, the first one found; None if there is none."""
    with torch.device("meta"):
        anatomy = take_apart(config, PASSING)
    try:
        found = _mixing_module(anatomy)
    except Exception as error:  # a class may raise anything
        name, reason = type(anatomy.model).__name__, " ".join(str(error).split())[:300]
        return (
            f"we look for modules of {name} that mix tokens outside attention, and that fails with "
            f"{type(error).__name__}: {reason}"
        )
    return None if found is None else f"{found} mixes tokens outside attention"


def _mixing_module(anatomy: Anatomy) -> str | None:
    body = anatomy.body.eval()
    kinds = dict[object, int]()  # first block of each
    for number, block in enumerate(anatomy.blocks):
        modules = tuple(type(module) for module in block.modules())
        kinds.setdefault((modules, tuple(parameter.shape for parameter in block.parameters())), number)
    del anatomy.blocks[max(*kinds.values(), FEWEST_BLOCKS - 1) + 1 :]
    for module in list(body.modules()):
        if type(module) is nn.Linear:
            module.forward = partial(_mean, width=module.out_features)  # type: ignore[method-assign]
        elif is_experts(module):
            module.forward = stand_in  # type: ignore[method-assign]
    with torch.device("meta"):
        hidden = torch.empty(1, TOKENS, anatomy.embedding.embedding_dim)
        _compute_less(body, hidden)
    _give_cheap_weights(body)
    hidden = torch.rand(hidden.shape, generator=torch.Generator().manual_seed(0)) + 0.5
    clean = _bad_tokens(_call(body, hidden))
    for token in (0, TOKENS // 2):
        marked, found = hidden.clone(), list[str]()
        marked[:, token] = torch.nan
        with _watched(body, clean | {token}, found):
            bad = _bad_tokens(_call(body, marked))
        if bad - clean - {token}:
            return found[0] if found else type(anatomy.model).__name__
    return None


def _call(body: Any, hidden: Tensor) -> Tensor:
    positions = torch.arange(TOKENS, device=hidden.device)[None]
    return body(inputs_embeds=hidden, position_ids=positions, use_cache=False)[0]


def _bad_tokens(value: object) -> set[int]:
    """Tokens at which a tensor of a value has NaN, for tensors that have a dim of that size."""
    found = set[int]()
    for tensor in tree_leaves(value):
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and TOKENS in tensor.shape:
            by_token = tensor.movedim(tensor.shape.index(TOKENS), 0).reshape(TOKENS, -1)
            found |= set(by_token.isnan().any(1).nonzero().flatten().tolist())
    return found


@contextmanager
def _watched(body: nn.Module, expected: set[int], found: list[str]) -> Iterator[None]:
    """Note modules that turn other tokens than the expected ones into NaN, inner modules first."""

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not (_bad_tokens((args, kwargs)) - expected) and _bad_tokens(output) - expected:
            found.append(type(module).__name__)

    own = [module for module in body.modules() if not type(module).__module__.startswith("torch.")]
    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in own]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Largest(TorchDispatchMode):
    """Tracks the number of elements of the largest computed tensor."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [tensor.numel() for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return out


def _compute_less(body: nn.Module, hidden: Tensor) -> None:
    """Lower numbers in modules that are not shapes of weights, such as chunk sizes, if tensors would be large."""
    try:
        largest = _largest(body, hidden)
    except NotImplementedError:  # a shape depends on values
        return
    numbers = {
        (type(module), name)
        for module in body.modules()
        for name, value in vars(module).items()
        if type(value) is int and value > TOKENS
    }
    for kind, name in sorted(numbers, key=str):
        if largest <= LARGEST_TENSOR:
            return
        modules = [module for module in body.modules() if type(module) is kind]
        before = [getattr(module, name) for module in modules]
        for module in modules:
            setattr(module, name, 16)
        try:
            lower = _largest(body, hidden)
        except Exception:  # a class may raise anything if the number is a shape
            lower = largest
        if lower < largest:
            largest = lower
            continue
        for module, value in zip(modules, before, strict=True):
            setattr(module, name, value)


def _largest(body: nn.Module, hidden: Tensor) -> int:
    with _Largest() as seen:
        _call(body, hidden)
    return seen.numbers


def _give_cheap_weights(body: nn.Module) -> None:
    """Give the body's modules on the meta device values that take no memory."""
    for module in body.modules():
        for name, parameter in module.named_parameters(recurse=False):
            value = torch.full((), 0.5, dtype=parameter.dtype, device="cpu").expand(parameter.shape)
            setattr(module, name, nn.Parameter(value, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu"))


def _mean(x: Tensor, width: int) -> Tensor:
    """Output of a linear at each token, as far as NaN is concerned."""
    return x.mean(-1, keepdim=True).repeat(*(1,) * (x.dim() - 1), width)


def _pass(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> tuple[Tensor, None]:
    """Attend from each token to itself only: [batch, seq, heads, width of values]."""
    of_token = sum(part.mean((1, 3)) for part in (query, key, value))
    assert isinstance(of_token, Tensor), "there are three"
    return of_token[..., None, None].repeat(1, 1, query.shape[1], value.shape[3]), None


AttentionInterface.register(PASSING, _pass)
