"""Pipeline stage: forward and backward passes of single micro-batches through its part of the model."""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from titan_exp.models.spec.model_spec import PipelinePlan
from titan_exp.parallel.fsdp import accumulate_gradients, restart_forward_order
from titan_exp.parallel.step_observer import step_observer


def prune_to_stage(model: nn.Module, layers: Collection[int], *, first: bool, last: bool) -> None:
    """Keep the layers and children of one stage, in place; parameters keep their names in the whole model. The model
    has `pp_plan()` and a `ModuleDict` named `blocks` whose keys are layer numbers."""
    plan = model.pp_plan()  # type: ignore[operator]  # a method, not a submodule; checked by the rules
    assert isinstance(plan, PipelinePlan)
    blocks = model.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleDict), "checked by the rules"
    for key in list(blocks):
        if int(key) not in layers:
            del blocks[key]
    of_last = (*plan.last, *plan.called_in_parts)
    kept = {*(plan.first if first else ()), *((*of_last, *plan.copied) if last else ())}
    for child in {*plan.first, *of_last} - kept:
        setattr(model, child, None)


def shared_parameters(model: nn.Module) -> tuple[str, ...]:
    """Names of the first stage's parameters that the last stage has copies of, in the unpruned model."""
    return tuple(
        f"{child}.{name}"
        for child in model.pp_plan().copied  # type: ignore[operator]  # a method, not a submodule
        for name, _ in model.get_submodule(child).named_parameters()
    )


NODES_LIVE_ALONE = torch.__version__ >= "2.13"
"""True if references keep nodes of Python operators alive; before torch 2.13 the whole graph has to be kept."""


