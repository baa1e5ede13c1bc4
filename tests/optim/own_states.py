"""Optimizers of one's own that keep every kind of state, each changing its updates."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

LATE = 4
"""Step at which a tensor is made."""


class Counting(torch.optim.Optimizer):
    """Sign descent whose rate depends on numbers, a list, a late tensor, and values of the group."""

    def __init__(self, params: Iterable[Any], lr: float, *, power: float = 1.0, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "power": power, "k": 0, "scale": torch.tensor(1.0)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["scale"] = group["scale"] * 1.25
            group.setdefault("seen", []).append(group["k"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group)

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state |= {"step": 0, "momentum": torch.zeros_like(parameter), "last": None, "history": []}
        state["step"] += 1
        state["momentum"].mul_(0.5).add_(gradient)
        if state["step"] == LATE:
            state["late"] = gradient.clone()
            state["last"] = {"of": ("step", LATE, 0.1 + 0.2)}
            state["count"] = torch.tensor(LATE)
        state["history"] = [*state["history"][-1:], state["momentum"].clone()]
        direction = state["momentum"] + sum(past * (index + 1) for index, past in enumerate(state["history"]))
        if state["step"] > LATE:
            direction = direction + state["late"] * float(state["count"]) * state["last"]["of"][2]
        rate = group["lr"] * float(group["scale"]) / (state["step"] + len(group["seen"]) + group["k"]) ** group["power"]
        parameter.sub_(direction, alpha=rate)


class OnShards(Counting):
    """The same on plain tensors of this rank's shards."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        local, part = (x.to_local() if isinstance(x, DTensor) else x for x in (parameter, gradient))
        state = self.state[parameter]
        if not state:
            state |= {"step": 0, "momentum": torch.zeros_like(local)}
        state["step"] += 1
        state["momentum"].mul_(0.5).add_(part)
        if state["step"] == LATE:
            state["late"] = state["momentum"].clone()
        local.sub_(state["momentum"] + state.get("late", 0) * 0.25, alpha=group["lr"] / (state["step"] + group["k"]))


class Hidden(Counting):
    """A count that is not state."""

    count = 0

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        self.count += 1
        parameter.sub_(gradient, alpha=group["lr"] / self.count)


class Rebuilding(Hidden):
    """The count beside values that each step computes anew, and a list of its parameters."""

    def __init__(self, params: Iterable[Any], lr: float, **others: Any) -> None:
        super().__init__(params, lr, **others)
        self.weights = [parameter for group in self.param_groups for parameter in group["params"]]

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        self.rate = group["lr"] / (self.count + 1)
        self.sizes = [float(weight.norm()) for weight in self.weights]
        super().update(parameter, gradient, group)


class Generating(Counting):
    """A state that has no JSON."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        self.state[parameter]["generator"] = torch.Generator()


class Failing(Counting):
    """A state with a rate at which a step fails."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        raise ValueError("no gradient like that")


class Closing(Counting):
    """A step with a required argument."""

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class Reducing(Counting):
    """Gradients are averaged once more, over all ranks."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        local, part = (x.to_local() if isinstance(x, DTensor) else x for x in (parameter, gradient))
        dist.all_reduce(part)
        local.sub_(part / dist.get_world_size(), alpha=group["lr"])


class Norms(Counting):
    """A norm that is summed over ranks when it is read."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        self.state[parameter]["norm"] = gradient.square().sum()
