"""Replica groups: the living groups divide the sequences of a step, sum their gradients, and commit the step or repeat
it. The work is divided, not the data: group j of n takes the micro-batches j, j + n, j + 2n and so on of every step;
with a pipeline, it takes passes."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from titan_exp.checkpoint import load_state, optimizer_state
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.checkpoint.storage_reader import load_into, tensor_shapes
from titan_exp.config.errors.user_error import UserError
from titan_exp.extensions.replica_groups.events import ReplicaGroup, group_number, newest_quorum
from titan_exp.extensions.replica_groups.outer_optimizer import KEPT, MOMENTUM, AsyncAllReduce, exchange, ring_bytes
from titan_exp.extensions.replica_groups.quorum import Quorum, QuorumClient
from titan_exp.ops.autograd import local_tensor
from titan_exp.parallel.mesh import Mesh
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.metrics_jsonl import read_last_values
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.trainer.objective import Reduction

if TYPE_CHECKING:
    from titan_exp.extensions.replica_groups.config import GroupedCluster


T = TypeVar("T")


NEWCOMER_LIMIT = 60.0  # seconds that a new group waits for a group with the run's newest step


class ReplicaGroups:
    """Replica groups of a run, as one rank sees them. All ranks of a group call the methods together."""

    def __init__(
        self, group: ReplicaGroup, cluster: "GroupedCluster", mesh: Mesh, folder: RunFolder, *, by_number: bool = False
    ) -> None:
        self.group, self._folder, self._cluster, self._mesh = group, folder, cluster, mesh
        self._by_number = by_number
        self._error: Exception | None = None
        self._has_state = True
        """False if another group's state has arrived only in part."""
        self._lost_since = time.monotonic()
        """Time from which work is lost if the commit is refused."""
        self.quorum: Quorum | None = None
        self.stall = 0.0
        """Seconds since the last row that were spent waiting for other groups and on refused steps."""
        self.changed = False
        """True if the last `join` brought other members than the previous one."""
        self.joined: list[int] = []
        """Numbers of the groups that the last `join` added; empty before the second quorum."""

    @cached_property
    def _client(self) -> QuorumClient:
        """Quorum client, connected at the first `join`: others wait for every group with a heartbeat."""
        return QuorumClient(self.group, self._cluster, self._mesh, by_number=self._by_number)

    @cached_property
    def restores(self) -> bool:
        """True if this group loads the run's checkpoint, which one group does before the attempt's first step. The
        others heal from it, so that no two groups clean up the same folder."""
        return self._from_first_rank(self.group.number == self.group.loader and committed_step(self._folder) == 0)

    @property
    def leader(self) -> str | None:
        """Name of the oldest living group, which writes metrics and checkpoints; None before the first quorum."""
        return None if self.quorum is None else self.quorum.members[0]

    @property
    def leads(self) -> bool:
        """True in the leader."""
        return self.quorum is not None and self.quorum.rank == 0

    @property
    def size(self) -> int:
        """Number of living groups."""
        return 1 if self.quorum is None else self.quorum.size

    @property
    def numbers(self) -> list[int]:
        """Numbers of the living groups, the oldest first."""
        return [] if self.quorum is None else [group_number(member) for member in self.quorum.members]

    @property
    def quorum_id(self) -> int | None:
        """Number of the quorum from the lighthouse, which counts changes of members and repetitions."""
        return None if self.quorum is None else self.quorum.id

    def row(self) -> dict[str, float | int | None]:
        """Metrics of a row: living groups, quorum, and seconds lost since the last row."""
        stall, self.stall = self.stall, 0.0
        return {"participants": self.size, "quorum": self.quorum_id, "stall": stall}

    def join(self, step: int, position: int | None = None) -> Quorum:
        """Wait for the quorum of the step after `step`, which is the last step that this group has committed. Groups
        with a smaller `position`, by default the step, are behind. Raises UserError if no living group offers a state,
        and the run knows a later step or this group has a part of one."""
        began, before = time.monotonic(), self.quorum
        if not self._has_state:
            step = position = 0
        while True:
            asked = time.monotonic()
            quorum, self._error = self._client.ask(step if position is None else position)
            self._lost_since = asked + quorum.seconds
            self.stall += quorum.seconds
            knows_none = quorum.source is None and (before is None or not self._has_state)
            known = self._from_first_rank(known_step(self._folder)) if knows_none else 0
            waited = time.monotonic() - began
            may_train = self._has_state or quorum.source is not None
            if may_train and step >= known and not self._may_be_behind(before, quorum, waited):
                break
            # A newcomer whose peers are starting, too, or are dead, never trains from its own state. Or the others took
            # a step without this group: a lighthouse that has just started does not know them yet.
            self._client.vote(step, False)
            limit = max(NEWCOMER_LIMIT, self.group.patience)
            is_behind = step < known or not may_train
            if is_behind and waited > limit:
                own = f"the state after step {step}" if self._has_state else "a part of another group's state"
                raise UserError(
                    f"Replica group {self.group.number} has {own}, and the run is after step {known}. In {limit:.0f} s "
                    "no living group offered its state. Start the run again, and all groups continue from its newest "
                    "checkpoint."
                )
            time.sleep(1.0 if is_behind else self._cluster.group_heartbeat_seconds / 10)
        # A group that was away heals, even if it already knows these members.
        returns = before is not None and quorum.source is not None
        self.quorum, self.changed = quorum, before is None or returns or before.members != quorum.members
        known_members = quorum.members if before is None else before.members
        self.joined = [group_number(member) for member in quorum.members if member not in known_members]
        self.joined += [self.group.number] if returns else []
        if self._error is not None:
            text = "step %d: could not connect to the other groups (%s)"
            get_logger().warning(text, step + 1, _first_line(self._error))
        return quorum

    def share(self, items: Sequence[T], unit: int) -> list[T]:
        """This group's part of the micro-batches of a step, which are divided in units of `unit`. In a replay, groups
        beyond its history repeat another group's part, which does not count."""
        assert self.quorum is not None
        first, stride = self.quorum.rank % self.quorum.shares * unit, self.quorum.shares * unit
        return [item for start in range(first, len(items), stride) for item in items[start : start + unit]]

    def send_state(self, progress: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """Send the state after the last committed step to groups that are behind. A failure refuses the step."""
        assert self.quorum is not None
        for rank in self.quorum.behind:
            self.send_tensors(rank, progress, tensors)

    def receive_state(self, prepare: Callable[[Any], Sequence[Tensor]]) -> Any:
        """Receive a living group's state into the tensors that `prepare` returns for its progress; returns the
        progress. All ranks of this group call it. Returns None if the state did not fully arrive on every rank; the
        group then has no state, and joins again to heal from another group."""
        assert self.quorum is not None
        source, progress = self.quorum.source, None
        assert source is not None

        def receive_header() -> None:
            nonlocal progress
            progress = self._receive_header(source)

        self._attempt(receive_header)
        arrived = torch.tensor(int(self._error is None))
        torch.distributed.all_reduce(arrived, op=ReduceOp.MIN, group=self._mesh.cpu_group)
        if arrived:
            tensors = prepare(progress)
            self._attempt(lambda: self._receive(source, tensors))
        self._has_state = self._client.vote(self.quorum.step, self._error is None)
        if self._has_state:
            return progress
        reason = "on another rank of this group" if self._error is None else _first_line(self._error)
        sender = group_number(self.quorum.members[source])
        get_logger().warning("the state of group %d did not arrive (%s), so heal from another", sender, reason)
        self._client.disconnect()  # its members wait for this rank
        self.quorum = None
        return None

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum gradients over the groups, in place. A failure leaves them undefined and refuses the step."""
        self.all_reduce([local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None])

    def all_reduce(self, tensors: Sequence[Tensor]) -> float:
        """Sum tensors over the groups, in place; returns the bytes sent. A failure refuses their work."""
        sent = 0.0

        def reduce(flat: Tensor) -> None:
            nonlocal sent
            self._all_reduce(flat)
            sent += ring_bytes(flat.nbytes, self.size)

        self._attempt(lambda: exchange(tensors, reduce, write_back=True))
        return sent

    def start_all_reduce(self, tensors: Iterable[Tensor]) -> AsyncAllReduce:
        """Start to sum tensors over the groups in the background; the tensors themselves stay unchanged. Until
        `finish_all_reduce`, the quorum does not change, and no other collective can refuse the work."""

        def begin(tensor: Tensor) -> Any:
            return None if self.size == 1 else self._client.process_group.allreduce([tensor], ReduceOp.SUM)

        started = AsyncAllReduce()
        self._attempt(lambda: started.start(tensors, begin))
        return started

    def finish_all_reduce(self, started: AsyncAllReduce) -> float:
        """Wait for a started all-reduce; returns the bytes sent. A failure refuses the work that it is for."""
        self._lost_since = time.monotonic()
        self._attempt(started.wait)
        return ring_bytes(started.summed_bytes, self.size)

    def any(self, flag: bool) -> bool:
        """True if the flag is true on the first rank of any group."""
        flags = torch.tensor([self._from_first_rank(flag)], dtype=torch.float64)
        self.all_reduce([flags])
        return bool(flags > 0)

    def send_tensors(self, rank: int, description: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """Send tensors to a member, which calls `receive_tensors`. Only the receiver notices a failure."""
        self._attempt(lambda: self._send(rank, description, tensors))

    def receive_tensors(self, rank: int, prepare: Callable[[Any], Sequence[Tensor]]) -> bool:
        """Receive tensors into those that `prepare` returns for their description; False if they did not arrive."""
        self._attempt(lambda: self._receive(rank, prepare(self._receive_header(rank))))
        return self._error is None

    def reduce_scalars(self, values: Mapping[str, Tensor | float], reductions: Mapping[str, Reduction]) -> Any:
        """Reduce scalars over the groups in fp64, by name: sums, or maxima where `reductions` says `max`."""
        rows = self._gather_rows(torch.tensor([float(value) for value in values.values()], dtype=torch.float64))
        columns = zip(values, rows.unbind(1), strict=True)
        return {name: row.amax() if reductions.get(name) == "max" else row.sum() for name, row in columns}

    def reduce_maxima(self, tensors: Sequence[Tensor]) -> None:
        """Maxima of tensors of one dtype over the groups, in place. A failure refuses the step."""
        if tensors:
            largest = self._gather_rows(torch.cat([tensor.flatten() for tensor in tensors]).cpu()).amax(0)
            sizes = [tensor.numel() for tensor in tensors]
            for tensor, part in zip(tensors, largest.split(sizes), strict=True):
                tensor.copy_(part.view_as(tensor))

    def _gather_rows(self, row: Tensor) -> Tensor:
        """Gather the rows of all groups that divide the step, so that all reduce them in the same order."""
        assert self.quorum is not None
        rows = row.new_zeros(self.quorum.shares, len(row))
        if self.quorum.rank < self.quorum.shares:
            rows[self.quorum.rank] = row
        self._attempt(lambda: self._all_reduce(rows))
        return rows

    def vote_to_begin(self, ready: bool) -> bool:
        """True if all ranks of this group are ready to begin training, and are connected to the other groups. Otherwise
        the next quorum counts as the first, because those who join it have not healed."""
        begins = self._client.vote(0, ready and self._error is None)
        if not begins:
            self.quorum = None
        return begins

    def commit(self, step: int, what: str = "step") -> bool:
        """True if the step is committed, which means that every rank of this group holds the sums of all groups."""
        assert self.quorum is not None
        ready = self._error is None and self.size >= max(self._cluster.min_groups, self.quorum.shares)
        committed = self._client.vote(step, ready)
        if not committed:
            reason = "because of another rank" if self._error is None else _first_line(self._error)
            get_logger().warning("%d groups repeat %s %d (%s)", self.size, what, step, reason)
            self.stall += time.monotonic() - self._lost_since
        return committed

    def _may_be_behind(self, before: Quorum | None, quorum: Quorum, waited: float) -> bool:
        """True, for one heartbeat, if the newest recorded quorum was without this group, whose state may then be behind
        its members'. One rank's clock decides, because the others would wait for its answer."""
        if before is None or quorum.source is not None or before.members == quorum.members:
            return False
        in_time = waited <= self._cluster.group_heartbeat_seconds
        return self._from_first_rank(in_time and self.group.number not in newest_quorum(self._folder))

    def _from_first_rank(self, value: T) -> T:
        values = [value]
        torch.distributed.broadcast_object_list(values, src=0, group=self._mesh.cpu_group)
        return values[0]

    def _send(self, rank: int, progress: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        header, group, peer = load_state.encode_json(progress), self._client.process_group, self._client.order[rank]
        group.send([torch.tensor([header.numel()])], peer, 0).wait()
        group.send([header], peer, 0).wait()
        exchange(tensors, lambda flat: group.send([flat], peer, 0).wait(), write_back=False)

    def _receive_header(self, rank: int) -> Any:
        group, peer = self._client.process_group, self._client.order[rank]
        size = torch.zeros(1, dtype=torch.int64)
        group.recv([size], peer, 0).wait()
        header = torch.zeros(int(size), dtype=torch.uint8)
        group.recv([header], peer, 0).wait()
        return load_state.decode_json(header)

    def _receive(self, rank: int, tensors: Sequence[Tensor]) -> None:
        group, peer = self._client.process_group, self._client.order[rank]
        exchange(tensors, lambda flat: group.recv([flat], peer, 0).wait(), read=False, write_back=True)

    def _all_reduce(self, tensor: Tensor) -> None:
        assert self.quorum is not None
        shares, client = self.quorum.shares, self._client
        if self.size == 1:
            return
        if shares >= self.size:
            client.process_group.allreduce([tensor], ReduceOp.SUM).wait()
            return
        # In a replay, all get the sum of as many groups as in the history, in their order.
        if shares > 1 and client.first_groups is not None:
            client.first_groups.allreduce([tensor], ReduceOp.SUM).wait()
        client.process_group.broadcast(tensor, 0).wait()

    def _attempt(self, operation: Any) -> None:
        """Run a collective unless one has failed in this step. Errors of this rank's device end the run."""
        if self._error is None:
            try:
                operation()
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except RuntimeError as error:
                # A traceback's frames would keep connections open on which other groups wait.
                self._error = error.with_traceback(None)
                self._client.disconnect()


def build_replica_groups(cluster: "GroupedCluster", mesh: Mesh, folder: RunFolder, *, by_number: bool) -> ReplicaGroups:
    """Build the groups of a run as this rank sees them. Raises UserError without the launcher of groups."""
    group = ReplicaGroup.from_environment()
    if group is None:
        raise UserError(
            f"cluster.replica_groups={cluster.replica_groups}: torchrun and srun alone do not start and supervise "
            "groups. Use titan-exp train."
        )
    return ReplicaGroups(group, cluster, mesh, folder, by_number=by_number)


def committed_step(folder: RunFolder) -> int:
    """Last step that this attempt of the run is known to have committed; 0 if none."""
    attempts, beat = folder.read_attempts(), folder.read_heartbeat()
    if not attempts:
        return 0
    newest, values = attempts[-1], read_last_values(folder.metrics)
    logged = int(values.get("step") or 0) if values.get("attempt") == newest.attempt else 0
    beaten = beat.step if beat is not None and beat.time >= newest.intent else 0
    return max(logged, beaten)


def known_step(folder: RunFolder) -> int:
    """Step that a group must have before it may train: this attempt's, or the newest checkpoint's."""
    return max(committed_step(folder), *CheckpointFolder(folder.checkpoints).complete_steps(), 0)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


GROUP_PREFIX = "group."
WRITER = "writer"  # progress key: number of the group that wrote the checkpoint
Description = dict[str, Any]
"""Description, as JSON: shapes and dtypes of a rank's tensors by key, and its optimizer's values."""


def own_state(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, *, weights: bool) -> dict[str, Tensor]:
    """State that differs between groups, not copied, in one order: the inner optimizer's, and swapped-out `weights`."""
    state, kept = optimizer_state.optimizer_state_dict(parts, optimizer), f".{KEPT}"
    own = {key: state[key] for key in sorted(state) if not key.endswith((kept, f".{MOMENTUM}"))}
    for key in [key for key in sorted(state) if key.endswith(kept)] if weights else ():
        name = key.removeprefix(optimizer_state.OPTIMIZER_PREFIX).removesuffix(kept)
        own[f"{load_state.MODEL_PREFIX}{name}"] = state[key]
    return own


def own_weights(own: Mapping[str, Tensor], group: int) -> dict[str, Tensor]:
    """A group's own weights in its `own_state`, by their keys in a checkpoint."""
    return {
        f"{GROUP_PREFIX}{group}.{key}": value for key, value in own.items() if key.startswith(load_state.MODEL_PREFIX)
    }


def described(
    parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> Description:
    """Describe a rank's `tensors`, in their order, and its optimizer's values."""
    kinds = {key: [list(value.shape), str(value.dtype).removeprefix("torch.")] for key, value in tensors.items()}
    return {"tensors": kinds, "values": optimizer_state.optimizer_values(parts, optimizer)}


def empty_state(
    parts: Sequence[nn.Module], own: Mapping[str, Tensor], group: int, description: Description
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors and values of another group's described state by checkpoint key, placed like this group's `own`."""
    prefix, tensors = f"{GROUP_PREFIX}{group}.", _described_tensors(description)
    tensors = optimizer_state.empty_tensors(parts, own, tensors)
    values = {f"{optimizer_state.VALUES_PREFIX}{key}": value for key, value in description["values"].items()}
    encoded = {f"{prefix}{key}": load_state.encode_json(value) for key, value in values.items()}
    return {f"{prefix}{key}": value for key, value in tensors.items()}, encoded


def healing_state(
    parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, description: Description | None = None
) -> dict[str, Tensor]:
    """A rank's whole state by key, not copied, in one order, after the optimizer's took the form of a `description`."""
    if description is not None:
        tensors = _described_tensors(description)
        saved = {key: tensor for key, tensor in tensors.items() if key.startswith(optimizer_state.OPTIMIZER_PREFIX)}
        optimizer_state.prepare_optimizer_state(parts, optimizer, saved, description["values"], whole=True)
    state = {**load_state.model_state_dict(parts), **optimizer_state.optimizer_state_dict(parts, optimizer)}
    return {key: state[key] for key in (sorted(state) if description is None else description["tensors"])}


def load_own_state(
    path: Path, group: int, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, *, weights: bool
) -> bool:
    """Load a group's optimizer state and own `weights`, saved in any layout; False if the checkpoint has none."""
    prefix = "" if load_state.read_progress(path).get(WRITER) == group else f"{GROUP_PREFIX}{group}."
    shapes = tensor_shapes(path)
    if not any(key.startswith(f"{prefix}{optimizer_state.OPTIMIZER_PREFIX}") for key in shapes):
        return False
    trained = dict[str, Tensor]()
    if weights:
        if not optimizer.state:
            optimizer_state.init_optimizer_state(parts, optimizer)
        kept, model = own_state(parts, optimizer, weights=True), load_state.model_state_dict(parts)
        trained = own_weights({key: model[key] for key in kept if key in model}, group)
    if not trained.keys() <= shapes.keys():
        return False
    load_state.load_optimizer_state(path, parts, optimizer, prefix)
    load_into(path, trained)
    load_state.sync_tied_state(parts, optimizer)
    return True


def _described_tensors(description: Description) -> dict[str, optimizer_state.SavedTensor]:
    kinds = {key: (torch.Size(shape), getattr(torch, dtype)) for key, (shape, dtype) in description["tensors"].items()}
    return {key: optimizer_state.SavedTensor(*kind) for key, kind in kinds.items()}
