"""Pipeline runtime: runs this rank's stages through a schedule of actions and P2P operations."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

from titan_exp.config.layout.pipeline_schedules import (
    SCHEDULES,
    Action,
    Schedule,
    is_file,
    microbatches_of,
    read_schedule,
    splits_backward,
    timeline,
)
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.ops.autograd import local_tensor
from titan_exp.parallel.fsdp import disable_gradient_sync, reduce_gradients
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.pipeline_stage import Forward, Stage, keep_compiled_buffers, prune_to_stage, shared_parameters
from titan_exp.parallel.step_observer import StepObserver, step_observer


@dataclass(frozen=True)
class ActivationSpec:
    """Shape, dtype and device of the hidden states that stages send each other."""

    shape: tuple[int, ...]  # [rows, tokens, dim] of one micro-batch on one rank
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(layout: ResolvedLayout, device: torch.device, extra_tokens: int = 0) -> "ActivationSpec":
        """Activation spec of a layout; `extra_tokens` are sent beside the tokens of the sequence."""
        dtype = torch.bfloat16 if layout.training.mixed_precision == "bf16" else torch.float32
        rows, tokens, width = layout.hidden_shape
        return ActivationSpec((rows, tokens + extra_tokens, width), dtype, device)


class P2PTransport:
    """Sends and receives between the ranks of one pipeline."""

    sees_completion = True
    """True if a sent tensor can be freed as soon as its send is complete, else at the end of the pass."""

    def __init__(self, group: dist.ProcessGroup, activation: ActivationSpec) -> None:
        self.rank = dist.get_rank(group)
        self.rows = activation.shape[0]
        self._group, self._activation = group, activation

    def empty(self) -> Tensor:
        """A buffer for a received activation, or for its gradient."""
        return torch.empty(self._activation.shape, dtype=self._activation.dtype, device=self._activation.device)

    def send(self, tensor: Tensor, peer: int) -> dist.Work:
        """Start to send a tensor to another pipeline rank."""
        work = dist.isend(tensor, group=self._group, group_dst=peer)
        assert work is not None, "this rank belongs to the group"
        return work

    def receive(self, tensor: Tensor, peer: int) -> dist.Work:
        """Start to receive a tensor from another pipeline rank."""
        work = dist.irecv(tensor, group=self._group, group_src=peer)
        assert work is not None, "this rank belongs to the group"
        return work

    def broadcast(self, tensor: Tensor | None, source: int) -> Tensor:
        """Broadcast a pipeline rank's tensor in fp32 to all of them; the others pass None."""
        shape = torch.zeros(3, dtype=torch.int64) if tensor is None else torch.tensor(tensor.shape)
        shape = shape.to(self._activation.device)
        dist.broadcast(shape, group=self._group, group_src=source)
        sent = torch.empty(*shape.tolist(), device=self._activation.device) if tensor is None else tensor.contiguous()
        dist.broadcast(sent, group=self._group, group_src=source)
        return sent

    def is_sent(self, work: dist.Work) -> bool:
        """True if a send is complete, so that its tensor may be freed."""
        if not self.sees_completion or not work.is_completed():
            return False
        # NCCL's work keeps the sent tensor alive until it is waited for or its watchdog runs.
        work.wait()
        return True


