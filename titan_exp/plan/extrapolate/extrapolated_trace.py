"""Extrapolated traces: full steps, composed from samples of a small model, that equal full traces in every allocation.

A storage released but not allocated by a segment was allocated nearby: in the forward pass of the same block, in the
next block, or in the first micro-batch. It is looked up at the same relative position in the full step; if missing,
`ExtrapolationError` is raised. Pipeline ranks share the samples, and ranks with equal layer counts share setup and
optimizer step.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.plan.caching_allocator import MIN_BLOCK
from titan_exp.plan.extrapolate import schedule
from titan_exp.plan.extrapolate.eligibility import recompute_modes
from titan_exp.plan.extrapolate.optimizer_step import OptimizerStepTrace, trace_optimizer_step
from titan_exp.plan.extrapolate.sample import AllocationSite, Sample, Samples, StorageKey, take_sample
from titan_exp.plan.extrapolate.schedule import ExtrapolationError, SampledPart, ScheduledAction, StageShape
from titan_exp.plan.planner_processes import Call
from titan_exp.plan.roofline import axis_ranks
from titan_exp.plan.trace import segments as step_parts
from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.plan.trace.memory_tracker import HOST, MemoryTracker
from titan_exp.plan.trace.segments import NOWHERE, PROLOGUES, RESULT, GradientKey, Segment, StepPosition, sum_costs
from titan_exp.plan.trace.trace_step import HostUsage, Trace, pipeline_ranks


class EventComposer:
    """Composes the allocation events of a full step, segment by segment. `blocks` has the number of blocks by stage;
    sizes are rounded up to `granularity`; the matmul library keeps `workspace` from its first call in a thread on."""

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
        """Repeat a sample's events at `source` at `at` of the full step; `block` is the block's number in its model."""
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
        """Storage of the full step that corresponds to a sample's allocation, else raises ExtrapolationError."""
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
        if distance := _distance_across(sample, there, source):
            # A sum over all blocks is allocated in the last one and released in the first one.
            ends = self._block(sample, there, source._replace(block=None), at)
            others = [(micro, ends) for micro, block in places if block != ends]
            # Beyond the edge, a block cannot refer to another by its place among repeated blocks.
            places = others + places if distance > sample.edge else places + others
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
        """Release a storage. Raises ExtrapolationError if it was released before."""
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
        """Add an optimizer step of a rank with the same layers; returns the bytes of reduced gradients. `gradients` has
        the storages of gradients, which parameters may share; `metrics` has the storages of the step's metrics, in
        order. Raises ExtrapolationError if the optimizer step reads more than these."""
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
        """Micro-batches to look for an allocation in; it belongs to the first one that still holds it."""
        there = site.position
        if there.micro is not None and source.micro is not None:
            is_later = there.micro > source.micro
            if is_later or site.key.category == "gathered parameters":
                # A pass frees parameters that any other pass gathered, so one at a time holds them.
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


def _distance_across(sample: Sample, there: StepPosition, source: StepPosition) -> int:
    """Distance of two blocks of a sampled stage if the repeated blocks lie between them, else 0."""
    if there.stage != source.stage or there.block is None or source.block is None or min(there.block, source.block) < 0:
        return 0
    first, last = sorted((there.block, source.block))
    distinct, end = sample.distinct_of(there.stage), sample.blocks[there.stage] - sample.last_of(there.stage)
    return last - first if first < distinct + sample.edge <= end - sample.edge <= last else 0


MAX_MICRO_BATCHES = 8  # maximum number of composed micro-batches without a pipeline; further ones repeat


