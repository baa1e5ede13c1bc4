"""Split backward pass: the gradient of a stage's input first, gradients of its weights later (zero bubble).

Where a weight branches off the path to the input, the first part keeps the incoming gradient, from which the second
part continues (Qi et al. 2024). A compiled graph computes all of its gradients at once, and sends all of its messages:
calling it in both parts would cost twice, so the first part keeps the gradients of its weights too.
torch's own version is private, and that of 2.11 sums the gradients of multi-output operators and cannot start from
Python operators.
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
        branches = _branches(output, input, self._weights.keys())
        self._branches = {node: ends for node, ends in branches.items() if not _is_compiled(node)}
        compiled = set().union(*(ends for node, ends in branches.items() if _is_compiled(node)))
        self.input_gradient = self._first_part(output, gradient, input, [self._weights[node] for node in compiled])
        """Gradient of the input."""
        self.added_early = bool(compiled)
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
            weights = tuple(self._weights[weight] for weight in self._branches[node])
            torch.autograd.backward(edges, grads, inputs=weights)
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


def _is_compiled(node: Node) -> bool:
    return node.name().startswith("CompiledFunction")


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
