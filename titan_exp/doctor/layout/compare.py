"""Comparison of layouts: the first module or parameter that differs from one rank, its probable cause, and a way on.

A probe of the shrunken model knows some causes: modules that mix tokens outside attention, or draw random numbers;
documents and rows that see each other. It calls each module again with one token changed.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from titan_exp.config.errors.user_error import listed
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.doctor.layout.cases import Case, Verdict
from titan_exp.doctor.layout.ranks import Recorded, call, global_batch, record, sets, stir
from titan_exp.ops.attention.sdpa import CausalAttention
from titan_exp.trainer.distributed import joined_process_group
from titan_exp.trainer.train_state import assemble

TOLERANCE = 1e-9  # largest relative difference of layouts that is rounding; in fp64 it is about 1e-15
LEAST_SHARE = 1e-4
"""Smallest scale of a gradient's differences, as a share of the largest gradient: some gradients are all rounding."""
PROBED_ROWS = 2
LEAST_CHANGE = 1e-11  # smallest change of an output, relative to its largest number, that counts


@dataclass(frozen=True)
class Difference:
    """First difference between a layout and one rank."""

    case: Case
    kind: str
    """`forward`: a loss of the first step differs, `backward`: only gradients do, `state`: only later steps do."""
    place: str
    """Path of the module, or name of the parameter or buffer, that is the first to differ; empty if none does."""
    size: float
    before: str = ""  # a module of yours before that place whose vectors ranks hold in parts; empty if there is none


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


def first_difference(case: Case, found: Recorded, one: Recorded) -> Difference | None:
    """First difference between a layout and one rank; None if all numbers agree."""
    losses = [abs(there - here) / (abs(here) or 1.0) for there, here in zip(found.losses, one.losses, strict=True)]
    largest = max((float(np.abs(gradient).max(initial=0)) for gradient in one.gradients.values()), default=0.0)
    gradients = _differing(found.gradients, one.gradients, LEAST_SHARE * largest)
    if not losses[0] <= TOLERANCE:  # NaN is a difference, too
        before = ""
        for name, (width, kind, numbers) in one.outputs.items():
            there = found.outputs.get(name)
            if there is None or there[0] != width:  # ranks may hold parts of each vector
                before = f"{name} ({kind})" if kind and there is not None else before
            elif not (_contains(there[2], numbers) and _contains(numbers, there[2])):
                return Difference(case, "forward", name, losses[0], before)
        return Difference(case, "forward", "", losses[0], before)
    if gradients:
        # Backward reaches the parameter nearest to the loss first: it is the last of those that differ.
        place = [*gradients][-1]
        return Difference(case, "backward", place, gradients[place])
    weights = _differing(found.weights, one.weights, 0.0) or dict.fromkeys(found.disputed, 1.0)
    if weights or not losses[-1] <= TOLERANCE:
        # A buffer that differs has changed the weights.
        place = min(weights, key=lambda name: name in one.gradients, default="")
        return Difference(case, "state", place, weights.get(place, losses[-1]))
    return None


def _differing(found: Mapping[str, np.ndarray], one: Mapping[str, np.ndarray], scale: float) -> dict[str, float]:
    """Relative differences beyond rounding, by name, in the order of the model."""
    differing = dict[str, float]()
    for name, expected in one.items():
        there = found.get(name)
        if there is None or there.shape != expected.shape:
            differing[name] = 1.0
        elif expected.size:
            largest = max(float(np.abs(expected).max()), scale) or 1.0
            size = float(np.abs(there - expected).max()) / largest
            if not size <= TOLERANCE:
                differing[name] = size
    return differing


def _contains(numbers: np.ndarray, others: np.ndarray) -> bool:
    """True if each of the others is among the numbers."""
    ordered = np.concatenate(([-np.inf], np.sort(numbers), [np.inf]))
    places = np.searchsorted(ordered[1:-1], others)
    nearest = np.minimum(others - ordered[places], ordered[places + 1] - others)
    return bool((nearest <= TOLERANCE * np.abs(others).max(initial=0)).all())


