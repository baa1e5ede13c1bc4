"""Births and deaths of storages in a large step, woven from the scenes of small runs.

A storage that dies in a scene where it was not born was born in one near by: in the forward pass of the same block, in
the neighbouring block, in the first micro-batch. What a small run shows of that holds at the same place of a large one.
Where it turns out not to, `ExtrapolationError` is raised, and nothing is guessed.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from titan_exp.plan.cuda.caching_allocator import MIN_BLOCK, Event
from titan_exp.plan.extrapolate.segments import EventSegment
from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.plan.trace.memory_tracker import MemoryTracker, Storage

NOWHERE = -1
"""Stage of what belongs to none, such as the loss."""


class ExtrapolationError(Exception):
    """A storage's birth is not where the small run has it, so that only tracing the whole step tells."""


class StepPosition(NamedTuple):
    """A place in a step."""

    step: int
    """0 of the first, 1 of the second."""
    stage: int
    """Of the pipeline."""
    micro: int | None
    """Which micro-batch; None of what is done once."""
    part: str
    """What is done; begins with F or B in a pipeline's forward and backward passes."""
    block: int | None
    """Which block of the stage; None where it is none, -1 where it is all else that a stage has, as if it were one."""


class StorageKey(NamedTuple):
    """By what storages of a scene are told apart, and by their order."""

    size: int
    role: int
    category: str
    output: bool


class AllocationSite(NamedTuple):
    """Where a storage was born that survives its scene."""

    spot: StepPosition
    kind: StorageKey
    place: int
    """Which of those of its kind."""


@dataclass(frozen=True)
class SampleEvents:
    """Two steps of a small run."""

    scenes: Mapping[StepPosition, Sequence[EventSegment]]
    """What happens where, in order."""
    blocks: Mapping[int, int]
    """How many blocks a stage has."""
    last: int | None
    """The micro-batch after which no other comes; None where the last one may be repeated."""
    gradients: Sequence[Mapping[str, int]]
    """Of each step: births of reduced gradients, by the names of their parameters."""
    handed: frozenset[int] = frozenset()
    """Births of hidden states that are handed from stage to stage."""
    made: Mapping[StepPosition, int] = field(default_factory=dict)
    """Births of those that a pass makes."""
    roles: Mapping[tuple[int, int], int] = field(init=False)
    """Which of its stage's streams one is, by stage and number, in the order in which they are first used."""
    origins: Mapping[int, AllocationSite] = field(init=False)
    """Of births that survive their scenes."""

    def __post_init__(self) -> None:
        roles: dict[tuple[int, int], int] = {}
        used: Counter[int] = Counter()
        origins: dict[int, AllocationSite] = {}
        for spot, scenes in self.scenes.items():
            told = [it for scene in scenes for it in scene.told]
            gone = {it.birth for it in told if not it.size}
            counts: Counter[StorageKey] = Counter()
            for it in told:
                if it.size and (spot.stage, it.stream) not in roles:
                    roles[spot.stage, it.stream] = used[spot.stage] + 1 if it.stream else 0
                    used[spot.stage] += bool(it.stream)
                if it.size and it.birth not in gone:
                    kind = StorageKey(it.size, roles[spot.stage, it.stream], it.category, it.output)
                    origins[it.birth] = AllocationSite(spot, kind, counts[kind])
                    counts[kind] += 1
        object.__setattr__(self, "roles", roles)
        object.__setattr__(self, "origins", origins)


@dataclass(frozen=True)
class OptimizerStepEvents:
    """Build and ends of two steps of a rank that has all layers, and no passes."""

    build: Sequence[EventSegment]
    """Before the first step."""
    ends: Sequence[Sequence[EventSegment]]
    """Of each step, from where gradients are reduced to the next one."""
    gradients: Sequence[Mapping[int, str]]
    """Of each step: names of parameters by the births of what stands for their gradients."""
    losses: Sequence[int]
    """Of each step: the birth of what stands for the loss."""
    layers: Sequence[int]
    """Numbers of its layers in the whole model, in order."""
    costs: OpCosts
    """Operations, bytes and messages of the end of a step."""
    parameters: int
    """Of the whole model."""
    flops_per_token: float
    """Operations of a training step per token, of the whole model."""


