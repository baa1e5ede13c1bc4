"""Parts of training, named by import path in tests."""

import os
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from titan_exp.trainer.part import Part, Phase, Run, Step, Update

CALLS: list[str] = []
"""Calls of all parts of this process."""


class Recorder(Part):
    """Notes every call."""

    def begin(self, run: Run) -> None:
        CALLS.append(f"{self.prefix[:-1]} begin")

    def before(self, step: int) -> None:
        CALLS.append(f"{self.prefix[:-1]} before {step}")

    def on_batches(self, step: int, batches: Any) -> Any:
        CALLS.append(f"{self.prefix[:-1]} batches {step}")
        return batches

    def on_gradients(self, update: Update) -> None:
        CALLS.append(f"{self.prefix[:-1]} gradients {update.step}")

    def on_update(self, update: Update) -> None:
        CALLS.append(f"{self.prefix[:-1]} update {update.step}")

    def after(self, step: Step) -> dict[str, float]:
        known = "row" if "loss" in step.values else "no row"
        CALLS.append(f"{self.prefix[:-1]} after {step.step} {known}")
        return {"seen": step.step}

    def finish(self, step: Step) -> None:
        CALLS.append(f"{self.prefix[:-1]} finish {step.step}")

    def close(self) -> None:
        CALLS.append(f"{self.prefix[:-1]} close")


class Acts(Recorder):
    phase = Phase.ACT


class Decides(Recorder):
    phase = Phase.DECIDE


class Saves(Recorder):
    phase = Phase.SAVE


class Reports(Recorder):
    phase = Phase.REPORT


class Careless(Part):
    """Draws random numbers, leaves evaluation mode and disables gradients, in every call."""

    def begin(self, run: Run) -> None:
        self.models = run.state.model.parts
        self.spoil()

    def spoil(self) -> None:
        torch.rand(3)
        np.random.rand()  # noqa: NPY002  # the generator that user code draws from
        random.random()
        torch.set_grad_enabled(False)
        for model in self.models:
            model.eval()

    def before(self, step: int) -> None:
        self.spoil()

    def on_gradients(self, update: Update) -> None:
        self.spoil()

    def on_update(self, update: Update) -> None:
        self.spoil()

    def after(self, step: Step) -> None:
        self.spoil()


class Stops(Part):
    """Ends training after a step, by the wish of one rank."""

    phase = Phase.DECIDE

    def __init__(self, at: int, rank: int = 0) -> None:
        self.at, self.rank = at, rank

    def after(self, step: Step) -> None:
        if step.step == self.at and os.environ.get("RANK", "0") == str(self.rank):
            step.stop("enough")


class Saver(Part):
    """Asks for a checkpoint after a step."""

    phase = Phase.DECIDE

    def __init__(self, at: int) -> None:
        self.at = at

    def after(self, step: Step) -> None:
        if step.step == self.at:
            step.checkpoint()


class Counter(Part):
    """Counts its steps, and keeps the sum of the weights after them."""

    keeps = ("weight_sum",)

    def __init__(self) -> None:
        self.steps = 0

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        self.steps = state["steps"] if state else 0

    @torch.no_grad()
    def on_update(self, update: Update) -> None:
        optimizer = update.state.optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                state["weight_sum"] = state.get("weight_sum", torch.zeros_like(parameter)) + parameter

    def after(self, step: Step) -> dict[str, float]:
        self.steps += 1
        return {"steps": self.steps}


SEEN: list[dict[str, torch.Tensor]] = []
"""Weights after each step of this process."""


class Weights(Part):
    """Remembers the weights after each step."""

    def begin(self, run: Run) -> None:
        self.model = run.state.model.parts[0]

    def after(self, step: Step) -> None:
        SEEN.append({name: weight.detach().clone() for name, weight in self.model.named_parameters()})


class Tensors(Part):
    """Returns a tensor as a number."""

    def __init__(self, elements: int) -> None:
        self.elements = elements

    def after(self, step: Step) -> dict[str, Any]:
        return {"norm": torch.full((self.elements,), 2.0)}


class KeepsTensors(Part):
    """Has a state that is no JSON."""

    def state(self) -> dict[str, Any]:
        return {"sum": torch.ones(2)}


class Hides(Part):
    """Hides a member."""

    def begin(self, run: Run) -> None:
        self.before = run  # type: ignore[assignment,method-assign]


class Fails(Part):
    """Fails after step 2."""

    def after(self, step: Step) -> None:
        if step.step == 2:
            raise ValueError("on purpose")


class FailsAloud(Fails):
    phase, fatal = Phase.REPORT, False


class FailsSilently(Fails):
    fatal = False


class OfThisRank(Part):
    """Has another phase on every rank."""

    phase = Phase(int(os.environ.get("RANK", "0")))


class Reporting(torch.optim.SGD):
    """An optimizer with a metric."""

    metric_reductions = {"seen": "mean"}  # noqa: RUF012  # as the guide has it

    def metrics(self) -> dict[str, torch.Tensor]:
        return {"seen": torch.ones(())}


class NoPart:
    """Is no part."""
