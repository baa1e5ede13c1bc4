"""Part: the seam by which anything joins training, from an average of the weights to your own probe.

A part declares its phase. Within a step, parts act in the order of their phases, and within a phase in that of their
list (`trainer/parts.py`), which is the same on every rank::

    before, on_batches            all parts, in their order
    on_gradients                  all parts: gradients are clipped
    on_update                     ACT, (compute weights follow the new weights), the others
    after                         OBSERVE, DECIDE, (the row is written), SAVE, (the checkpoint), REPORT
"""

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.data.batch import MicroBatch
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.trainer.metrics import Numbers, Report, Row
from titan_exp.trainer.train_state import TrainState

Pause = Callable[[str], AbstractContextManager[object]]
"""Excludes the `with` block of a named activity from the training throughput."""
SHOWN_SECONDS = 0.1
"""Shortest time of a part, in seconds, that the log shows at the end of a run."""


class Phase(IntEnum):
    """Phase of a step in which a part acts; later phases see what earlier ones have done."""

    ACT = 0
    """Changes weights, gradients or batches."""
    OBSERVE = 1
    """Reads, and may add numbers to the row of the step."""
    DECIDE = 2
    """Sees the row of the step, and may ask for a checkpoint or for the end of training."""
    SAVE = 3
    """Acts between the row, which is written, and the checkpoint of the step."""
    REPORT = 4
    """Writes elsewhere what is already saved; its failure need not end the run."""


@dataclass(frozen=True)
class Run:
    """Objects of its run that a part may read."""

    experiment: Experiment
    folder: RunFolder
    state: TrainState
    """Mesh, model, objective and optimizer of this rank."""
    report: Report
    """Writes rows, images and heartbeats; has the clocks of the run."""
    first_step: int
    """Number of steps trained before this process began."""


@dataclass
class Update:
    """Optimizer update, as parts see it inside `train_step`."""

    step: int
    """Number of the step, from 1."""
    state: TrainState
    """Mesh, model and optimizer; gradients are in `parameter.grad`, clipped."""
    grad_norm: Tensor
    """Global gradient norm before clipping; reading it waits for the device."""
    lr: float


@dataclass
class Step:
    """A finished step, as parts see it. It is the same on all ranks of a run, except for whole rows."""

    step: int
    """Number of the step, from 1."""
    last: bool
    """True if training is over after it."""
    tokens: int
    """Predicted tokens so far."""
    agreed: bool = True
    """False where worlds train alone, so that the weights are this world's own."""
    rows: Sequence[Row] = ()
    """Rows of this step, newest last, from phase DECIDE on; empty if none is logged."""
    numbers: Numbers = field(default_factory=dict)
    """Numbers of parts in the newest row, from phase DECIDE on."""
    stop_reason: str | None = field(default=None, init=False)
    wants_checkpoint: bool = field(default=False, init=False)

    @property
    def values(self) -> Mapping[str, float]:
        """Numbers of this step, the same on every rank; empty before phase DECIDE and where no row is logged."""
        own = {name: float(value) for name, value in self.numbers.items() if value is not None}
        return {**self.rows[-1].values, **own} if self.rows else {}

    def stop(self, reason: str) -> None:
        """End training after this step, saved. The request of one rank is enough. Only in phase DECIDE."""
        self.stop_reason = self.stop_reason or reason

    def checkpoint(self) -> None:
        """Save a checkpoint after this step. The request of one rank is enough. Only in phase DECIDE."""
        self.wants_checkpoint = True

    def agree(self, ranks: dist.ProcessGroup) -> None:
        """Combine the requests of all ranks."""
        asked = torch.tensor([self.stop_reason is not None, self.wants_checkpoint], dtype=torch.int64)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=ranks)
        stop, self.wants_checkpoint = map(bool, asked.tolist())
        if stop:
            self.stop_reason = self.stop_reason or "another rank has asked for it"
            get_logger().info("training ends after step %d: %s", self.step, self.stop_reason)


