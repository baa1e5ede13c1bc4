"""Outer optimizer (LocalSGD, DiLoCo): steps the last synchronization's weights by the groups' mean pseudo-gradient.

Its weights and its momentum are fp32 state of each parameter beside the inner optimizer's, so they are sharded, saved,
resharded and planned like any other.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from titan_exp.config.groups.semi_sync import SemiSyncConfig
from titan_exp.ops.local_tensor import local_tensor

KEPT, MOMENTUM = "kept_weights", "outer_momentum"
"""Names in a parameter's optimizer state: weights of the last synchronization, and momentum of the outer optimizer."""


class OuterOptimizer:
    """SGD with momentum over what an inner `optimizer` has learnt since the last synchronization (torch's SGD)."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: SemiSyncConfig) -> None:
        self._optimizer = optimizer
        self._lr, self._momentum, self._nesterov = config.outer
        self.after_move: Callable[[], object] = lambda: None
        """Recomputes what is kept of the weights elsewhere."""
        self._first: dict[Tensor, Tensor] = {}
        """Weights before the first step, until the inner optimizer has allocated its state, which must be empty."""
        optimizer.register_step_pre_hook(lambda *_: self._keep_first())
        optimizer.register_step_post_hook(lambda *_: self._allocate())

    @property
    def parameters(self) -> list[Tensor]:
        """Parameters of this rank that are trained; empty before the first step."""
        return [parameter for parameter in self._all() if KEPT in self._optimizer.state.get(parameter, {})]

    @torch.no_grad()
    def pseudo_gradients(self) -> list[Tensor]:
        """Weights of the last synchronization less the present ones, this rank's shards, in fp32."""
        return [
            kept - local_tensor(parameter) for parameter, kept in zip(self.parameters, self._state(KEPT), strict=True)
        ]

    @torch.no_grad()
    def step(self, gradients: list[Tensor]) -> None:
        """Step the kept weights along the mean pseudo-gradient, which is overwritten; they become the present ones."""
        kept = self._state(KEPT)
        if self._momentum:
            momenta = self._state(MOMENTUM)
            torch._foreach_mul_(momenta, self._momentum)
            torch._foreach_add_(momenta, gradients)
            if self._nesterov:
                torch._foreach_add_(gradients, momenta, alpha=self._momentum)
            else:
                gradients = momenta
        torch._foreach_add_(kept, gradients, alpha=-self._lr)
        self.back_to_kept()

    @torch.no_grad()
    def back_to_kept(self) -> None:
        """Take the weights of the last synchronization for the present ones."""
        torch._foreach_copy_([local_tensor(parameter) for parameter in self.parameters], self._state(KEPT))
        self.after_move()

    @torch.no_grad()
    def keep(self) -> None:
        """Take the present weights, of a checkpoint, for those of the last synchronization."""
        if parameters := self.parameters:
            torch._foreach_copy_(self._state(KEPT), [local_tensor(parameter) for parameter in parameters])

    @torch.no_grad()
    def _keep_first(self) -> None:
        for parameter in self._all():
            if parameter.grad is not None and KEPT not in self._optimizer.state.get(parameter, {}):
                self._first[parameter] = parameter.detach().clone().float()

    @torch.no_grad()
    def _allocate(self) -> None:
        while self._first:
            parameter, weights = self._first.popitem()
            state = self._optimizer.state[parameter]
            state[KEPT] = weights
            if self._momentum:
                state[MOMENTUM] = torch.zeros_like(weights)

    def _all(self) -> Iterator[Tensor]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def _state(self, name: str) -> list[Tensor]:
        return [local_tensor(self._optimizer.state[parameter][name]) for parameter in self.parameters]
