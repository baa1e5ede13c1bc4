"""Allocation events of a full step, composed from those of small samples.

A storage that a segment releases without allocating it was allocated nearby: in the forward pass of the same block, in
the next block, in the first micro-batch. It is looked up at the same relative position in the full step. Where it is
not there, `ExtrapolationError` is raised.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from titan_exp.plan.cuda.caching_allocator import MIN_BLOCK, Event
from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.plan.trace.memory_tracker import MemoryTracker, Storage
from titan_exp.plan.trace.segments import EventSegment

NOWHERE = -1
"""Stage number outside of all stages, for example of the loss."""


class ExtrapolationError(Exception):
    """A storage is not where the sample has it: the full step has to be traced."""


class StepPosition(NamedTuple):
    """Position in a step."""

    step: int
    """0 or 1."""
    stage: int
    """Pipeline stage."""
    micro: int | None
    """Micro-batch; None for what runs once per step."""
    part: str
    """Part of the step; begins with F or B in pipeline actions."""
    block: int | None
    """Block of the stage; None outside of blocks, -1 for the stage's other parameters as a group."""


class StorageKey(NamedTuple):
    """Distinguishes storages of a segment, together with their order."""

    size: int
    role: int
    category: str
    output: bool


class AllocationSite(NamedTuple):
    """Allocation of a storage that outlives its segment."""

    position: StepPosition
    kind: StorageKey
    place: int
    """Index among storages of the same kind."""


@dataclass(frozen=True)
class SampleEvents:
    """Allocation events of two steps of a sample."""

    event_segments: Mapping[StepPosition, Sequence[EventSegment]]
    """Events by position, in order."""
    blocks: Mapping[int, int]
    """Number of blocks by stage."""
    last: int | None
    """The last micro-batch; None where it may be repeated."""
    gradients: Sequence[Mapping[str, int]]
    """Allocations of reduced gradients by parameter name, for each step."""
    handed_over: frozenset[int] = frozenset()
    """Allocations of hidden states that stages hand to each other."""
    results: Mapping[StepPosition, int] = field(default_factory=dict)
    """Allocations of action results, by position."""
    roles: Mapping[tuple[int, int], int] = field(init=False)
    """Index of a stream among its stage's, by stage and number, in order of first use."""
    sites: Mapping[int, AllocationSite] = field(init=False)
    """Allocations that outlive their segments."""

    def __post_init__(self) -> None:
        roles: dict[tuple[int, int], int] = {}
        used: Counter[int] = Counter()
        sites: dict[int, AllocationSite] = {}
        for position, event_segments in self.event_segments.items():
            events = [event for segment in event_segments for event in segment.events]
            released = {event.allocation for event in events if not event.size}
            counts: Counter[StorageKey] = Counter()
            for event in events:
                if event.size and (position.stage, event.stream) not in roles:
                    roles[position.stage, event.stream] = used[position.stage] + 1 if event.stream else 0
                    used[position.stage] += bool(event.stream)
                if event.size and event.allocation not in released:
                    kind = StorageKey(event.size, roles[position.stage, event.stream], event.category, event.output)
                    sites[event.allocation] = AllocationSite(position, kind, counts[kind])
                    counts[kind] += 1
        object.__setattr__(self, "roles", roles)
        object.__setattr__(self, "sites", sites)


@dataclass(frozen=True)
class OptimizerStepEvents:
    """Allocation events of setup and of two optimizer steps of a rank with all layers, traced without passes."""

    setup: Sequence[EventSegment]
    """Before the first step."""
    ends: Sequence[Sequence[EventSegment]]
    """Segments of each optimizer step, from reduced gradients to the next step."""
    gradients: Sequence[Mapping[int, str]]
    """Parameter names by the allocations of their placeholder gradients, for each step."""
    losses: Sequence[int]
    """Allocation of the placeholder loss, for each step."""
    layers: Sequence[int]
    """Numbers of its layers in the full model."""
    costs: OpCosts
    """Costs of an optimizer step."""
    parameters: int
    """Parameters of the full model."""
    flops_per_token: float
    """FLOPs of a training step per token, of the full model."""