class Part:
    """A part of training. You may override any member; by default it does nothing. All ranks call each member together,
    so it may use collectives if every rank reaches them."""

    phase: ClassVar[Phase] = Phase.OBSERVE
    """Phase in which it acts."""
    fatal: ClassVar[bool] = True
    """True if its errors end the run. Only a part that reports may set False; its errors are logged."""
    isolated: ClassVar[bool] = True
    """True if generators, gradient mode and the modules' training modes are restored after each call."""
    name: str = ""
    """Name in checkpoints and in the log, unique in a run. Your part gets its key, `training.parts.NAME`."""
    prefix: str = ""
    """Prefix of its numbers in rows."""

    keeps: Sequence[str] = ()
    """Names of the per-parameter tensors that it keeps in `optimizer.state`, where checkpoints restore them."""
    sums: Sequence[Tensor] = ()
    """Tensors with this rank's share of a step, which the worlds of a run sum in place before the update."""
    maxima: Sequence[Tensor] = ()
    """Tensors of which the worlds take the maximum in place instead."""

    def state(self) -> dict[str, Any]:
        """State for the checkpoint, as JSON. Tensors of a parameter belong in `optimizer.state` under names in `keeps`:
        they are sharded and saved like the optimizer's own."""
        return {}

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Restore the state of a checkpoint after `step`; None if the checkpoint has no state of this part."""

    def begin(self, run: Run) -> None:
        """Called before the first step of this process, with all state restored."""

    def due(self, step: int, *, last: bool) -> bool:
        """True if this part works for longer than a moment after a step. Its time is then not counted as training, and
        a row is logged for its numbers. Return the same on every rank."""
        return False

    def before(self, step: int) -> None:
        """Called before a step."""

    def on_batches(self, step: int, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Return micro-batches to train on instead of those that this rank has read: as many, of the same shapes."""
        return batches

    def on_gradients(self, update: Update) -> None:
        """Called before the optimizer's step, with gradients clipped."""

    def on_update(self, update: Update) -> None:
        """Called after the optimizer's step, with gradients; in phase ACT before the compute weights follow."""

    def refused(self, step: int) -> None:
        """Called when the worlds of a run will repeat a step."""

    def after(self, step: Step) -> Numbers | None:
        """Called after a step, in the part's phase. Its numbers join the row of this step, or the next row."""
        return None

    def finish(self, step: Step) -> None:
        """Called after the step at which training ends or stops, with its checkpoint on disk. May raise UserError."""

    def close(self) -> None:
        """Release everything; called however training ends, in reverse order."""


