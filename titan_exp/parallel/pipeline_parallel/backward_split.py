"""A backward pass in two: the gradient of a stage's input at once, those of its weights later.

Where a branch to a weight leaves the way to the input, the first part keeps the gradient that arrives there; the
second part continues from it (Qi et al. 2024, "Zero Bubble Pipeline Parallelism"). Torch's own is private, and that of
2.11 adds up the gradients of an operator's several outputs and cannot start from operators written in Python.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

NODES_LIVE_ALONE = torch.__version__ >= "2.13"
"""Whether a node of an operator written in Python is kept by who refers to it; before, the graph had to be."""


class BackwardSplit:
    """The backward pass of one micro-batch through one stage.

    Args:
        output: of the stage, with its graph.
        gradient: of the output; None for an objective.
        input: of the stage, a leaf that its output depends on.
        parameters: the stage's weights.
    """

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
        """The second part, once: add the gradients of the weights to their `grad`."""
        for node, gradients in self._kept:
            starts = [(GradientEdge(node, number), it) for number, it in enumerate(gradients) if it is not None]
            if not starts:
                continue
            edges, given = zip(*starts, strict=True)
            weights = tuple(self._weights[weight] for weight in self._branches[node])
            torch.autograd.backward(edges, given, inputs=weights)
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
    """Nodes on the way from the output to the input from which weights branch off, and those weights."""
    target, ends = get_gradient_edge(input).node, set(weights)
    on_the_way = {target}
    reached: dict[Node, set[Node]] = {}
    branches: dict[Node, set[Node]] = {}
    for node in _deepest_first(get_gradient_edge(output).node):
        successors = [successor for successor, _ in node.next_functions if successor is not None]
        found = {node} & ends
        for successor in successors:
            found |= reached.get(successor, set())
        if node is target or not any(successor in on_the_way for successor in successors):
            reached[node] = found
            continue
        on_the_way.add(node)
        if found:
            branches[node] = found
    assert sum(map(len, branches.values())) == len(set().union(*branches.values())), (
        "a weight that a stage uses in several places would be counted too often"
    )
    return branches


def _deepest_first(root: Node) -> Iterable[Node]:
    """Every node that backward comes to, each after all that it leads to."""
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
