"""Semi-synchronous training: groups step on their own, and meet at synchronizations to step the outer optimizer.

Every group has a fixed block of the sequences of each step. All groups commit a synchronization, or the living ones
repeat it. Until then every group keeps the weights that it has trained, so a death costs the others no step.

Streaming DiLoCo synchronizes one fragment of the parameters at a time: its pseudo-gradient is sent in the background
after one step, and applied `delay` steps later. At most one fragment is in flight, and none after it has been applied,
which is when groups save, evaluate and stop.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.extensions.replica_groups.config import SemiSyncConfig
from titan_exp.extensions.replica_groups.groups import (
    NEWCOMER_LIMIT,
    ReplicaGroups,
    described,
    empty_state,
    own_state,
    own_weights,
)
from titan_exp.extensions.replica_groups.outer_optimizer import AsyncAllReduce, OuterOptimizer, exchange
from titan_exp.ops.autograd import local_tensor
from titan_exp.parallel.mesh import Mesh
from titan_exp.tracking.logging import get_logger
from titan_exp.trainer.commit import Flags
from titan_exp.trainer.experts import LOAD, is_of_experts
from titan_exp.trainer.metrics import Row
from titan_exp.trainer.objective import Reduction
from titan_exp.trainer.train_state import TrainState

T = TypeVar("T")


@dataclass
class FragmentInFlight:
    """Fragment in flight: its pseudo-gradient is being summed over the groups."""

    number: int
    moved: bool  # False in a group that has just healed and has nothing to average
    own: list[Tensor] | None = None  # pseudo-gradient of this group, kept if its weights will no longer tell it later
    sum: AsyncAllReduce | None = None  # running sum over the groups; None once it was refused

    def gradients(self, outer: OuterOptimizer, *, delayed: bool) -> Iterable[Tensor]:
        """Pseudo-gradient to send. It is kept for a repetition if the group trains on until a `delayed` outer step."""
        if self.own is not None:
            return self.own
        gradients = outer.pseudo_gradients(self.number)
        if not self.moved:
            return map(torch.zeros_like, gradients)
        if delayed:
            self.own = list(gradients)
        return gradients if self.own is None else self.own


@dataclass
class PendingRow(Row):
    """Row of this group's share of a step; after the synchronization, of the whole step."""

    trained: bool  # False if the row belongs to the group from which this group has healed
    tokens: int  # predicted tokens in this group's share; after the synchronization, in all trained shares
    total: int
    """Predicted tokens of whole batches since the last synchronization: on this rank, later on all ranks of a group."""


