"""Split backward pass: the gradient of a stage's input first, gradients of its weights later (zero bubble).

Where a weight branches off the path to the input, the first part keeps the incoming gradient, from which the second
part continues (Qi et al. 2024). A compiled graph computes all of its gradients at once, and sends all of its messages:
calling it in both parts would cost twice, so the first part keeps the gradients of its weights too.
torch's own version is private, and that of 2.11 sums the gradients of multi-output operators and cannot start from
Python operators.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

NODES_LIVE_ALONE = torch.__version__ >= "2.13"
"""True if references keep nodes of Python operators alive; before torch 2.13 the graph had to be kept."""


class BackwardSplit:
    """Backward pass of one micro-batch through one stage; `gradient` is None for the loss of the last stage."""

    def __init__(
        self, output: Tensor, gradient: Tensor | None, input: Tensor, parameters: Iterable[nn.Parameter]
    ) -> None:
        self._weights = {get_gradient_edge(weight).node: weight for weight in parameters if weight.requires_grad}
        self._kept: list[tuple[Node, tuple[Tensor | None, ...]]] = []
        branches = _branches(output, input, self._weights.keys())
        early = set().union(*(branch.weights for node, branch in branches.items() if _is_compiled(node)))
        # A weight of a compiled graph has its whole gradient early, also that of a use elsewhere.
        self._branches = {
            node: branch._replace(weights=branch.weights - early)
            for node, branch in branches.items()
            if branch.weights - early
        }
        self.input_gradient = self._first_part(output, gradient, input, [self._weights[node] for node in early])
        """Gradient of the input."""
        self.added_early = bool(early)
        """True if the first part has added gradients of some weights."""
        self._graph = None if NODES_LIVE_ALONE or not self._branches else output

    @property
    def needs_graph(self) -> bool:
        """True if the second part has something to compute."""
        return bool(self._branches)

    def add_weight_gradients(self) -> None:
        """Accumulate the gradients of the weights; called once."""
        for node, gradients in self._kept:
            starts = [(GradientEdge(node, index), grad) for index, grad in enumerate(gradients) if grad is not None]
            if not starts:
                continue
            edges, grads = zip(*starts, strict=True)
            branch = self._branches[node]
            if branch.begins:
                # Without the path itself, on which the weights' other uses follow, which may read the same nodes.
                edges, grads = branch.begins, torch.autograd.grad(edges, branch.begins, grads)
            weights = tuple(self._weights[weight] for weight in branch.weights)
            torch.autograd.backward(edges, grads, retain_graph=bool(branch.begins), inputs=weights)
        self._kept.clear()
        self._graph = None

    def _first_part(
        self, output: Tensor, gradient: Tensor | None, input: Tensor, weights: list[nn.Parameter]
    ) -> Tensor:
        def keep(node: Node) -> Any:
            return node.register_prehook(lambda gradients: self._kept.append((node, gradients)))

        hooks = [keep(node) for node in self._branches]
        try:
            gradients = None if gradient is None else (gradient,)
            torch.autograd.backward((output,), gradients, retain_graph=self.needs_graph, inputs=(input, *weights))
            found, input.grad = input.grad, None
            assert found is not None, "the output depends on the input"
            return found
        finally:
            for hook in hooks:
                hook.remove()


class _Branch(NamedTuple):
    """Weights that branch off the path at one node."""

    weights: set[Node]
    """Nodes that accumulate their gradients."""
    begins: tuple[GradientEdge, ...] = ()
    """Edges off the path, if a weight is used further down the path as well; else empty, for all edges."""


def _is_compiled(node: Node) -> bool:
    return node.name().startswith("CompiledFunction")


def _branches(output: Tensor, input: Tensor, weights: Iterable[Node]) -> dict[Node, _Branch]:
    """Nodes on paths from output to input where weights branch off, with those weights."""
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