class BackwardSplit:
    """Split backward pass of a micro-batch through one stage: input gradient first, weight gradients later."""

    def __init__(self, output: Tensor, input: Tensor, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        named = {get_gradient_edge(weight).node: (name, weight) for name, weight in parameters if weight.requires_grad}
        self._weights = {node: weight for node, (_, weight) in named.items()}
        self._names = {node: name for node, (name, _) in named.items()}
        self._kept = deque[tuple[Node, tuple[Tensor | None, ...]]]()
        branches = _branches(output, input, self._weights.keys())
        # Weights whose gradients are computed with the input gradient; branches are ordered deepest first.
        compiled = [node.name().startswith("CompiledFunction") for node in branches]
        # Where only nodes above all compiled graphs are left for the second part, they would keep the graphs alive.
        above = any(compiled) and all(compiled[: sum(compiled)])
        found = zip(branches.values(), compiled, strict=True)
        early = set[Node]().union(*(branch.weights for branch, is_compiled in found if is_compiled or above))
        # A weight of a compiled graph has its whole gradient early, including the part from uses elsewhere.
        self._branches = {
            node: branch._replace(weights=branch.weights - early)
            for node, branch in branches.items()
            if branch.weights - early
        }
        self._early = [self._weights[node] for node in early]
        self._ends: tuple[Tensor, Tensor] | None = output, input

    @property
    def added_early(self) -> bool:
        """True if the first part adds gradients of some weights."""
        return bool(self._early)

    def compute_input_gradient(self, gradient: Tensor | None) -> Tensor:
        """Compute the input's gradient, once, from the output's gradient (None for the loss of the last stage)."""
        assert self._ends is not None, "the first part runs once"
        (output, input), kept = self._ends, self._kept
        hooks = [node.register_prehook(lambda grads, node=node: kept.append((node, grads))) for node in self._branches]
        try:
            gradients = None if gradient is None else (gradient,)
            inputs = (input, *self._early)
            torch.autograd.backward((output,), gradients, retain_graph=bool(self._branches), inputs=inputs)
            found, input.grad = input.grad, None
            assert found is not None, "the output depends on the input"
            return found
        finally:
            for hook in hooks:
                hook.remove()
            if NODES_LIVE_ALONE or not self._branches:
                self._ends = None

    def add_weight_gradients(self) -> None:
        """Accumulate the gradients of the weights, and free the graph from the output on. Call it once."""
        while self._kept:
            self._add_branch(*self._kept.popleft())
        self._ends = None

    def _add_branch(self, node: Node, gradients: tuple[Tensor | None, ...]) -> None:
        branch = self._branches.pop(node)
        starts = [(GradientEdge(node, index), grad) for index, grad in enumerate(gradients) if grad is not None]
        if not starts:
            return
        step_observer().weight_gradients_begin(sorted(self._names[weight] for weight in branch.weights))
        edges, grads = zip(*starts, strict=True)
        if branch.begins:
            # The path itself is left out: the weights' other uses follow on it and may read the same nodes.
            edges, grads = branch.begins, torch.autograd.grad(edges, branch.begins, grads)
        weights = tuple(self._weights[weight] for weight in branch.weights)
        torch.autograd.backward(edges, grads, retain_graph=bool(branch.begins), inputs=weights)


class _Branch(NamedTuple):
    """Weights that branch off the path at one node of the backward graph."""

    weights: set[Node]  # nodes that accumulate their gradients
    begins: tuple[GradientEdge, ...] = ()
    """Edges off the path, if a weight is also used further down the path; empty stands for all edges."""


def _branches(output: Tensor, input: Tensor, weights: Iterable[Node]) -> dict[Node, _Branch]:
    """Nodes on paths from output to input where weights branch off, each with its weights."""
    target, ends = get_gradient_edge(input).node, set(weights)
    # Weights that branch off at a node of the path or below it.
    on_path: dict[Node, set[Node]] = {target: set()}
    reached: dict[Node, set[Node]] = {}
    branches: dict[Node, _Branch] = {}
    for node in _deepest_first(get_gradient_edge(output).node):
        successors = [(successor, index) for successor, index in node.next_functions if successor is not None]
        found = {node} & ends
        below: set[Node] = set()
        for successor, _ in successors:
            found |= reached.get(successor, set())
            below |= on_path.get(successor, set())
        if node is target or not any(successor in on_path for successor, _ in successors):
            reached[node] = found
            continue
        on_path[node] = found | below
        if found:
            begins = [(successor, index) for successor, index in successors if found & reached.get(successor, set())]
            repeated = bool(found & below)
            assert not repeated or ends.isdisjoint(successor for successor, _ in begins), (
                "a weight that an operator reads, and that is used below it, would be counted too often"
            )
            branches[node] = _Branch(found, tuple(GradientEdge(*begin) for begin in begins) if repeated else ())
    return branches


def _deepest_first(root: Node) -> Iterable[Node]:
    """Nodes of the backward graph, each after its successors."""
    seen = {root}
    stack = [(root, iter(root.next_functions))]
    while stack:
        node, rest = stack[-1]
        for successor, _ in rest:
            if successor is not None and successor not in seen:
                seen.add(successor)
                stack.append((successor, iter(successor.next_functions)))
                break
        else:
            stack.pop()
            yield node


Forward = Callable[["Stage", int, Tensor | None], Tensor]
"""Computes a stage's output, or the last one's loss, from a micro-batch's number and its hidden states, if any."""


def keep_compiled_buffers() -> None:
    """Let compiled graphs keep the buffers of backward passes, which a split backward reads twice."""
    functorch_config.donated_buffer = False


@dataclass
class _Pass:
    """State of a micro-batch between its forward and backward pass."""

    input: Tensor | None
    output: Tensor | None
    """Output of the stage; None after `backward_input`, because `rest` keeps the part of the graph that it needs."""
    gradient: Tensor | None = None
    rest: BackwardSplit | None = None


@dataclass
class Stage:
    """A pipeline stage on this rank."""

    number: int
    last: bool  # True for the last stage, whose output is the loss
    module: nn.Module
    shared: tuple[str, ...] = ()  # parameters that the last stage has a copy of
    copied: tuple[str, ...] = ()  # parameters that are copies of the first stage's
    _passes: dict[int, _Pass] = field(default_factory=dict)

    def forward(self, microbatch: int, hidden: Tensor | None, compute: Forward) -> Tensor:
        """Compute the output of a micro-batch; with gradients enabled, keep the graph for backward."""
        train = torch.is_grad_enabled()
        restart_forward_order(self.module)
        if hidden is not None:
            hidden = hidden.detach().requires_grad_(train)
        output = compute(self, microbatch, hidden)
        if train:
            self._passes[microbatch] = _Pass(hidden, output)
        return output.detach()

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Accumulate weight gradients from the output's (None: last stage); returns the input's (None: first stage)."""
        kept = self._passes.pop(microbatch)
        assert kept.output is not None, "its backward pass is not split"
        torch.autograd.backward((kept.output,), (gradient,) if gradient is not None else None)
        kept.output = None  # Before its input, which its graph may hold.
        return None if kept.input is None else kept.input.grad

    def backward_input(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Compute the gradient of the input only; arguments and result are as in `backward`."""
        kept = self._passes[microbatch]
        kept.gradient = gradient
        if kept.input is None or kept.output is None:
            return None  # No stage waits for it: the first stage computes its whole backward with the weights.
        kept.rest = BackwardSplit(kept.output, kept.input, self.module.named_parameters())
        result = kept.rest.compute_input_gradient(gradient)
        if kept.rest.added_early:
            accumulate_gradients(self.module)
        kept.output = None
        return result

    def backward_weights(self, microbatch: int) -> None:
        """Accumulate the weight gradients, after `backward_input`."""
        kept = self._passes[microbatch]
        if kept.rest is None:
            self.backward(microbatch, kept.gradient)
            return
        # Hidden states and their gradient are released at its end, as by `backward`.
        del self._passes[microbatch]
        kept.rest.add_weight_gradients()
        accumulate_gradients(self.module)