class EventComposer:
    """Composes the allocation events of a full step, segment by segment.

    Args:
        blocks: number of blocks by stage.
        workspace: bytes that the matmul library allocates on its first call in each thread, and keeps.
    """

    def __init__(self, blocks: Mapping[int, int], workspace: int = 0) -> None:
        self._blocks, self._workspace = blocks, workspace
        self._threads: set[int] = set()
        self._events: list[Event] = []
        self._changes: list[tuple[Storage, int, str]] = []
        self._alive: dict[int, Storage] = {}
        self._streams: dict[tuple[int, int], int] = {}
        self._allocated: dict[StepPosition, dict[StorageKey, list[int]]] = {}
        self._passed: dict[tuple[int, int, str], list[int]] = defaultdict(list)
        self._step_allocations: dict[int, int] = {}
        self._count, self._begun, self._allocated_before = 0, 0, 0
        self.where = "before the first step"
        """Phase of the step."""
        self._category = "other"

    def replay(self, sample: SampleEvents, source: StepPosition, at: StepPosition, block: int | None = None) -> None:
        """Repeat the events of a sample's position `source` at a position of the full step.

        `block` is the number of the block in the full model.
        """
        passed = self._passed[at.step, at.stage, at.part[:1]]
        if at.micro is not None and (not passed or passed[-1] != at.micro):
            passed.append(at.micro)
        here: dict[int, int] = {}
        allocated = self._allocated.setdefault(at, defaultdict(list))
        roles, sites, handed = sample.roles, sample.sites, sample.handed_over
        for segment in sample.event_segments.get(source, ()):
            if segment.where is not None:
                self.where, self._category = segment.where, segment.category
                if block is not None and ", block " in segment.where:
                    self.where = f"{segment.where.partition(', block ')[0]}, block {block}"
            for event in segment.events:
                if event.size:
                    role = roles[source.stage, event.stream]
                    number = here[event.allocation] = self.allocate(event.size, event.category, at.stage, role)
                    if event.allocation in sites:
                        allocated[sites[event.allocation].kind].append(number)
                elif event.allocation < 0:
                    self._matmul(event.allocation)
                elif event.allocation in here:
                    self.release(here[event.allocation])
                elif event.allocation not in handed:
                    self.release(self.locate(sample, event.allocation, source, at))

    def locate(self, sample: SampleEvents, allocation: int, source: StepPosition, at: StepPosition) -> int:
        """The storage that corresponds to one of a sample.

        Raises:
            ExtrapolationError: there is none.
        """
        site = sample.sites.get(allocation)
        if site is None:
            raise ExtrapolationError("a storage from before the step is released")
        there = site.position
        position = StepPosition(
            at.step + there.step - source.step,
            at.stage if there.stage == source.stage else there.stage,
            self._micro(sample, there, source, at),
            there.part,
            self._block(sample, there, source, at),
        )
        found = self._allocated.get(position, {}).get(site.kind, [])
        if there.stage not in (source.stage, NOWHERE) or len(found) <= site.place:
            raise ExtrapolationError(
                f"{tuple(site.kind)} is released at {tuple(at)} but was not allocated at {tuple(position)}"
            )
        return found[site.place]

    def allocate(self, size: int, category: str, stage: int = NOWHERE, role: int = 0) -> int:
        """Allocate a storage; returns its number."""
        stream = self._streams.setdefault((stage, role), len(self._streams) + 1) if role else 0
        self._count += 1
        self._alive[self._count] = storage = Storage(category or self._category, self._count, size)
        self._events.append(Event(self._count, size, stream))
        self._changes.append((storage, size, self.where))
        return self._count

    def release(self, number: int) -> None:
        """Release a storage.

        Raises:
            ExtrapolationError: it is released already.
        """
        storage = self._alive.pop(number, None)
        if storage is None:
            raise ExtrapolationError("a storage is released twice")
        self._events.append(Event(number, 0, 0))
        self._changes.append((storage, -storage.size, self.where))

    def add_setup(self, optimizer_step: OptimizerStepEvents) -> None:
        """Add the events before the first step."""
        for segment in optimizer_step.setup:
            self._replay(segment, {})

    def add_optimizer_step(
        self, optimizer_step: OptimizerStepEvents, step: int, gradients: Mapping[str, int], loss: int
    ) -> int:
        """Add an optimizer step; returns the bytes of reduced gradients.

        Args:
            optimizer_step: events of a rank with the same layers.
            step: 0 or 1.
            gradients: storages of reduced gradients by parameter name; several may share one.
            loss: the storage of the loss.
        """
        shares = Counter(gradients.values())
        inputs = {allocation: gradients[name] for allocation, name in optimizer_step.gradients[step].items()}
        inputs[optimizer_step.losses[step]] = loss
        shares[loss] = 1
        size = sum(self._alive[number].size for number in set(gradients.values()))
        for segment in optimizer_step.ends[step]:
            self._replay(segment, inputs, shares)
        return size

    def begin_step(self) -> None:
        """Begin the second step."""
        self._changes = [(storage, storage.size, self.where) for storage in self._alive.values()]
        self._allocated_before, self._begun = len(self._changes), len(self._events)

    def result(self) -> tuple[MemoryTracker, list[Event], list[Event]]:
        """Tracker of the second step, events before it, events of it."""
        tracker = MemoryTracker.from_changes(self._changes, self._allocated_before, list(self._alive.values()))
        return tracker, self._events[: self._begun], self._events[self._begun :]

    def _replay(self, segment: EventSegment, inputs: Mapping[int, int], shares: Counter[int] | None = None) -> None:
        if segment.where is not None:
            self.where, self._category = segment.where, segment.category
        for event in segment.events:
            if event.allocation < 0:
                self._matmul(event.allocation)
            elif event.size:
                if event.stream:
                    raise ExtrapolationError("the optimizer step uses a second stream")
                self._step_allocations[event.allocation] = self.allocate(event.size, event.category)
            elif event.allocation in self._step_allocations:
                self.release(self._step_allocations[event.allocation])
            elif event.allocation in inputs and shares is not None:
                number = inputs[event.allocation]
                shares[number] -= 1
                if not shares[number]:
                    self.release(number)
            else:
                raise ExtrapolationError("the optimizer step releases a storage that the passes do not leave")

    def _matmul(self, mark: int) -> None:
        if self._workspace and mark not in self._threads:
            self._threads.add(mark)
            self.allocate(-(-self._workspace // MIN_BLOCK) * MIN_BLOCK, "workspaces")

    def _micro(self, sample: SampleEvents, there: StepPosition, source: StepPosition, at: StepPosition) -> int | None:
        if there.micro is None:
            return None
        passed = self._passed[at.step + there.step - source.step, at.stage, there.part[:1]]
        if source.micro is None:
            if not passed or there.micro not in (0, sample.last):
                raise ExtrapolationError("storages of every micro-batch are released at once")
            return passed[0] if there.micro == 0 else passed[-1]
        if there.micro == source.micro:
            return at.micro
        if there.micro == 0 and source.micro == sample.last:
            return passed[0]
        # A repeated micro-batch refers to the one before it.
        place = passed.index(at.micro) if at.micro in passed else len(passed)
        if there.micro != source.micro - 1 or place == 0:
            raise ExtrapolationError("a micro-batch refers to another than the first or the one before")
        return passed[place - 1]

    def _block(self, sample: SampleEvents, there: StepPosition, source: StepPosition, at: StepPosition) -> int | None:
        if there.block is None or there.block < 0:
            return there.block
        if source.block is not None and at.block is not None:
            return at.block + there.block - source.block
        few = sample.blocks[there.stage]
        if 2 * there.block + 1 == few > 1:
            raise ExtrapolationError("storages of every block are released at once")
        if 2 * there.block < few:
            return there.block
        return self._blocks[at.stage] + there.block - few
