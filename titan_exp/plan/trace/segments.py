"""Segments of a traced step: costs and allocation events of each.

A segment does not depend on earlier allocations, so segments of a small model can be repeated in a large one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer

from titan_exp.config.layout.pipeline_schedules import Action
from titan_exp.models.blocks.transformer import iter_numbered_blocks
from titan_exp.parallel.step_observer import StepObserver
from titan_exp.plan.trace.dispatch_mode import CostMode, OpCosts
from titan_exp.plan.trace.memory_tracker import Change, MemoryTracker, local
from titan_exp.plan.trace.op_costs import COMPUTE_WEIGHTS, EMBEDDING, GRADIENTS, LOSS, NORM, OPTIMIZER

NOWHERE = -1  # stage number outside all stages, e.g. of the loss.
PROLOGUE, REDUCE, GROUP, REST, END = "prologue", "reduce", "group", "rest", "end"
"""Parts of a step outside actions: the part before the first action; a stage's gradient reduction, its FSDP parameter
groups, and the rest of it; a position that holds reduced gradients."""
TIED_SUM, OPTIMIZER_STEP = "sum of tied gradients", "optimizer step"
"""Last parts of a step: sum of tied gradients between stages, and from summed gradients to the next step."""
BETWEEN, SUM, RESULT = " between", " sum", " result"
"""Suffixes of an action's parts: the messages after it, the sums of FSDP parameter groups' gradients in a split
backward pass, and the storage of its result."""
GRADIENT_SUM = "sum of gradients"  # name of the phase that sums a parameter group's gradients in a split backward pass


class StepPosition(NamedTuple):
    """Position in a step."""

    step: int  # number of the step: -1 is the build, 0 the first step, 1 the second
    stage: int
    micro: int | None  # micro-batch; None for parts that run once per step
    part: str  # part of the step: `F before`, `F block`, `F after` and so on for an action
    block: int | None  # block of the stage; None outside blocks, -1 for the group of the stage's other parameters

    def next_group(self, part: str) -> "StepPosition":
        """Position of the next FSDP parameter group of a part."""
        return self._replace(part=part, block=self.block + 1 if self.part == part and self.block is not None else 0)

    def next_phase(self, phase: str) -> "StepPosition":
        """Position at which a phase begins."""
        action = self.part[:1]
        if phase == GRADIENT_SUM:
            return self.next_group(action + SUM)
        if self.micro is not None and ", block " in phase:
            kind = action if action in "IW" else phase[0].upper()
            return self._replace(part=f"{kind} block", block=int(phase.partition(", block ")[2]))
        return self if self.block is None else self._replace(part=f"{action} after", block=None)


PROLOGUES = [StepPosition(step, NOWHERE, None, PROLOGUE, None) for step in (0, 1)]
"""Position before the first action, for each step."""


class AllocationEvent(NamedTuple):
    """Allocation or release of a storage, or the first matmul of a segment."""

    allocation: int  # number of the storage's allocation; `FORWARD_MATMUL` or `BACKWARD_MATMUL` for matmuls
    size: int = 0  # bytes allocated; 0 for a release
    stream: int = 0  # stream of an allocation; `HOST` for one in host memory
    category: str = ""  # final category of an allocation; empty for the phase's default
    output: bool = False  # True for the hidden states that a block returns


FORWARD_MATMUL, BACKWARD_MATMUL = -1, -2
"""Numbers for a segment's first matmul in each thread, where the matmul library allocates a workspace once."""
NOT_TRACKED = -3


class GradientKey(NamedTuple):
    """Key of a rank's parameter, whichever layers the rank holds."""

    part: int  # index of its pipeline stage on this rank
    block: int | None
    name: str  # name within the block, or in the model


@dataclass(frozen=True)
class Segment:
    """Part of a step at one position."""

    costs: OpCosts
    position: StepPosition  # position in the step; blocks are numbered in the model, parameter groups from 0
    where: str
    begins_phase: bool  # True if the segment begins its phase
    category: str
    events: Sequence[AllocationEvent] = ()  # allocations and releases in order, if recorded


