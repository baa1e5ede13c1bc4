"""Probe of a shrunken model: modules that mix tokens outside attention, or draw random numbers; documents and rows that
see each other. Each module is called again with one token changed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.doctor.layout.steps import global_batch, stir
from titan_exp.ops.attention.sdpa import CausalAttention
from titan_exp.trainer.distributed import joined_process_group
from titan_exp.trainer.train_state import assemble

ROWS = 2
LEAST = 1e-11  # smallest change of an output, relative to its largest number, that counts


@dataclass
class Probed:
    """What the modules of a model do beside computing each token by itself."""

    mixers: dict[str, str] = field(default_factory=dict)
    """Class of each module that mixes tokens by its own code, outside the attention kernel, by path."""
    random: list[str] = field(default_factory=list)  # paths of modules that draw random numbers; the innermost ones
    stateful: list[str] = field(default_factory=list)
    """Paths of modules that compute something else when they are called again; the innermost ones."""
    rows: bool = False  # True if the rows of a batch see each other
    documents: bool = False  # True if documents of a row see each other, though the run masks them


@torch.no_grad()
def probe(run: Experiment) -> Probed:
    """Probe the model of a shrunken run on one rank."""
    with joined_process_group(torch.device("cpu")):
        state = assemble(run, ResolvedLayout.of(run), torch.device("cpu"))
        state.built.init_weights()
        stir(state.built.module)
        state.refresh()
        model, batch = state.built.module, global_batch(run).map(lambda whole: whole[:ROWS])
        calls, found = dict[nn.Module, _Call](), Probed()
        inputs = (batch.tokens, batch.positions, batch.documents)
        with _recorded(model, calls):
            clean = _seeded(model, *inputs)
        paths = {module: path for path, module in model.named_modules()}
        blocks = _Replays(calls, run.training.seq_len)
        for module, call in calls.items():  # inner modules return first
            path = paths[module]
            if not path or isinstance(module, CausalAttention):
                continue
            with suppress(Exception):  # a module of yours may raise anything if it is called by itself
                _note_repeated(module, call, path, found)
                if blocks.mixes(module, call):
                    found.mixers[path] = type(module).__name__
        changed = batch.tokens.clone()
        changed[0, 0] = (changed[0, 0] + 1) % run.model.vocab_size
        found.rows = _differs(_seeded(model, changed, *inputs[1:])[1:], clean[1:])
        if batch.documents is not None:
            changed = batch.tokens.clone()
            ends = (batch.documents[0].diff() != 0).nonzero().flatten()
            # The last token of a document: even a fast decay has not forgotten it at the next.
            changed[0, ends[-1]] = (changed[0, ends[-1]] + 1) % run.model.vocab_size
            after = slice(int(ends[-1]) + 1, None)
            found.documents = _differs(_seeded(model, changed, *inputs[1:])[0, after], clean[0, after])
    return found


@dataclass(frozen=True)
class _Call:
    """First call of a module."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any


@contextmanager
def _recorded(model: nn.Module, calls: dict[nn.Module, _Call]) -> Iterator[None]:
    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.setdefault(module, _Call(args, kwargs, output))

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_hook(note, with_kwargs=True))
        yield


def _note_repeated(module: nn.Module, call: _Call, path: str, found: Probed) -> None:
    """Note a module whose output is another one in a second call, or with another seed."""
    first, second = (_seeded(module, *call.args, **call.kwargs) for _ in range(2))
    if _differs(first, second):
        noted = found.stateful
    elif _differs(first, _seeded(module, *call.args, seed=1, **call.kwargs)):
        noted = found.random
    else:
        return
    if not any(inner.startswith(f"{path}.") for inner in noted):
        noted.append(path)


class _Replays:
    """Calls of modules, repeated with the innermost mixers that are known by then returning what they returned."""

    def __init__(self, calls: Mapping[nn.Module, _Call], length: int) -> None:
        self._calls, self._length = calls, length
        self._mixing = set[nn.Module](module for module in calls if isinstance(module, CausalAttention))

    def mixes(self, module: nn.Module, call: _Call) -> bool:
        """True if a token changes the output at another one, or the input of a mixer in the module, by the module's own
        code."""
        for token in (0, self._length // 2, self._length - 1):
            args, kwargs = self._with_token_changed(call, token)
            if args is None:
                return False
            with self._frozen(module) as seen:
                clean = _seeded(module, *call.args, **call.kwargs), list(seen)
                seen.clear()
                changed = _seeded(module, *args, **kwargs), list(seen)
            if self._elsewhere(clean[0], changed[0], token) or self._elsewhere(clean[1], changed[1], token):
                self._mixing.add(module)
                return True
        return False

    def _with_token_changed(self, call: _Call, token: int) -> tuple[Any, Any]:
        done = False

        def change(leaf: Any) -> Any:
            nonlocal done
            if done or not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                return leaf
            if (found := self._by_token(leaf)) is None:
                return leaf
            done, changed = True, leaf.clone()
            target = self._by_token(changed)
            assert target is not None, "as before"
            target[token] = found[token] * 1.5 + 0.25
            return changed

        args, kwargs = tree_map(change, call.args), tree_map(change, dict(call.kwargs))
        return (args, kwargs) if done else (None, None)

    def _by_token(self, tensor: Tensor) -> Tensor | None:
        """View with the tokens of the first row first; None without them."""
        if tensor.dim() > 1 and tensor.shape[0] == ROWS and self._length in tensor.shape[1:]:
            row = tensor[0]
            return row.movedim(row.shape.index(self._length), 0)
        if tensor.dim() > 0 and tensor.shape[0] == ROWS * self._length:
            return tensor[: self._length]
        return None

    def _elsewhere(self, clean: Any, changed: Any, token: int) -> bool:
        for one, two in zip(tree_leaves(clean), tree_leaves(changed), strict=False):
            if isinstance(one, Tensor) and one.is_floating_point() and (before := self._by_token(one)) is not None:
                after = self._by_token(two)
                others = torch.arange(self._length) != token
                if after is None or _differs(before[others], after[others]):
                    return True
        return False

    @contextmanager
    def _frozen(self, module: nn.Module) -> Iterator[list[Any]]:
        """Let outermost known mixers in the module return what they returned; yields their inputs."""
        seen, frozen = list[Any](), dict[str, nn.Module]()
        for path, child in module.named_modules():
            if path and child in self._mixing and not any(path.startswith(f"{outer}.") for outer in frozen):
                frozen[path] = child

        def stand_in(child: nn.Module) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                seen.append([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
                return self._calls[child].output

            return forward

        for child in frozen.values():
            child.forward = stand_in(child)  # type: ignore[method-assign]
        try:
            yield seen
        finally:
            for child in frozen.values():
                del child.forward


def _seeded(module: nn.Module, *args: Any, seed: int = 0, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    return module(*args, **kwargs)


def _differs(one: Any, two: Any) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(two), strict=True)
    return any(
        bool((first - second).abs().max() > LEAST * first.abs().max())
        for first, second in pairs
        if isinstance(first, Tensor) and first.is_floating_point() and first.numel()
    )
