"""Split backward pass: the gradient of a stage's input first, gradients of its weights later (zero bubble).

Where a weight branches off the path to the input, the first part keeps the incoming gradient, from which the second
part continues (Qi et al. 2024). torch's own version is private, and that of 2.11 sums the gradients of multi-output
operators and cannot start from Python operators.
"""

from collections.abc import Iterable
from typing import Any

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
        self._branches = _branches(output, input, self._weights.keys())
        self.input_gradient = self._first_part(output, gradient, input)
        """Gradient of the input."""
        self._graph = None if NODES_LIVE_ALONE else output

    def add_weight_gradients(self) -> None:
        """Accumulate the gradients of the weights; called once."""
        for node, gradients in self._kept:
            starts = [(GradientEdge(node, index), grad) for index, grad in enumerate(gradients) if grad is not None]
            if not starts:
                continue
            edges, grads = zip(*starts, strict=True)
            weights = tuple(self._weights[weight] for weight in self._branches[node])
            torch.autograd.backward(edges, grads, inputs=weights)
        self._kept.clear()
        self._graph = None

    def _first_part(self, output: Tensor, gradient: Tensor | None, input: Tensor) -> Tensor:
        def keep(node: Node) -> Any:
            return node.register_prehook(lambda gradients: self._kept.append((node, gradients)))

        hooks = [keep(node) for node in self._branches]
        try:
            return torch.autograd.grad(output, input, gradient, retain_graph=True)[0]
        finally:
            for hook in hooks:
                hook.remove()


def _branches(output: Tensor, input: Tensor, weights: Iterable[Node]) -> dict[Node, set[Node]]:
    """Nodes on paths from output to input where weights branch off, with those weights."""
    target, ends = get_gradient_edge(input).node, set(weights)
    on_path = {target}
    reached: dict[Node, set[Node]] = {}
    branches: dict[Node, set[Node]] = {}
    for node in _deepest_first(get_gradient_edge(output).node):
        successors = [successor for successor, _ in node.next_functions if successor is not None]
        found = {node} & ends
        for successor in successors:
            found |= reached.get(successor, set())
        if node is target or not any(successor in on_path for successor in successors):
            reached[node] = found
            continue
        on_path.add(node)
        if found:
            branches[node] = found
    assert sum(map(len, branches.values())) == len(set().union(*branches.values())), (
        "a weight that a stage uses in several places would be counted too often"
    )
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