class SegmentTracker(MemoryTracker, StepObserver):
    """Memory tracker that also cuts a trace into segments. As a step's observer it ends one at the start of each
    micro-batch, pipeline action, gradient reduction and optimizer step, sets the class of kernels outside passes, and
    the category of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.mode: CostMode | None = None
        """Mode that counts the costs of segments; None before the build is traced."""
        self.reduced_gradients: list[dict[GradientKey, int]] = []
        """Allocations of reduced gradients for each step."""
        self.action_results: dict[StepPosition, int] = {}
        """Allocations of the results of pipeline actions."""
        self.position = StepPosition(-1, NOWHERE, None, PROLOGUE, None)
        """Position of the current segment."""
        self._block_outputs: set[int] = set()
        self._defaults: dict[int, str] = {}
        self._cuts: list[tuple[int, Segment]] = []
        """Number of changes before each segment, and the segment with all costs so far, without events."""
        self.cut(self.position, begins_phase=True)

    def begin_phase(self, category: str, where: str, outside_passes: str) -> None:
        super().begin_phase(category, where, outside_passes)
        self.cut(self.position.next_phase(where), begins_phase=True)

    def begin_step(self) -> None:
        super().begin_step()
        self.next_step()

    def next_step(self) -> None:
        """Begin a step."""
        self.cut(PROLOGUES[self.position.step + 1])

    def cut(self, position: StepPosition, *, begins_phase: bool = False) -> None:
        """End a segment and begin another."""
        self.position, costs = position, sum_costs([self.mode.costs] if self.mode else [])
        self._cuts.append((len(self._changes), Segment(costs, position, self.where, begins_phase, self.category)))

    def mark_matmul(self, *, backward: bool) -> None:
        mark = BACKWARD_MATMUL if backward else FORWARD_MATMUL
        start, _ = self._cuts[-1]
        if all(change.number != mark for change in self._changes[start:]):
            self._changes.append(Change(None, mark, 0, 0, self.where))

    def mark_block_output(self, output: Any) -> None:
        if isinstance(output, Tensor):
            self._block_outputs.add(self.allocation_of(output))

    def allocation_of(self, tensor: Tensor) -> int:
        """Number of the allocation of a tensor's storage, or `NOT_TRACKED`."""
        part = local(tensor)
        if not self.is_tracked(part):
            return NOT_TRACKED
        storage, _ = self._alive[part.untyped_storage()._cdata]
        return storage.number

    def segments(self) -> list[Segment]:
        """All segments that have ended, with their events."""
        found = list[Segment]()
        for (start, segment), (end, following) in pairwise(self._cuts):
            # The outer sum drops keys of messages that the segment does not send.
            costs = sum_costs([sum_costs([following.costs, sum_costs([segment.costs], -1)])])
            found.append(replace(segment, costs=costs, events=[*map(self._event, self._changes[start:end])]))
        return found

    def _event(self, change: Change) -> AllocationEvent:
        storage, number, size, stream, _ = change
        if storage is None or size < 0:
            return AllocationEvent(number)
        category = "" if self._defaults.get(number) == storage.category else storage.category
        return AllocationEvent(number, size, stream, category, number in self._block_outputs)

    def _add(self, storage: UntypedStorage, category: str | None, *, on_host: bool) -> None:
        known = self._allocations
        super()._add(storage, category, on_host=on_host)
        if category is None and self._allocations > known:
            self._defaults[self._allocations] = self.category

    def microbatch_begin(self, index: int) -> None:
        self._cut_at(0, index, "F before")

    def action_begin(self, action: Action) -> None:
        """Begin a pipeline action. Before its first block, batches are placed or the loss is differentiated."""
        self._cut_at(action.stage, action.microbatch, f"{action.kind} before")
        # The previous action's phase depends on the schedule.
        if action.kind == "F":
            self.begin_phase("activations", "forward, embedding", EMBEDDING)
        else:
            self.begin_phase("loss", "backward, head and loss", LOSS)

    def action_end(self, action: Action, result: Tensor | None) -> None:
        """Begin the segment between two pipeline actions. Hidden states and gradients between stages are activations,
        even if a collective writes or reads them."""
        # The last stage's objective is a scalar.
        if result is not None and result.dim():
            self.set_category([result], "activations", is_final=True)
        at = self.position._replace(part=action.kind + RESULT, block=None)
        if result is not None and (allocation := self.allocation_of(result)) != NOT_TRACKED:
            self.action_results[at] = allocation
        self.cut(at._replace(part=action.kind + BETWEEN))

    def weight_gradients_begin(self, weights: Sequence[str]) -> None:
        """Begin the weight gradients of a block; those outside of blocks belong to the previous phase."""
        if weights[0].startswith("blocks."):
            self.begin_phase("activations", f"backward, block {weights[0].split('.')[1]}", "")

    def gradient_group_begin(self) -> None:
        self.begin_phase("activations", GRADIENT_SUM, GRADIENTS)

    def stage_reduction_begin(self, stage: int) -> None:
        self.outside_passes = GRADIENTS
        self._cut_at(stage, None, REDUCE)

    def group_reduction_begin(self) -> None:
        self.cut(self.position.next_group(GROUP))

    def stage_reduction_end(self) -> None:
        self._cut_at(self.position.stage, None, REST)

    def tied_sum_begin(self) -> None:
        self.outside_passes = GRADIENTS
        self._cut_at(NOWHERE, None, TIED_SUM)

    def gradients_ready(self, parts: Sequence[nn.Module]) -> None:
        """Begin the optimizer step, and record the storages of gradients."""
        found = dict[GradientKey, int]()
        for place, part in enumerate(parts):
            places = {number: index for index, (number, _) in enumerate(iter_numbered_blocks(part))}
            for number, name, weight in parameters_in_blocks(part):
                if weight.grad is not None:
                    key = GradientKey(place, None if number is None else places[number], name)
                    found[key] = self.allocation_of(weight.grad)
        self.reduced_gradients.append(found)
        self._cut_at(NOWHERE, None, OPTIMIZER_STEP)
        self.outside_passes = NORM

    def update_begin(self, optimizer: Optimizer) -> None:
        """Begin the optimizer's own part of the step, and categorize gradients."""
        trained = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradients = [weight.grad for weight in trained if weight.grad is not None]
        self.set_category(gradients, "gradients")
        self.gradients = self.tracked_bytes(gradients)
        self.begin_phase("optimizer", "optimizer", OPTIMIZER)

    def update_end(self, optimizer: Optimizer) -> None:
        """Categorize the optimizer's state; compute weights follow."""
        state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
        self.set_category(state, "optimizer")
        self.begin_phase("other", "between steps", COMPUTE_WEIGHTS)

    def _cut_at(self, stage: int, micro: int | None, part: str) -> None:
        self.cut(StepPosition(self.position.step, stage, micro, part, None))