def cause(difference: Difference, probed: Probed, *, of_tokens: bool = False) -> str:
    """Sentence about what probably causes a difference; `of_tokens` if none is left without sequence parallelism."""
    keys = {key.rpartition(".")[2] for axis in difference.case.axes for key in axis.changes}
    if of_tokens:
        keys = keys - {"tp"} | {"cp"}
    kinds = {f"{key}{kind}" for key in keys for kind in ("", f" {difference.kind}")}
    told = (sentence for about, sentence in CAUSES.items() if about in kinds)
    otherwise = "the step depends on how rows are divided: is something averaged over the tokens of a rank?"
    return next(itertools.chain(_found_causes(difference, keys, probed), told), otherwise)


def _found_causes(difference: Difference, keys: set[str], probed: Probed) -> Iterator[str]:
    parallelism, place = difference.case.experiment.parallelism, difference.place
    if probed.stateful:
        yield (
            f"{probed.stateful[0]} keeps something from call to call, and each rank and micro-batch keeps other "
            "things. A buffer that depends on tokens must be reduced over ranks, and change once in a step."
        )
    if probed.random:
        yield (
            f"{probed.random[0]} draws random numbers beside torch's dropout, and each rank and micro-batch draws "
            "others."
        )
    if probed.rows and keys & {"dp_shard", "dp_replicate", "micro_batch_size"}:
        yield (
            "rows of a batch see each other (statistics over a batch, as in batch normalization?), and each rank and "
            "micro-batch has some of the rows."
        )
    related = (
        path for path in probed.mixers if f"{path}.".startswith(f"{place}.") or f"{place}.".startswith(f"{path}.")
    )
    mixers = [*related] or [*probed.mixers]
    in_parts = "cp" in keys or ("tp" in keys and parallelism.sequence_parallel)
    if in_parts and mixers and difference.kind != "backward":
        yield (
            f"{mixers[0]} ({probed.mixers[mixers[0]]}) mixes tokens outside attention, and each rank has only some of "
            "the tokens of a sequence."
        )
    if difference.before and "tp" in keys:
        yield (
            f"{difference.before} is called with the heads or features of its rank alone, and computes something over "
            "all of them (titan-exp help own-model: a norm over all heads)."
        )


CAUSES = {
    "ep": "the router or the experts compute something over the tokens of a rank, and each rank has other tokens.",
    "cp forward": "something takes the tokens of a rank for all of the sequence, in their number or in their places "
    "(the argument `positions` has a token's position).",
    "tp forward": "something is computed over all heads or features while a rank holds a part of them, or is added on "
    "every rank to outputs that are summed over ranks (titan-exp help own-model: a norm over all heads).",
    "tp backward": "each rank computes a part of this gradient, and nothing sums the parts. Set tp_style of the "
    "parameter's module: HeadParallel() between column-wise and row-wise linears, SEQUENCE_PARALLEL on the residual "
    "stream.",
    "cp backward": "a gradient does not flow back to the rank that holds the token.",
    "pp": "stages share what is not passed between them: a tied weight, a buffer, or a number kept in a module.",
    "activation_checkpoint": "a block computes something else when backward calls it again: it keeps state or changes "
    "its input.",
}
"""Probable causes by key of an axis and kind of difference; the first that matches is told."""