class SemiSync:
    """This group's rounds of steps and their synchronizations. All ranks of a group call the methods together."""

    def __init__(
        self,
        config: SemiSyncConfig,
        groups: ReplicaGroups,
        outer: OuterOptimizer,
        mesh: Mesh,
        reductions: Mapping[str, Reduction],
        *,
        buffers: Sequence[Tensor] = (),
    ) -> None:
        self._config, self._groups, self.outer, self._mesh = config, groups, outer, mesh
        self._reductions, self._buffers = reductions, buffers
        self.synchronized = 0
        self.tokens = 0
        """Predicted tokens of the batches up to that step, whichever group trained them."""
        self.rows: list[PendingRow] = []
        """Rows since the last synchronization, or after it until they are written."""
        self.states: dict[str, Tensor] = {}
        """States of groups for the next checkpoint, besides those of the writer, which have plain names there."""
        self._fragment: FragmentInFlight | None = None
        self._round_tokens, self._stop, self._save = 0, False, False
        self._healed_after: int | None = None
        """Step after which this group has healed; it has no pseudo-gradient until the next step."""
        self._sent, self._sent_for = 0.0, 0
        """Bytes sent by all groups since the last row, and tokens of these rounds."""
        self._participants = 0
        """Number of groups that the last synchronization averaged."""
        self._attempted = 0.0
        """Bytes sent by this rank since then, including repeated synchronizations."""
        self._waiting_since: float | None = None

    def begin(self, step: int, tokens: int) -> None:
        """Begin with the state of a checkpoint after a step, or with initialized weights."""
        self.synchronized, self.tokens = step, tokens
        self.outer.keep()

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This group's block of a step's micro-batches: the same sequences in every layout of the groups."""
        size = len(items) // self._config.groups
        return items[self._groups.group.number * size :][:size]

    def due(self, step: int) -> bool:
        """True if a fragment is sent or applied after a step."""
        return self._config.sent_fragment(step) is not None or self.applies(step)

    def applies(self, step: int) -> bool:
        """True if the synchronization of a fragment ends after a step."""
        return self._config.applied_fragment(step) is not None

    @property
    def in_flight(self) -> bool:
        """True if a sum runs in the background, so that groups do not meet until it is applied."""
        return self._fragment is not None and self._fragment.sum is not None

    def position(self, step: int) -> int:
        """Progress by which quorums find groups that are behind: twice the step, minus one until synchronized."""
        return 2 * step - (step != self.synchronized)

    def add_step(self, tokens: int, *, stop: bool, save: bool) -> None:
        """Count a step; this rank has read `tokens` of its whole batch. Its flags wait for the synchronization."""
        self._round_tokens += tokens
        self._stop, self._save = self._stop or stop, self._save or save

    def add_row(self, values: dict[str, float], row: dict[str, Any] | None, tokens: int) -> None:
        """Keep a row until the synchronization."""
        self.rows.append(PendingRow(values, row, True, tokens, self._round_tokens))

    def complete(self) -> bool:
        """True if training may begin: all groups are present, or the others are late. Else waits a second."""
        self._waiting_since = self._waiting_since or time.monotonic()
        waited = time.monotonic() - self._waiting_since
        late = self._groups.any(waited > max(NEWCOMER_LIMIT, self._groups.group.patience))  # one clock decides for all
        begins = self._groups.vote_to_begin(late or self._groups.size == self._config.groups)
        if not begins:
            time.sleep(1.0)
        elif self._groups.size < self._config.groups:
            get_logger().warning("training begins with only some of %s", self._present())
        return begins

    def send(self, step: int) -> None:
        """Start to sum a fragment's pseudo-gradients over the groups, or start again if the sum was refused."""
        if self._fragment is None:
            number = self._config.sent_fragment(step)
            # This group may have healed while the fragment was in flight.
            number = self._config.applied_fragment(step) if number is None else number
            assert number is not None
            self._fragment = FragmentInFlight(number, moved=self._healed_after != step)
        fragment = self._fragment
        gradients = fragment.gradients(self.outer, delayed=self._config.delay > 0)
        fragment.sum = self._groups.start_all_reduce(gradients)

    def apply(self, step: int) -> Flags | None:
        """Step the outer optimizer with the fragment in flight; None, with no change, if it must be sent again."""
        fragment, groups = self._fragment, self._groups
        assert fragment is not None
        assert fragment.sum is not None
        summed, fragment.sum = fragment.sum, None
        self._attempted += groups.finish_all_reduce(summed)
        sent, *counts = self._sum_over_ranks([self._attempted, self._round_tokens, *(row.total for row in self.rows)])
        # Ranks that share rows count them all.
        tokens, *totals = (round(count / self._mesh.batch_replicas) for count in counts)
        own = [fragment.moved, self._stop, self._save and groups.leads, sent]
        for row in self.rows:
            own += [row.trained, row.tokens, *row.values.values()]
        # Each group has a row, so that sums have the same order whichever group is the oldest.
        table = torch.zeros(self._config.groups, len(own), dtype=torch.float64)
        table[groups.group.number] = torch.tensor(own, dtype=torch.float64)
        buffers = [buffer * float(fragment.moved) for buffer in self._buffers]
        groups.all_reduce([table, *buffers])
        if not groups.commit(step, "the synchronization after step"):
            return None
        participants = self._participants = int(table[:, 0].sum())
        if participants < self._config.groups:
            get_logger().warning("step %d: averaged over %d of %s", step, participants, self._present())
        if participants:  # otherwise all groups that had a pseudo-gradient are dead
            gradients = summed.sums
            torch._foreach_div_(gradients, participants)
            self.outer.step(gradients, fragment.number)
            for buffer, total in zip(self._buffers, buffers, strict=True):
                buffer.copy_(total / participants)
        self._finish_rows(table, totals)
        self.synchronized, self.tokens = step, self.tokens + tokens
        self._sent, self._sent_for = self._sent + float(table[:, 3].sum()), self._sent_for + tokens
        self._round_tokens, self._attempted, self._stop, self._save, self._fragment = 0, 0.0, False, False, None
        return Flags(bool(table[:, 1].any()), bool(table[:, 2].any()))

    def finished_rows(self, attempt: int, also: Mapping[str, Any]) -> list[PendingRow]:
        """Take the rows of the last round; the last row also gets numbers of the synchronization, and `also`."""
        rows, self.rows = self.rows, []
        groups = {**self._groups.row(), "participants": self._participants} if rows else {}
        for row in rows:
            if row.row is not None:
                row.row |= {**groups, "stall": 0.0, "attempt": attempt}
                if row is rows[-1]:
                    row.row |= {**also, **groups, "sent_bytes_per_token": self._sent / max(1, self._sent_for)}
        if rows:
            self._sent, self._sent_for = 0.0, 0
        return rows

    def progress(self) -> dict[str, Any]:
        """State other than tensors, for a group that heals from this one."""
        rows = [vars(row) for row in self.rows]
        sent = {"sent": self._sent, "sent_for": self._sent_for, "swapped": self.outer.swapped}
        tokens = {"tokens": self.tokens, "round_tokens": self._round_tokens}
        return {"synchronized": self.synchronized, **tokens, "rows": rows, **sent}

    def heal(self, step: int, progress: Mapping[str, Any]) -> None:
        """Take over another group's progress, whose tensors have arrived; this group adds nothing to the round."""
        self.synchronized, self.tokens = progress["synchronized"], progress["tokens"]
        self.rows = [PendingRow(**{**row, "trained": False}) for row in progress["rows"]]
        self._sent, self._sent_for, self.outer.swapped = progress["sent"], progress["sent_for"], progress["swapped"]
        self._round_tokens, self._fragment, self._healed_after = progress["round_tokens"], None, step

    def collect_states(self, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        """Send this group's own state to the group that writes the checkpoint, which keeps the states that arrive. If
        the groups' weights differ, the outer optimizer's weights must have been swapped in."""
        groups, weights = self._groups, self._config.keeps_own_weights
        own = own_state(parts, optimizer, weights=weights)
        self.states = {}
        if not groups.leads:
            groups.send_tensors(0, described(parts, optimizer, own), _local(own))
            return
        states = {number: dict[str, Tensor]() for number in groups.numbers[1:]}

        def prepare(number: int, description: Any) -> list[Tensor]:
            tensors, values = empty_state(parts, own, number, description)
            states[number] = {**tensors, **values}
            return _local(tensors)

        others = [*enumerate(groups.numbers)][1:]
        arrived = [groups.receive_tensors(rank, partial(prepare, number)) for rank, number in others]
        everywhere = torch.tensor([int(there) for there in arrived])
        if arrived:
            dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=self._mesh.cpu_group)
        for number, there in zip(states, everywhere.tolist(), strict=True):
            if there:
                self.states |= states[number]
            else:
                get_logger().warning("the checkpoint lacks the optimizer state of group %d, which has ended", number)
        self.states |= own_weights(own, groups.group.number)

    def _finish_rows(self, table: Tensor, totals: Sequence[int]) -> None:
        """Replace this group's numbers by those of all groups that have trained the step."""
        column = 4
        for row, total in zip(self.rows, totals, strict=True):
            trained, tokens = table[:, column : column + 2].unbind(1)
            tokens, column, row.total = tokens * trained, column + 2, total
            alive = bool(trained.any())  # else all that trained it are dead, and one has sent its numbers before
            for name in row.values:
                values, kind = table[:, column], self._reductions.get(name, "mean")
                if is_of_experts(name):  # each group's metrics cover its share of the batch
                    kind = "sum" if name.startswith(LOAD) else "mean"
                column += 1
                if not alive:
                    continue
                if kind == "max":
                    row.values[name] = float(values[trained > 0].amax())
                elif kind == "sum":
                    row.values[name] = float((values * trained).sum())
                elif name == "loss" or name.startswith("objective/"):
                    row.values[name] = float((values * tokens).sum() / tokens.sum().clamp(min=1))
                else:
                    row.values[name] = float((values * trained).sum() / trained.sum())
            if alive:
                row.tokens = int(tokens.sum())
            if row.row is not None:
                logged = {name: value for name, value in row.values.items() if not is_of_experts(name)}
                row.row |= {**logged, "tokens": self.tokens + row.total}

    def _sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self._mesh.cpu_group)
        return total.tolist()

    def _present(self) -> str:
        return f"{self._config.groups} groups (alive are {', '.join(map(str, sorted(self._groups.numbers)))})"