def parameters_in_blocks(part: nn.Module) -> Iterator[tuple[int | None, str, nn.Parameter]]:
    """Parameters of a part, each with its block's number, or None outside blocks, and its name there."""
    blocks = [*iter_numbered_blocks(part)]
    owners = {id(weight): (number, name) for number, block in blocks for name, weight in block.named_parameters()}
    for whole_name, weight in part.named_parameters():
        number, name = owners.get(id(weight), (None, whole_name))
        yield number, name, weight


def sum_costs(parts: Iterable[OpCosts], times: int = 1) -> OpCosts:
    """Sum of costs, multiplied by `times`."""
    total = OpCosts()
    for costs in parts:
        total.flops += times * costs.flops
        total.fp8_flops += times * costs.fp8_flops
        total.bytes_moved += times * costs.bytes_moved
        total.host_bytes += times * costs.host_bytes
        total.operators += times * costs.operators
        for key, calls in costs.calls.items():
            # A difference of two runs may have bytes without calls, since one more layer enlarges a message.
            if calls or costs.messages[key]:
                total.messages[key] += times * costs.messages[key]
                total.calls[key] += times * calls
        for kernel, count in costs.kernels.items():
            if count:
                total.kernels[kernel] += times * count
        for name, count in costs.unknown.items():
            if count:
                total.unknown[name] += times * count
    return total


@contextmanager
def track_phases(
    tracker: MemoryTracker, parts: Sequence[nn.Module], compute_weights: Iterable[Tensor] = ()
) -> Iterator[None]:
    """Set a tracker's phase and categories by hooks on modules, for the `with` block."""
    with ExitStack() as hooks:
        for part in parts:
            tracker.set_category(part.parameters(), "parameters")
            tracker.set_category(part.buffers(), "other")
            for hook in _on_part(tracker, part):
                hooks.enter_context(hook)
        tracker.set_category(compute_weights, "gathered parameters")
        yield


def _on_part(tracker: MemoryTracker, part: nn.Module) -> list[Any]:
    blocks = list(iter_numbered_blocks(part))
    head = getattr(part, "head", None)
    ends = "head and loss" if head is not None else "the stage's ends"

    def at(category: str, where: str) -> Callable[..., None]:
        return lambda *_: tracker.begin_phase(category, where, "")

    hooks = [part.register_forward_pre_hook(at("activations", "forward, embedding"), prepend=True)]
    after_blocks = at("loss" if head is not None else "activations", f"backward, {ends}")
    for place, (number, block) in enumerate(blocks):
        hooks.append(block.register_forward_pre_hook(at("activations", f"forward, block {number}"), prepend=True))
        done = after_blocks if place == 0 else None
        hooks.append(block.register_forward_hook(_backward_of(at("activations", f"backward, block {number}"), done)))
        hooks.append(block.register_forward_hook(lambda _, inputs, output: tracker.mark_block_output(output)))
    if head is not None:
        hooks.append(head.register_forward_pre_hook(at("loss", f"forward, {ends}"), prepend=True))
    return hooks


def _backward_of(begins: Callable[[], None], ends: Callable[[], None] | None) -> Callable[..., None]:
    """Forward hook that marks a block's backward pass, from its output's gradient to its input's gradient."""

    def hook(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda _: begins())
            if isinstance(inputs[0], Tensor) and inputs[0].requires_grad:
                inputs[0].register_hook(lambda _: ends() if ends else None)

    return hook