def compare(asked: Sequence[Case], deadline: float) -> Verdict:
    """Train the cases, of which the first is one rank, and compare them with it."""
    results, notes, agreeing, differing = dict[str, Recorded | str](), list[str](), list[str](), list[Difference]()
    for case, found in record(sets(asked), deadline):
        results[case.name] = found
        if case is asked[0] and isinstance(found, str):
            break
    one = results[asked[0].name]
    if not isinstance(one, str) and not all(map(math.isfinite, one.losses)):
        one = "its loss is not finite"
    if isinstance(one, str):
        return Verdict(notes=(f"We did not check its layouts, because the shrunken model fails on one rank: {one}.",))
    # What your code keeps in a process must not refuse a run, whose ranks begin anew.
    later = [case for first, *rest in sets(asked) for case in rest if not _agrees(case, results[case.name], one)]
    results |= {case.name: found for case, found in record([[case] for case in later], deadline)}
    for case in asked[1:]:
        found = results[case.name]
        if isinstance(found, str):
            notes.append(f"Not checked: {case.name}, since its shrunken model fails: {found}.")
        elif (difference := first_difference(case, found, one)) is not None:
            differing.append(difference)
        else:
            agreeing.append(case.name)
    if one.dropped:
        notes.append(
            f"This model drops {one.dropped:g} of some activations, which the check leaves out. In a run each layout "
            "draws other numbers, so curves of two layouts agree on average only."
        )
    probed = Probed()
    if differing or asked[0].experiment.data.document_mask:
        answer = call(probe, asked[0].experiment, deadline)
        probed = probed if isinstance(answer, str) else answer
    if probed.documents:
        where = listed([f"{path} ({kind})" for path, kind in probed.mixers.items()][:3], "and")
        notes.append(
            "data.document_mask=true, and the documents of a row see each other in this model"
            f"{f', by {where}' if where else ''}. No layout changes that, so this is only a warning."
        )
    if not differing:
        return Verdict(agreeing=tuple(agreeing), notes=tuple(notes))
    first, model = differing[0], asked[0].experiment.model
    remedies = tuple(_remedies(differing, one, deadline))
    of_tokens = "parallelism.sequence_parallel=false" in remedies
    others = [other.case.name for other in differing[1:]]
    lines = [
        f"We trained a small model of this kind ({model.layers} layers, width {model.dim}) for two steps in fp64.",
        f"{first.case.name} differs from one rank: {_what(first)}.",
        f"Probable cause: {cause(first, probed, of_tokens=of_tokens)}",
        *([f"These differ, too: {listed(others, 'and')}."] if others else []),
    ]
    return Verdict("\n  ".join(lines), remedies, tuple(agreeing), tuple(notes))


def _agrees(case: Case, found: Recorded | str, one: Recorded) -> bool:
    return not isinstance(found, str) and first_difference(case, found, one) is None


def _what(difference: Difference) -> str:
    place, size = difference.place, f"{difference.size:.1e}"
    match difference.kind:
        case "forward":
            where = (
                f"{place} is the first module whose output differs, and" if place else "no module's output differs, but"
            )
            return f"{where} the loss is off by {size} of itself"
        case "backward":
            return f"losses agree, and the gradient of {place} is off by {size} of its largest number"
    return f"the first step agrees, and after the second one {place or 'the loss'} is off by {size}"


def _remedies(differing: Sequence[Difference], one: Recorded, deadline: float) -> list[str]:
    """Overrides without which a run asks for no layout that differs; the one that keeps tensor parallelism is tried."""
    alone = [each.case.axes[0] for each in differing if len(each.case.axes) == 1]
    found = dict.fromkeys(axis.without for axis in alone or [each.case.axes[0] for each in differing])
    key = "parallelism.sequence_parallel=false"
    if "" in found or key not in found:
        return [] if "" in found else [*found]
    tried = list[Case]()
    for case in (difference.case for difference in differing if difference.case.experiment.parallelism.tp > 1):
        parallelism = replace(case.experiment.parallelism, sequence_parallel=False)
        tried.append(replace(case, experiment=replace(case.experiment, parallelism=parallelism)))
    works = all(_agrees(case, recorded, one) for case, recorded in record([[case] for case in tried], deadline))
    return [word if works or word != key else "parallelism.tp=1" for word in found]


@torch.no_grad()
def probe(run: Experiment) -> Probed:
    """Probe the model of a shrunken run on one rank."""
    with joined_process_group(torch.device("cpu")):
        state = assemble(run, ResolvedLayout.of(run), torch.device("cpu"))
        state.built.init_weights()
        stir(state.built.module)
        state.refresh()
        model, batch = state.built.module, global_batch(run).map(lambda whole: whole[:PROBED_ROWS])
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
        if tensor.dim() > 1 and tensor.shape[0] == PROBED_ROWS and self._length in tensor.shape[1:]:
            row = tensor[0]
            return row.movedim(row.shape.index(self._length), 0)
        if tensor.dim() > 0 and tensor.shape[0] == PROBED_ROWS * self._length:
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
        bool((first - second).abs().max() > LEAST_CHANGE * first.abs().max())
        for first, second in pairs
        if isinstance(first, Tensor) and first.is_floating_point() and first.numel()
    )