class Parts:
    """The parts of a run. They are called in the order of their phases, and within a phase in list order. Raises
    UserError if ranks have other parts or another order."""

    def __init__(self, parts: Iterable[Part] = (), *, ranks: dist.ProcessGroup | None = None) -> None:
        self._parts = sorted(parts, key=lambda part: part.phase)  # a stable sort
        self._seconds = dict.fromkeys((part.name for part in self._parts), 0.0)
        self.numbers: dict[str, float | int | None] = {}
        """Numbers of parts that wait for the next row."""
        self._overriding: dict[str, list[Part]] = {}
        self._modules: list[nn.Module] = []
        assert len(self._seconds) == len(self._parts), "names are unique"
        self._ranks = ranks
        if ranks is not None:
            _require_same_order([f"{part.phase.name.lower()} {part.name}" for part in self._parts], ranks)

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    @property
    def keeps(self) -> set[str]:
        """Names of all tensors that parts keep in the optimizer's state."""
        return {name for part in self._parts for name in part.keeps}

    def state(self) -> dict[str, Any]:
        """States of all parts that have one, by name. Raises UserError if the state of your part is not JSON."""
        states = {part.name: state for part in self._parts if (state := part.state())}
        for name in (part.name for part in self._parts if part.prefix and part.name in states):
            try:
                json.dumps(states[name])
            except (TypeError, ValueError) as error:
                raise UserError(
                    f"{name}: state() returns what JSON cannot hold ({error}). Return numbers, texts, "
                    "lists and mappings. Tensors belong into optimizer.state[parameter]."
                ) from error
        return states

    def restore(self, states: Mapping[str, Any], step: int) -> None:
        """Restore each part from its state after `step`; log names that only the checkpoint or the run has."""
        for part in self._parts:
            state = states.get(part.name)
            if state is None and step and part.state():
                get_logger().warning("the checkpoint has no state of %s, which begins after step %d", part.name, step)
            part.restore(state, step)
        for name in sorted(states.keys() - self._seconds.keys()):
            get_logger().warning("the checkpoint has a state of %s, which is not a part of this run", name)

    def begin(self, run: Run) -> None:
        """Call `begin` of all parts."""
        self._modules = [module for part in run.state.model.parts for module in part.modules()]
        self._each("begin", run)
        for part in self._parts:
            members = {name for name, member in vars(Part).items() if callable(member)}
            if hidden := sorted(members & vars(part).keys()):
                reason = f"{part.name} sets self.{hidden[0]}, which hides its member {hidden[0]}()"
                raise UserError(f"{reason}. Give the attribute another name.")

    def before(self, step: int) -> None:
        """Call `before` of all parts."""
        self._each("before", step)

    def on_batches(self, step: int, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Return the micro-batches of a step after every part has changed them."""
        for part in self._having("on_batches"):
            with self._calling(part):
                batches = part.on_batches(step, batches)
        return batches

    def on_gradients(self, update: Update) -> None:
        """Call `on_gradients` of all parts."""
        self._each("on_gradients", update)

    def on_update(self, update: Update, *, acting: bool) -> None:
        """Call `on_update` of the parts in phase ACT if `acting`, else of the others."""
        for part in self._having("on_update"):
            if (part.phase is Phase.ACT) == acting:
                with self._calling(part):
                    part.on_update(update)

    def refused(self, step: int) -> None:
        """Call `refused` of all parts."""
        self._each("refused", step)

    def due(self, step: int, *, last: bool) -> bool:
        """True if a row is due for the numbers of a part that observes or decides."""
        return any(part.due(step, last=last) for part in self._having("due") if part.phase <= Phase.DECIDE)

    def after(self, phase: Phase, step: Step, pause: Pause) -> None:
        """Call `after` of the parts in a phase (ACT with OBSERVE), in a `pause` if due; keep their numbers."""
        for part in self._having("after"):
            if part.phase == phase or (part.phase, phase) == (Phase.ACT, Phase.OBSERVE):
                due = part.due(step.step, last=step.last)
                with self._calling(part), pause(part.name) if due else nullcontext():
                    found = {f"{part.prefix}{name}": value for name, value in (part.after(step) or {}).items()}
                    self.numbers |= {name: _number(name, value) for name, value in found.items()}
        if phase is Phase.DECIDE and self._ranks is not None and any(part.phase is phase for part in self._parts):
            step.agree(self._ranks)

    def take_numbers(self) -> dict[str, float | int | None]:
        """Take the numbers of parts since the last row."""
        numbers, self.numbers = self.numbers, {}
        return numbers

    def finish(self, step: Step, pause: Pause) -> UserError | None:
        """Call `finish` of all parts at the end of training; returns the first error."""
        failed: UserError | None = None
        for part in self._having("finish"):
            try:
                with self._calling(part), pause(part.name):
                    part.finish(step)
            except UserError as error:
                failed = failed or error
        return failed

    def close(self) -> None:
        """Close all parts, the last first; an error is logged, so that the others are closed, too."""
        for part in reversed(self._parts):
            try:
                part.close()
            except Exception:
                get_logger().exception("cannot close the part %s", part.name)
        if slow := [f"{name} {seconds:.1f} s" for name, seconds in self._seconds.items() if seconds >= SHOWN_SECONDS]:
            get_logger().info("parts of training on this rank took %s", ", ".join(slow))

    def _having(self, member: str) -> list[Part]:
        """Parts that override `member`."""
        if member not in self._overriding:
            own = getattr(Part, member)
            self._overriding[member] = [part for part in self._parts if getattr(type(part), member) is not own]
        return self._overriding[member]

    def _each(self, member: str, *given: Any) -> None:
        for part in self._having(member):
            with self._calling(part):
                getattr(part, member)(*given)

    @contextmanager
    def _calling(self, part: Part) -> Iterator[None]:
        """Time a call, restore the state that the loss curve depends on, and log the error of a part that may fail."""
        begun = time.perf_counter()
        try:
            with _isolated(self._modules) if part.isolated else nullcontext():
                yield
        except Exception:
            if part.fatal:
                raise
            get_logger().exception("the part %s failed, and training continues", part.name)
        finally:
            self._seconds[part.name] += time.perf_counter() - begun


@contextmanager
def _isolated(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore generators, gradient mode and training modes after the `with` block."""
    kept, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002  # the global one, which parts may draw from
    on_device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    modes, gradients = [module.training for module in modules], torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_rng_state(kept)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002  # as above
        if on_device is not None:
            torch.cuda.set_rng_state(on_device)
        torch.set_grad_enabled(gradients)
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


def _number(name: str, value: Any) -> float | int | None:
    """Number of a row from a part's value, such as a one-element tensor. Raises UserError for other values."""
    if value is None or isinstance(value, int | float):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(value).__name__
        raise UserError(f"{name}: after() returns a {kind}, and a row has numbers ({error}).") from error


def _require_same_order(order: Sequence[str], ranks: dist.ProcessGroup) -> None:
    """Require the same list of parts on all ranks, because they call collectives in its order."""
    digest = hashlib.sha256("\n".join(order).encode()).digest()[:8]
    own = torch.tensor([int.from_bytes(digest, "big", signed=True)])
    least, most = own.clone(), own.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=ranks)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=ranks)
    if least != most:
        raise UserError(
            f"Ranks have different parts of training, and this one has {', '.join(order)}. Let no part under "
            "training.parts depend on the rank: all ranks must have the same, in the same order."
        )