@dataclass
class TraceExtrapolator:
    """Extrapolates the traces of a run's ranks. Samples are traced on first use."""

    experiment: Experiment
    cuda: bool
    matmul_workspace: int = 0
    _optimizer_steps: dict[object, Call[OptimizerStepTrace]] = field(default_factory=dict)

    def trace(self, pipeline_rank: int) -> Trace:
        """Trace of a rank's step. Raises ExtrapolationError if the samples do not determine it, and UserError if the
        step calls an unknown operator."""
        layout, stages = ResolvedLayout.of(self.experiment), schedule.stages_of(self.experiment, pipeline_rank)
        samples, optimizer_step = self.samples, self.optimizer_step(pipeline_rank)
        sample, number = next(iter(samples.values()))[0], layout.gradient_accumulation
        # The first step, which creates the optimizer state, has as few micro-batches as possible.
        if layout.parallelism.pp == 1:
            simulation = schedule.microbatch_loop(number, sample.micro_batches)
            composed = schedule.microbatch_loop(min(number, MAX_MICRO_BATCHES), sample.micro_batches)
            simulations = [schedule.microbatch_loop(1, 1), composed]
        else:
            simulate = partial(schedule.simulate_rank, layout, pipeline_rank, sends_complete=sample.sends_complete)
            simulation = simulate()
            simulations = [simulate(passes=1), simulation]
        blocks, granularity = {stage.number: len(stage.modes) for stage in stages}, MIN_BLOCK if self.cuda else 1
        composer, gradients = EventComposer(blocks, granularity, self.matmul_workspace), 0
        rank, tracker = _Rank(composer, samples, stages), composer.tracker
        composer.add_setup(optimizer_step)
        for step, simulated in enumerate(simulations):
            if step:
                tracker.begin_step()
            gradients = rank.step(step, simulated, optimizer_step)
        costs = sum_costs([rank.costs(simulation), optimizer_step.costs])
        axes = axis_ranks(layout.parallelism, pipeline_rank, costs)
        saved = tuple(
            dict.fromkeys(line for each in samples.values() for sample in each for line in sample.saved_calls)
        )
        kept = optimizer_step.on_host
        host = None if kept is None else HostUsage(tracker.peak(on_host=True), kept)
        peak, timeline = tracker.peak(), tracker.timeline()
        return Trace(peak, tracker.allocated(), gradients, costs, axes, timeline, *tracker.events(), host, saved)

    def trace_optimizer_steps(
        self,
        pipeline_ranks: Collection[int],
        begin: Callable[[Callable[[], OptimizerStepTrace]], Call[OptimizerStepTrace]],
    ) -> None:
        """Begin to trace the optimizer steps of several ranks by `begin`; does nothing if they share one."""
        calls = {self._shape(rank): self._tracing(rank) for rank in pipeline_ranks}
        if len(calls) > 1:
            self._optimizer_steps |= {shape: begin(call) for shape, call in calls.items()}

    def optimizer_step(self, pipeline_rank: int) -> OptimizerStepTrace:
        """Trace of setup and optimizer steps, shared by ranks with equal layer counts."""
        shape = self._shape(pipeline_rank)
        if shape not in self._optimizer_steps:
            self._optimizer_steps[shape] = Call(None, self._tracing(pipeline_rank))
        return self._optimizer_steps[shape].result()

    def _shape(self, pipeline_rank: int) -> object:
        return tuple((stage.kind, len(stage.modes)) for stage in schedule.stages_of(self.experiment, pipeline_rank))

    def _tracing(self, pipeline_rank: int) -> Callable[[], OptimizerStepTrace]:
        rank = pipeline_ranks(ResolvedLayout.of(self.experiment))[pipeline_rank]
        return partial(trace_optimizer_step, self.experiment, rank, cuda=self.cuda)

    @cached_property
    def samples(self) -> Samples:
        """Samples of the run's stages."""
        run, keys = self.experiment, dict.fromkeys(schedule.sample_keys(self.experiment))
        modes, _ = recompute_modes(run.activation_checkpoint, run.model.layers)
        return {key: [take_sample(run, mode, key, cuda=self.cuda) for mode in modes] for key in keys}


