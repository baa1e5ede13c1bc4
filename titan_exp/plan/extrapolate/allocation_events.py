"""Allocation events of a full step, composed from samples.

A storage released but not allocated by a segment was allocated nearby: in the forward pass of the same block, in the
next block, or in the first micro-batch. It is looked up at the same relative position in the full step; if missing,
`ExtrapolationError` is raised.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from titan_exp.plan.extrapolate.optimizer_step import OptimizerStepTrace
from titan_exp.plan.extrapolate.sample import AllocationSite, Sample, StorageKey
from titan_exp.plan.extrapolate.schedule import ExtrapolationError
from titan_exp.plan.trace.memory_tracker import HOST, MemoryTracker
from titan_exp.plan.trace.segments import NOWHERE, GradientKey, Segment, StepPosition


class EventComposer:
    """Composes the allocation events of a full step, segment by segment.

    `blocks` has the number of blocks by stage; sizes are rounded up to `granularity`; `workspace` is allocated by the
    matmul library's first call in each thread and kept.
    """

    def __init__(self, blocks: Mapping[int, int], granularity: int, workspace: int = 0) -> None:
        self._blocks, self._workspace = blocks, workspace
        self._threads: set[int] = set()
        self.tracker, self._stream = MemoryTracker(granularity, stream=lambda: self._stream), 0
        """Events and size changes so far."""
        self._streams: dict[tuple[int, int], int] = {}
        self._allocated: dict[StepPosition, dict[StorageKey, list[int]]] = {}
        self._passed: dict[tuple[int, int, str], list[int]] = defaultdict(list)
        self._step_allocations: dict[int, int] = {}

    def replay(self, sample: Sample, source: StepPosition, at: StepPosition, block: int | None = None) -> None:
        """Repeat the events of a sample's position `source` at position `at` of the full step.

        `block` is the number of the block in the full model.
        """
        passed = self._passed[at.step, at.stage, at.part[:1]]
        if at.micro is not None and (not passed or passed[-1] != at.micro):
            passed.append(at.micro)
        here: dict[int, int] = {}
        allocated = self._allocated.setdefault(at, defaultdict(list))
        roles, sites = sample.roles, sample.sites
        for segment in sample.segments.get(source, ()):
            if segment.begins_phase:
                self.tracker.where, self.tracker.category = segment.where, segment.category
                if block is not None and ", block " in segment.where:
                    self.tracker.where = f"{segment.where.partition(', block ')[0]}, block {block}"
            for event in segment.events:
                if event.size:
                    role = roles[source.stage, event.stream]
                    number = here[event.allocation] = self.allocate(event.size, event.category, at.stage, role)
                    if event.allocation in sites:
                        allocated[sites[event.allocation].key].append(number)
                elif event.allocation < 0:
                    self._matmul(event.allocation)
                elif event.allocation in here:
                    self.release(here[event.allocation])
                elif event.allocation not in sample.hidden_states:
                    self.release(self.locate(sample, event.allocation, source, at))

    def locate(self, sample: Sample, allocation: int, source: StepPosition, at: StepPosition) -> int:
        """Storage of the full step that corresponds to a sample's allocation.

        Raises:
            ExtrapolationError: no such storage.
        """
        site = sample.sites.get(allocation)
        if site is None:
            raise ExtrapolationError("a storage from before the step is released")
        there = site.position
        position = StepPosition(
            at.step + there.step - source.step,
            at.stage if there.stage == source.stage else there.stage,
            None,
            there.part,
            self._block(sample, there, source, at),
        )
        micros = self._micros(sample, site, source, at)
        places = [(micro, position.block) for micro in micros if there.stage in (source.stage, NOWHERE)]
        if _is_across(sample, there, source):
            # A sum over all blocks is allocated in the last one and released in the first one.
            ends = self._block(sample, there, source._replace(block=None), at)
            others = [(micro, ends) for micro, block in places if block != ends]
            places = others + places if _is_far(sample, there, source) else places + others
        for micro, block in places:
            found = self._allocated.get(position._replace(micro=micro, block=block), {}).get(site.key, [])
            place = site.first if block is None and micro != there.micro else site.place
            if -len(found) <= place < len(found) and (len(micros) == 1 or self.tracker.allocated_bytes(found[place])):
                return found[place]
        raise ExtrapolationError(
            f"{tuple(site.key)} is released at {tuple(at)} but was not allocated at {tuple(position)} of {micros}"
        )

    def allocate(self, size: int, category: str, stage: int = NOWHERE, role: int = 0) -> int:
        """Allocate a storage; returns its number. `role` is as in `Sample.roles`."""
        on_host = role == HOST
        self._stream = self._streams.setdefault((stage, role), len(self._streams) + 1) if role > 0 else 0
        return self.tracker.allocate(size, category or self.tracker.category, on_host=on_host)

    def release(self, number: int) -> None:
        """Release a storage.

        Raises:
            ExtrapolationError: it was released before.
        """
        if not self.tracker.allocated_bytes(number):
            raise ExtrapolationError("a storage is released twice")
        self.tracker.free(number)

    def add_setup(self, optimizer_step: OptimizerStepTrace) -> None:
        """Add the setup events before the first step."""
        for segment in optimizer_step.setup:
            self._replay(segment, {})

    def add_optimizer_step(
        self,
        optimizer_step: OptimizerStepTrace,
        step: int,
        gradients: Mapping[GradientKey, int],
        metrics: Sequence[int],
    ) -> int:
        """Add an optimizer step of a rank with the same layers; returns the bytes of reduced gradients.

        `gradients` has the storages of gradients, which parameters may share; `metrics` those of the
        step's metrics in order.

        Raises:
            ExtrapolationError: the optimizer step reads more than gradients and metrics.
        """
        others = optimizer_step.others[step]
        if len(others) != len(metrics):
            raise ExtrapolationError("the optimizer step reads more than gradients and metrics")
        inputs = {allocation: gradients[name] for allocation, name in optimizer_step.gradients[step].items()}
        inputs |= dict(zip(others, metrics, strict=True))
        shares = Counter([*gradients.values(), *metrics])
        size = sum(map(self.tracker.allocated_bytes, set(gradients.values())))
        for segment in optimizer_step.ends[step]:
            self._replay(segment, inputs, shares)
        return size

    def _replay(self, segment: Segment, inputs: Mapping[int, int], shares: Counter[int] | None = None) -> None:
        if segment.begins_phase:
            self.tracker.where, self.tracker.category = segment.where, segment.category
        for event in segment.events:
            if event.allocation < 0:
                self._matmul(event.allocation)
            elif event.size:
                if event.stream > 0:
                    raise ExtrapolationError("the optimizer step uses a second stream")
                self._step_allocations[event.allocation] = self.allocate(event.size, event.category, role=event.stream)
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
            self.allocate(self._workspace, "workspaces")

    def _micros(
        self, sample: Sample, site: AllocationSite, source: StepPosition, at: StepPosition
    ) -> Sequence[int | None]:
        """Micro-batch of an allocation, or several, of which it is the first that still holds it."""
        there = site.position
        if there.micro is not None and source.micro is not None:
            is_later = there.micro > source.micro
            if is_later or site.key.category == "gathered parameters":
                # Passes free parameters that any other gathered: one at a time has them.
                return [at.micro, *self._passed[at.step, at.stage, there.part[:1]][::-1]]
        return [self._micro(sample, there, source, at)]

    def _micro(self, sample: Sample, there: StepPosition, source: StepPosition, at: StepPosition) -> int | None:
        if there.micro is None:
            return None
        passed = self._passed[at.step + there.step - source.step, at.stage, there.part[:1]]
        if source.micro is None:
            if not passed or there.micro not in (0, sample.last_micro):
                raise ExtrapolationError("storages of every micro-batch are released at once")
            return passed[0] if there.micro == 0 else passed[-1]
        if there.micro == source.micro:
            return at.micro
        if there.micro == 0 and source.micro == sample.last_micro:
            return passed[0]
        # A repeated micro-batch refers to the previous one.
        place = passed.index(at.micro) if at.micro in passed else len(passed)
        if there.micro != source.micro - 1 or place == 0:
            raise ExtrapolationError("a micro-batch refers to another than the first or the one before")
        return passed[place - 1]

    def _block(self, sample: Sample, there: StepPosition, source: StepPosition, at: StepPosition) -> int | None:
        if there.block is None or there.block < 0:
            return there.block
        if source.block is not None and at.block is not None and at.block >= 0:
            return at.block + there.block - source.block
        distinct, blocks = sample.distinct_of(there.stage), sample.blocks[there.stage]
        few, alike = blocks - distinct - sample.last_of(there.stage), there.block - distinct
        if alike < sample.edge or blocks == self._blocks[at.stage]:
            return there.block
        if alike < few - sample.edge:
            raise ExtrapolationError("storages of every block are released at once")
        return self._blocks[at.stage] + there.block - blocks


def _is_across(sample: Sample, there: StepPosition, source: StepPosition) -> bool:
    """True if repeated blocks lie between two blocks of a sampled stage."""
    if there.stage != source.stage or there.block is None or source.block is None or min(there.block, source.block) < 0:
        return False
    first, last = sorted((there.block, source.block))
    distinct, end = sample.distinct_of(there.stage), sample.blocks[there.stage] - sample.last_of(there.stage)
    return first < distinct + sample.edge <= end - sample.edge <= last


def _is_far(sample: Sample, there: StepPosition, source: StepPosition) -> bool:
    """True if no block refers to another one at this distance by its place among repeated blocks."""
    assert there.block is not None, "across blocks"
    assert source.block is not None, "across blocks"
    return abs(there.block - source.block) > sample.edge