class LargestSynchronization:
    """Largest synchronization of a rank in the planner; if the run `saves`, in the group that does."""

    def __init__(self, outer: OuterOptimizer, config: SemiSyncConfig, state: TrainState, *, saves: bool) -> None:
        self._outer, self._config, self._saves = outer, config, saves
        self._parts, self._optimizer = state.model.parts, state.optimizer
        self._fragment: FragmentInFlight | None = None

    def send(self) -> None:
        """Copy the pseudo-gradients as for an all-reduce, after a step of the inner optimizer."""
        sizes = [
            sum(local_tensor(parameter).numel() for parameter in self._outer.parameters(fragment))
            for fragment in range(self._config.fragments)
        ]
        number = sizes.index(max(sizes))
        self._fragment = FragmentInFlight(number, moved=True, sum=AsyncAllReduce())
        assert self._fragment.sum is not None
        self._fragment.sum.start(self._fragment.gradients(self._outer, delayed=self._config.delay > 0), lambda _: None)

    def apply(self) -> None:
        """Step the outer optimizer, and release the fragment in flight."""
        fragment, self._fragment = self._fragment, None
        assert fragment is not None
        assert fragment.sum is not None
        self._outer.step(fragment.sum.sums, fragment.number)

    def collect(self) -> None:
        """Receive the other groups' states for a checkpoint, and release them."""
        if self._saves:
            own = own_state(self._parts, self._optimizer, weights=self._config.keeps_own_weights)
            description = described(self._parts, self._optimizer, own)
            others = [empty_state(self._parts, own, group, description)[0] for group in range(1, self._config.groups)]
            for state in others:
                exchange([local_tensor(value) for value in state.values()], lambda _: None, write_back=True)


def _local(state: Mapping[str, Tensor]) -> list[Tensor]:
    return [local_tensor(value) for value in state.values()]