class EventComposer:
    """Puts a story together, scene by scene.

    Args:
        blocks: how many blocks each stage has.
        workspace: bytes that the library of matmuls takes on its first call in each thread, and keeps.
    """

    def __init__(self, blocks: Mapping[int, int], workspace: int = 0) -> None:
        self._blocks, self._workspace = blocks, workspace
        self._threads: set[int] = set()
        self._events: list[Event] = []
        self._changes: list[tuple[Storage, int, str]] = []
        self._alive: dict[int, Storage] = {}
        self._streams: dict[tuple[int, int], int] = {}
        self._born: dict[StepPosition, dict[StorageKey, list[int]]] = {}
        self._passed: dict[tuple[int, int, str], list[int]] = defaultdict(list)
        self._of_tail: dict[int, int] = {}
        self._made, self._begun, self._standing = 0, 0, 0
        self.where = "before the first step"
        """What is being computed, in words."""
        self._category = "other"

    def play(self, sample: SampleEvents, source: StepPosition, at: StepPosition, block: int | None = None) -> None:
        """Let happen at a spot what happens in a sample.

        Args:
            sample: the small run.
            source: where it happens in it.
            at: where it is to happen.
            block: number of the spot's block in the whole model.
        """
        passed = self._passed[at.step, at.stage, at.part[:1]]
        if at.micro is not None and (not passed or passed[-1] != at.micro):
            passed.append(at.micro)
        here: dict[int, int] = {}
        born = self._born.setdefault(at, defaultdict(list))
        roles, origins, handed = sample.roles, sample.origins, sample.handed
        for scene in sample.scenes.get(source, ()):
            if scene.where is not None:
                self.where, self._category = scene.where, scene.category
                if block is not None and ", block " in scene.where:
                    self.where = f"{scene.where.partition(', block ')[0]}, block {block}"
            for it in scene.told:
                if it.size:
                    role = roles[source.stage, it.stream]
                    number = here[it.birth] = self.birth(it.size, it.category, at.stage, role)
                    if it.birth in origins:
                        born[origins[it.birth].kind].append(number)
                elif it.birth < 0:
                    self._matmul(it.birth)
                elif it.birth in here:
                    self.death(here[it.birth])
                elif it.birth not in handed:
                    self.death(self.find(sample, it.birth, source, at))

    def find(self, sample: SampleEvents, birth: int, source: StepPosition, at: StepPosition) -> int:
        """The storage that is at a spot what one is in a sample.

        Raises:
            Unwoven: there is none.
        """
        origin = sample.origins.get(birth)
        if origin is None:
            raise ExtrapolationError("of what was there before the step something goes")
        there = origin.spot
        spot = StepPosition(
            at.step + there.step - source.step,
            at.stage if there.stage == source.stage else there.stage,
            self._micro(sample, there, source, at),
            there.part,
            self._block(sample, there, source, at),
        )
        found = self._born.get(spot, {}).get(origin.kind, [])
        if there.stage not in (source.stage, NOWHERE) or len(found) <= origin.place:
            raise ExtrapolationError(f"at {tuple(at)} {tuple(origin.kind)} goes that was not born at {tuple(spot)}")
        return found[origin.place]

    def birth(self, size: int, category: str, stage: int = NOWHERE, role: int = 0) -> int:
        """A storage is born; returns its number."""
        stream = self._streams.setdefault((stage, role), len(self._streams) + 1) if role else 0
        self._made += 1
        self._alive[self._made] = storage = Storage(category or self._category, self._made, size)
        self._events.append(Event(self._made, size, stream))
        self._changes.append((storage, size, self.where))
        return self._made

    def death(self, number: int) -> None:
        """A storage dies.

        Raises:
            Unwoven: it has already.
        """
        storage = self._alive.pop(number, None)
        if storage is None:
            raise ExtrapolationError("a storage dies twice")
        self._events.append(Event(number, 0, 0))
        self._changes.append((storage, -storage.size, self.where))

    def build(self, tail: OptimizerStepEvents) -> None:
        """What is there before the first step."""
        for scene in tail.build:
            self._tell(scene, {})

    def end(self, tail: OptimizerStepEvents, step: int, gradients: Mapping[str, int], loss: int) -> int:
        """The end of a step; returns the bytes of reduced gradients.

        Args:
            tail: of a rank with the same layers.
            step: 0 or 1.
            gradients: storages of reduced gradients, by the names of their parameters; several may share one.
            loss: its storage.
        """
        shares = Counter(gradients.values())
        stand_ins = {birth: gradients[name] for birth, name in tail.gradients[step].items()}
        stand_ins[tail.losses[step]] = loss
        shares[loss] = 1
        size = sum(self._alive[number].size for number in set(gradients.values()))
        for scene in tail.ends[step]:
            self._tell(scene, stand_ins, shares)
        return size

    def begin(self) -> None:
        """Here the second step begins."""
        self._changes = [(storage, storage.size, self.where) for storage in self._alive.values()]
        self._standing, self._begun = len(self._changes), len(self._events)

    def told(self) -> tuple[MemoryTracker, list[Event], list[Event]]:
        """The step as a ledger has it, and events up to the step and of it."""
        ledger = MemoryTracker.retold(self._changes, self._standing, list(self._alive.values()))
        return ledger, self._events[: self._begun], self._events[self._begun :]

    def _tell(self, scene: EventSegment, stand_ins: Mapping[int, int], shares: Counter[int] | None = None) -> None:
        if scene.where is not None:
            self.where, self._category = scene.where, scene.category
        for it in scene.told:
            if it.birth < 0:
                self._matmul(it.birth)
            elif it.size:
                # Its one stream is the first.
                if it.stream:
                    raise ExtrapolationError("the end of a step works on a stream of its own")
                self._of_tail[it.birth] = self.birth(it.size, it.category)
            elif it.birth in self._of_tail:
                self.death(self._of_tail[it.birth])
            elif it.birth in stand_ins and shares is not None:
                number = stand_ins[it.birth]
                shares[number] -= 1
                if not shares[number]:
                    self.death(number)
            else:
                raise ExtrapolationError("the end of a step frees what the passes do not leave")

    def _matmul(self, mark: int) -> None:
        if self._workspace and mark not in self._threads:
            self._threads.add(mark)
            self.birth(-(-self._workspace // MIN_BLOCK) * MIN_BLOCK, "workspaces")

    def _micro(self, sample: SampleEvents, there: StepPosition, source: StepPosition, at: StepPosition) -> int | None:
        if there.micro is None:
            return None
        passed = self._passed[at.step + there.step - source.step, at.stage, there.part[:1]]
        if source.micro is None:
            if not passed or there.micro not in (0, sample.last):
                raise ExtrapolationError("of every micro-batch something is freed at once")
            return passed[0] if there.micro == 0 else passed[-1]
        if there.micro == source.micro:
            return at.micro
        if there.micro == 0 and source.micro == sample.last:
            return passed[0]
        # What is repeated for each micro-batch looks back at the one before.
        place = passed.index(at.micro) if at.micro in passed else len(passed)
        if there.micro != source.micro - 1 or place == 0:
            raise ExtrapolationError("a micro-batch looks back at another than the first and the one before")
        return passed[place - 1]

    def _block(self, sample: SampleEvents, there: StepPosition, source: StepPosition, at: StepPosition) -> int | None:
        if there.block is None or there.block < 0:
            return there.block
        if source.block is not None and at.block is not None:
            return at.block + there.block - source.block
        few = sample.blocks[there.stage]
        if 2 * there.block + 1 == few > 1:
            raise ExtrapolationError("what every block has is freed at once")
        if 2 * there.block < few:
            return there.block
        return self._blocks[at.stage] + there.block - few