class _Rank:
    def __init__(self, composer: EventComposer, samples: Samples, stages: Sequence[StageShape]) -> None:
        self._composer, self._stages = composer, {stage.number: stage for stage in stages}
        self._samples = {stage.number: samples[stage.sample] for stage in stages}
        self._first = self._samples[stages[0].number][0]

    def step(self, step: int, simulation: schedule.ScheduleSimulation, optimizer_step: OptimizerStepTrace) -> int:
        composer = self._composer
        composer.replay(self._first, PROLOGUES[step], PROLOGUES[step])
        hidden: dict[int, int] = {}
        during, made, released = False, list[int](), list[int]()
        for event in simulation.events:
            if event.what == "begin":
                during, made, released = True, [], []
                scheduled = simulation.actions[event.which]
                number, kind, micro = scheduled.action
                for part in self._samples[number][0].action_parts(self._stages[number], kind):
                    self._replay(StepPosition(step, number, micro, part.part, part.place), part, scheduled.sampled)
            elif event.what == "end":
                during = False
                for number in made:
                    hidden[number] = self._result(step, simulation.actions[event.which])
                for number in released:
                    composer.release(hidden[number])
            elif during:
                (made if event.what == "allocate" else released).append(event.which)
            elif event.what == "allocate":
                hidden[event.which] = composer.allocate(*self._first.hidden[event.kind])
            else:
                composer.release(hidden[event.which])
        for stage in self._stages.values():
            for part in self._samples[stage.number][0].reduction_parts(stage):
                self._replay(StepPosition(step, stage.number, None, part.part, part.place), part, None)
        gradients = {key: self._gradient(step, key) for key in optimizer_step.gradients[step].values()}
        at = PROLOGUES[step]
        metrics = [composer.locate(self._first, number, at, at) for number in self._first.metrics(step)]
        return composer.add_optimizer_step(optimizer_step, step, gradients, metrics)

    def costs(self, simulation: schedule.ScheduleSimulation) -> OpCosts:
        """Costs of a step before the optimizer step: prologue, actions, messages and gradient reductions."""

        def of_parts(stage: StageShape, parts: Iterable[SampledPart], micro: int | None) -> OpCosts:
            found = self._samples[stage.number]
            at = ((part.mode, StepPosition(1, part.stage, micro, part.part, part.block)) for part in parts)
            return sum_costs(segment.costs for mode, source in at for segment in found[mode].segments.get(source, ()))

        prologue = (segment.costs for segment in self._first.segments[PROLOGUES[1]])
        terms = [sum_costs(prologue), sum_costs([self._first.message], simulation.sent)]
        actions = Counter((each.action.stage, each.action.kind, each.sampled) for each in simulation.actions)
        for (number, kind, micro), count in actions.items():
            parts = self._samples[number][0].action_parts(self._stages[number], kind)
            terms.append(sum_costs([of_parts(self._stages[number], parts, micro)], count))
        for stage in self._stages.values():
            terms.append(of_parts(stage, self._samples[stage.number][0].reduction_parts(stage), None))
        return sum_costs(terms)

    def _replay(self, at: StepPosition, part: SampledPart, micro: int | None) -> None:
        source = StepPosition(at.step, part.stage, micro, part.part, part.block)
        # Only actions have the block in the name of their phase.
        layer = None if micro is None or part.place is None else self._stages[at.stage].layers[part.place]
        self._composer.replay(self._samples[at.stage][part.mode], source, at, layer)

    def _result(self, step: int, scheduled: ScheduledAction) -> int:
        number, kind, micro = scheduled.action
        stage = self._stages[number]
        sample = self._samples[number][stage.last_mode(kind)]
        source = StepPosition(step, stage.sampled, scheduled.sampled, kind + RESULT, None)
        if source not in sample.results:
            raise ExtrapolationError("an action has no result in the sample")
        at = StepPosition(step, number, micro, kind + RESULT, None)
        return self._composer.locate(sample, sample.results[source], source, at)

    def _gradient(self, step: int, key: GradientKey) -> int:
        stage = [*self._stages.values()][key.part]
        samples, sampled, block = self._samples[stage.number], stage.sampled, None
        sample = samples[0 if key.block is None else stage.modes[key.block]]
        if key.block is not None:
            sampled, block = sample.block_like(stage, key.block)
        allocation = sample.gradients[step].get(GradientKey(sample.stages.index(sampled), block, key.name))
        if allocation is None or allocation not in sample.sites:
            raise ExtrapolationError(f"{key.name} has no gradient in the sample")
        source = StepPosition(step, sampled, None, step_parts.END, block)
        at = StepPosition(step, stage.number, None, step_parts.END, key.block)
        return self._composer.locate(sample, allocation, source, at)