class TiedWeights:
    """Copies of tied weights on this rank, if any."""

    def __init__(self, stages: Sequence[Stage], placement: list[int], transport: P2PTransport) -> None:
        self._transport = transport
        self._first, self._last = placement[0], placement[-1]
        copies = {name: stage.module.get_parameter(name) for stage in stages for name in stage.copied}
        # All ranks split the same model, so the first stage knows which copies the last one has.
        originals = {name: stage.module.get_parameter(name) for stage in stages for name in stage.shared}
        is_local = self._first == self._last
        self._local_pairs = [(originals[name], copies[name]) for name in copies] if is_local else []
        self._remote = [] if is_local else list((originals or copies).values())

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Set the gradient of both copies to their sum; all ranks of the pipeline call it."""
        for original, copy in self._local_pairs:
            total = _gradient(original).add_(_gradient(copy))
            _gradient(copy).copy_(total)
        for parameter in self._remote:
            own = _gradient(parameter)
            other = torch.empty_like(own)
            send, receive, rank = self._transport.send, self._transport.receive, self._transport.rank
            peer = self._last if rank == self._first else self._first
            # Both ranks post send and receive in the same order.
            calls = ((send, own), (receive, other))
            for work in [call(tensor, peer) for call, tensor in (calls if rank < peer else calls[::-1])]:
                work.wait()
            own.add_(other)


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None, "both stages use a tied weight"
    return local_tensor(gradient)


@dataclass(frozen=True)
class P2POp:
    """Transfer of one tensor between ranks: a stage's output forward, or its input's gradient backward."""

    sending: bool
    peer: int
    action: Action  # action that produces the tensor


Step = Action | P2POp


def build_schedule(schedule: str, ranks: int, stages: int, microbatches: int) -> Schedule:
    """Actions of each rank in one training pass; `schedule` is a key of `SCHEDULES` or the path of a CSV file."""
    if is_file(schedule):
        return read_schedule(schedule)
    if schedule == "GPipe":
        return [
            [Action(rank, kind, number) for kind in "FB" for number in range(microbatches)] for rank in range(ranks)
        ]
    if schedule == "1F1B":
        found: Schedule = [[] for _ in range(ranks)]
        for rank, actions in enumerate(found):
            # Forward until the first gradient returns, then one forward for each backward.
            warmup = min(ranks - 1 - rank, microbatches)
            actions += [Action(rank, "F", number) for number in range(warmup)]
            for number in range(warmup, microbatches):
                actions += [Action(rank, "F", number), Action(rank, "B", number - warmup)]
            actions += [Action(rank, "B", number) for number in range(microbatches - warmup, microbatches)]
        return found
    return _by_torch(schedule, ranks, stages // ranks, microbatches)


def forward_schedule(placement: list[int], microbatches: int) -> Schedule:
    """Actions of each rank in a forward-only pass: all micro-batches through one stage, then through the next."""
    actions: Schedule = [[] for _ in range(max(placement) + 1)]
    for stage, rank in enumerate(placement):
        actions[rank] += [Action(stage, "F", number) for number in range(microbatches)]
    return actions


def insert_p2p(schedule: Schedule, placement: list[int], rank: int) -> list[Step]:
    """Steps of one rank: its actions, with the P2P operations between them. All ranks derive their steps from one
    global order of actions, sorted by when each ends if communication is free. A transfer follows the action that
    produces its tensor, on both sides. So any two ranks meet in the same order, as NCCL requires, and cannot
    deadlock."""
    steps: list[Step] = []
    for action, _ in sorted(timeline(schedule).end.items(), key=lambda item: (item[1], item[0])):
        source = placement[action.stage]
        if source == rank:
            steps.append(action)
        if action.kind == "W":
            continue
        consumer = action.stage + (1 if action.kind == "F" else -1)
        if 0 <= consumer < len(placement):
            target = placement[consumer]
            if source != target and rank in (source, target):
                sending = rank == source
                steps.append(P2POp(sending, target if sending else source, action))
    return steps


def _by_torch(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> Schedule:
    """Actions of torch's schedule of this name, built over stages without modules."""
    assert SCHEDULES[name].takes(microbatches, ranks), "checked by the rules"
    common = {"num_stages": stages_per_rank * ranks, "group_rank": 0, "group_size": ranks, "submod": None}
    common |= {"has_backward": True, "is_last": False}
    stages: list[Any] = [
        SimpleNamespace(stage_index=local * ranks, is_first=local == 0, **common) for local in range(stages_per_rank)
    ]
    schedule: Any = schedules.get_schedule_class(name)(stages, microbatches, loss_fn=lambda: None)  # read, not run
    found: Schedule = [[] for _ in range(ranks)]
    for rank, actions in enumerate(found):
        for action in filter(None, schedule.pipeline_order[rank]):
            for part in action.sub_actions or (action,):  # overlapped actions run in sequence
                if part.is_compute_op:
                    actions.append(Action(part.stage_index, part.computation_type.value, part.microbatch_index))
    return found


class Pipeline:
    """This rank's stages and the schedules of all ranks. `schedules` are passes with different numbers of
    micro-batches, as a batch ramp needs. `placement` gives the pipeline rank of each stage; `keep_gathered` keeps
    sharded parameters gathered over a step."""

    def __init__(
        self,
        stages: Sequence[Stage],
        schedules: Sequence[Schedule],
        placement: list[int],
        transport: P2PTransport,
        *,
        keep_gathered: bool,
    ) -> None:
        assert keep_gathered or not any(map(splits_backward, schedules)), "checked by the rules"
        self.stages, self.transport = list(stages), transport
        self._training = {
            microbatches_of(schedule): insert_p2p(schedule, placement, transport.rank) for schedule in schedules
        }
        self.microbatches = max(self._training)
        """Micro-batches of the largest training pass."""
        self._placement, self._keep_gathered = placement, keep_gathered
        self._by_number = {stage.number: stage for stage in stages}
        self._tied = TiedWeights(self.stages, placement, transport)
        # Caching a method would keep every pipeline alive.
        self._forward = cache(lambda number: insert_p2p(forward_schedule(placement, number), placement, transport.rank))

    def pass_size(self, microbatches: int) -> int:
        """Micro-batches per pass of a training step with this many: all of them if there is such a schedule."""
        return microbatches if microbatches in self._training else self.microbatches

    def train(self, passes: Iterable[Forward], microbatches: int) -> None:
        """Run passes of `microbatches` micro-batches each, forward and backward, then reduce the summed gradients."""
        for stage in self.stages:
            disable_gradient_sync(stage.module, keep_gathered=self._keep_gathered)
        for compute in passes:
            self._run(self._training[microbatches], compute)
        for stage in self.stages:
            step_observer().stage_reduction_begin(stage.number)
            reduce_gradients(stage.module)

    def sum_tied_gradients(self) -> None:
        """Set the reduced gradients of tied copies to their sum; all ranks call it after `train`."""
        step_observer().tied_sum_begin()
        self._tied.sum_gradients()

    def forward_only(self, microbatches: int, compute: Forward) -> None:
        """Run any number of micro-batches forward."""
        with torch.no_grad():
            self._run(self._forward(microbatches), compute)

    def from_last_stage(self, result: Tensor | None) -> Tensor:
        """Broadcast the last stage's result [rows, tokens, width] in fp32 to every rank of the pipeline."""
        return self.transport.broadcast(result, self._placement[-1])

    def _run(self, steps: Iterable[Step], compute: Forward) -> None:
        queue, observer = P2PQueue(self.transport), step_observer()
        for step in steps:
            if isinstance(step, P2POp):
                queue.exchange(step)
                continue
            # An input gradient (`I`) counts as a whole backward (`B`).
            source = step.stage + (-1 if step.kind == "F" else 1)
            taken = Action(source, "F" if step.kind == "F" else "B", step.microbatch)
            received = queue.take(taken) if step.kind != "W" and 0 <= source < len(self._placement) else None
            result = self._act(step, received, compute, observer)
            if result is not None and not (step.kind == "F" and self._by_number[step.stage].last):
                queue.put(step, result)
        queue.close()

    def _act(self, action: Action, received: Tensor | None, compute: Forward, observer: StepObserver) -> Tensor | None:
        stage, result = self._by_number[action.stage], None
        observer.action_begin(action)
        if action.kind == "F":
            result = stage.forward(action.microbatch, received, compute)
        elif action.kind == "B":
            result = stage.backward(action.microbatch, received)
        elif action.kind == "I":
            result = stage.backward_input(action.microbatch, received)
        else:
            stage.backward_weights(action.microbatch)
        observer.action_end(action, result)
        return result


