"""Weight averaging: exponential moving average (Polyak and Juditsky 1992), or mean over the last steps. The average is
fp32 optimizer state of each parameter, so it is sharded, saved, resharded and planned like any other."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from titan_exp.config.groups.training import WeightAverageConfig
from titan_exp.ops.autograd import local_tensor

AVERAGE = "weight_average"  # key of the average in a parameter's optimizer state


class WeightAverage:
    """Average of an optimizer's weights; the caller updates it after each step. The tail belongs to a whole run of
    `steps` steps; a job that ends earlier averages its part of the tail."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: WeightAverageConfig, *, steps: int) -> None:
        self._optimizer, self._config = optimizer, config
        self._first = config.first_step(steps)
        self.steps = 0
        self.after_move: Callable[[], object] = lambda: None
        """Called after weights and average are exchanged, to recompute copies of the weights."""

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after a step, counted from 1, while its gradients still exist."""
        if step < self._first:
            return
        self.steps += 1
        # As in Adam's bias correction, the weights of the steps sum to 1.
        is_ema, decay = self._config.mode == "ema", self._config.decay
        share = (1 - decay) / (1 - decay**self.steps) if is_ema else 1 / self.steps
        weights, averages = [], []
        updated = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        for parameter in [parameter for parameter in updated if parameter.grad is not None]:
            state = self._optimizer.state[parameter]
            if AVERAGE not in state:
                state[AVERAGE] = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.preserve_format)
            weights.append(local_tensor(parameter.detach()))
            averages.append(local_tensor(state[AVERAGE]))
        if averages:
            torch._foreach_lerp_(averages, weights, share)

    def progress(self) -> dict[str, Any]:
        """State beside the tensors, for a checkpoint."""
        return {"mode": self._config.mode, "steps": self.steps}

    def restore(self, saved: Mapping[str, Any] | None, step: int) -> str | None:
        """Continue a checkpoint's average after `step`, unless its mode differs or it averages steps before the first.
        Returns a sentence if the average begins at a later step than it should."""
        inside = max(0, step - self._first + 1)
        known = saved["steps"] if saved is not None and saved["mode"] == self._config.mode else 0
        is_ema = self._config.mode == "ema"
        # Averaged steps are the last before the checkpoint; more than the tail has belong to an earlier tail.
        self.steps = known if is_ema or known <= inside else 0
        if not self.steps:
            for state in self._optimizer.state.values():
                state.pop(AVERAGE, None)
        if is_ema or self.steps == inside:
            return None
        found = f"holds the mean of its last {known} steps" if known else "holds no mean"
        return (
            f"weight_average=tail averages from step {step - self.steps + 1} on instead of from step {self._first}, "
            f"because the checkpoint of step {step} {found}"
        )

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Exchange weights and average in the `with` block."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                average = self._optimizer.state.get(parameter, {}).get(AVERAGE)
                if average is not None:
                    weight, other = local_tensor(parameter.detach()), local_tensor(average)
                    kept = weight.clone()
                    weight.copy_(other)
                    other.copy_(kept)
        self.after_move()