def build_pipeline(
    whole: nn.Module,
    build: Callable[[], nn.Module],
    parallelize_stage: Callable[[nn.Module], None],
    layout: ResolvedLayout,
    mesh: Mesh,
) -> Pipeline:
    """Pipeline of this rank's stages, each built on the meta device, cut, and filled by `parallelize_stage`."""
    parallelism = layout.parallelism
    layers, placement = layout.stage_layers, layout.stage_placement
    last = len(layers) - 1
    assert mesh.pp_group is not None
    if layout.splits_backward:
        keep_compiled_buffers()
    stages, shared, extra_tokens = [], shared_parameters(whole), whole.pp_plan().extra_tokens  # type: ignore[operator]
    for number, rank in enumerate(placement):
        if rank != mesh.pp_group.rank():
            continue
        with torch.device("meta"):
            module = build()
        # Modules of multi-token prediction follow the head's input.
        behind = range(layout.layers, len(module.get_submodule("blocks"))) if number == last else ()  # type: ignore[arg-type]
        prune_to_stage(module, [*layers[number], *behind], first=number == 0, last=number == last)
        parallelize_stage(module)
        of_first, of_last = shared if number == 0 else (), shared if number == last else ()
        stages.append(Stage(number, number == last, module, shared=of_first, copied=of_last))
    name, ranks = parallelism.pp_schedule, parallelism.pp
    schedules = [build_schedule(name, ranks, len(layers), size) for size in layout.pass_sizes]
    transport = P2PTransport(mesh.pp_group, ActivationSpec.of(layout, mesh.device, extra_tokens))
    return Pipeline(stages, schedules, placement, transport, keep_gathered=layout.reshard_policy == "never")


class P2PQueue:
    """Results of actions on their way to their consumers, on this rank or another."""

    def __init__(self, transport: P2PTransport) -> None:
        self._transport = transport
        self._results: dict[Action, tuple[Tensor, dist.Work | None]] = {}
        self._sent: list[tuple[Tensor, dist.Work]] = []

    def put(self, action: Action, tensor: Tensor) -> None:
        """Store a result of this rank, to be taken or sent."""
        self._results[_key(action)] = (tensor, None)

    def take(self, action: Action) -> Tensor:
        """Remove a result, waiting until it has arrived."""
        tensor, work = self._results.pop(action)
        if work is not None:
            work.wait()
        return tensor

    def exchange(self, message: P2POp) -> None:
        """Start to send or receive a result."""
        if message.sending:
            tensor = self.take(_key(message.action)).contiguous()
            work = self._transport.send(tensor, message.peer)
            # Completed sends free their tensors. On CUDA the host runs ahead of the GPU and sees completion late, at
            # the end of the pass at the latest.
            self._sent = [(sent, pending) for sent, pending in self._sent if not self._transport.is_sent(pending)]
            self._sent.append((tensor, work))
        else:
            tensor = self._transport.empty()
            work = self._transport.receive(tensor, message.peer)
            self._results[_key(message.action)] = (tensor, work)

    def close(self) -> None:
        """Wait for pending sends."""
        assert not self._results, "all results are consumed"
        for _, work in self._sent:
            work.wait()


def _key(action: Action) -> Action:
    return action._replace(kind="B") if action.kind == "I" else action
