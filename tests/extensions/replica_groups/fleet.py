"""Replica groups in warm processes, as the launcher starts them; and moments at which a rank kills itself."""

import contextlib
import http.client
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from tests.parity.runs import SMALL, Curve, trained_weights
from tests.ranks import Ranks
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import ResolvedLayout, resolve_layout
from titan_exp.config.schema.typed_config import to_experiment, to_yaml
from titan_exp.extensions.replica_groups.config import cluster_of, semi_sync_of
from titan_exp.extensions.replica_groups.events import ReplicaGroup
from titan_exp.extensions.replica_groups.groups import ReplicaGroups
from titan_exp.extensions.replica_groups.lighthouse import Lighthouse
from titan_exp.rules import check
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.run_folder import RunFolder

Mutation = Callable[[ReplicaGroup], None]
T = TypeVar("T")


class Fleet:
    """Lighthouse and groups of one attempt. The test plays the launcher."""

    def __init__(self, path: Path, *overrides: str) -> None:
        chosen = {override.partition("=")[0] for override in overrides}
        small = [override for override in SMALL if override.partition("=")[0] not in chosen]
        heartbeat = ["cluster.group_heartbeat_seconds=1", "cluster.group_timeout_seconds=20"]
        self.experiment = check(resolve_layout(to_experiment(compose([*small, *heartbeat, *overrides])), 1))
        self.folder, self.layout = RunFolder(path), ResolvedLayout.of(self.experiment)
        path.mkdir(parents=True, exist_ok=True)
        self.folder.config.write_text(to_yaml(self.experiment))
        self.attempt = self.folder.add_attempt(world_size=1, hosts=["localhost"]).attempt
        self.lighthouse = Lighthouse(cluster_of(self.experiment), self.folder, path / "lighthouse.log")
        self.lighthouse.poll()
        self.groups: list[Ranks] = []

    def start(self, number: int, mutate: Mutation | None = None, *, together: bool = False) -> Ranks:
        """Start a group, or start it again; `together`, its first quorum is of all groups, whoever is the fastest."""
        group = ReplicaGroup(number, len(self.groups), self.lighthouse.url)
        self.groups.append(Ranks(self.layout.world_size, _train, str(self.folder.path), group, mutate, together))
        return self.groups[-1]

    def start_all(self, mutate: Mutation | None = None) -> list[Ranks]:
        """Start all groups; those of semi-synchronous training wait for each other by themselves."""
        together, groups = not semi_sync_of(self.experiment).enabled, self.experiment.cluster.worlds
        return [self.start(number, mutate, together=together) for number in range(groups)]

    def results(self, group: Ranks, limit: float = 60.0) -> list[Any]:
        """What each rank of a group returned; at most `limit` seconds pass without a row or an event of the run."""
        return group.results(limit, self._progress)

    def await_death(self, group: Ranks) -> None:
        """Wait until a rank kills itself, and end the others of its group as the launcher does."""
        with pytest.raises(AssertionError, match="died without a word"):
            self.results(group)
        group.kill()

    def await_dead(self) -> int:
        """Wait until a group has left a file `dead-NUMBER` in the run folder, and return its number."""
        found = self.wait_until(lambda: list(self.folder.path.glob("dead-*")))
        return int(found[0].name.partition("-")[2])

    def wait_until(self, condition: Callable[[], T], limit: float = 60.0) -> T:
        """Wait until something is true, with the limit of `results`, and return it."""
        seen, deadline = self._progress(), time.monotonic() + limit
        while not (found := condition()):
            if (now := self._progress()) != seen:
                seen, deadline = now, time.monotonic() + limit
            assert time.monotonic() < deadline, f"nothing happened for {limit:.0f} s"
            time.sleep(0.02)
        return found

    def _progress(self) -> int:
        return sum(
            path.stat().st_size for path in (self.folder.metrics, self.folder.path / "groups.jsonl") if path.exists()
        )

    def curve(self, groups: Sequence[Ranks], limit: float = 90.0) -> Curve:
        """Curve of the run, once these groups have ended; weights on which they disagree are disputed."""
        weights: dict[str, torch.Tensor] = {}
        disputed: list[str] = []
        for group in groups:
            for part in self.results(group, limit):
                for name, weight in part.items():
                    if not torch.equal(weights.setdefault(name, weight), weight):
                        disputed.append(name)
        rows: Any = read_metrics(self.folder.metrics)
        return Curve([row["loss"] for row in rows], [row["grad_norm"] for row in rows], rows, weights, disputed)

    def lines(self) -> list[str]:
        """Rows as they were written."""
        return self.folder.metrics.read_text().splitlines() if self.folder.metrics.exists() else []

    def close(self) -> None:
        """End everything."""
        for group in self.groups:
            group.kill()
        self.lighthouse.close()


class Dies:
    """The first start of group 1 kills its last rank in a method of `ReplicaGroups`, in the step after `step`; the
    others wait two steps later until it is back."""

    def __init__(self, step: int, where: str) -> None:
        self.step, self.where = step, where

    def __call__(self, group: ReplicaGroup) -> None:
        join, committed = ReplicaGroups.join, [0]

        def joined(groups: ReplicaGroups, step: int, *position: int | None) -> Any:
            committed[0] = step
            if step == self.step + 2:
                await_heartbeat(groups, 1, 2)
            return join(groups, step, *position)

        ReplicaGroups.join = joined  # type: ignore[method-assign]  # on purpose
        method = getattr(ReplicaGroups, self.where)

        def dying(*arguments: Any) -> Any:
            # The step that begins is the argument of `join`, and known to the other methods.
            step = arguments[1] if self.where == "join" else committed[0]
            last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
            if group.start == 1 and step == self.step and last:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*arguments)

        setattr(ReplicaGroups, self.where, dying)


def await_heartbeat(groups: ReplicaGroups, number: int, start: int = 0) -> None:
    """Wait in a rank until the lighthouse has a heartbeat of a group, in this or a later start: the next quorum waits
    for it. This rank's own group has one from now on."""
    assert groups._client
    host, _, port = groups.group.lighthouse.removeprefix("http://").rpartition(":")
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection(host, int(port), timeout=5.0)
        # It may be started again meanwhile.
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/status")
            page = connection.getresponse().read().decode()
            if any(int(found) >= start for found in re.findall(rf"-(\d+)-{number}: seen", page)):
                return
        time.sleep(0.02)
    raise AssertionError(f"start {start} of group {number} has no heartbeat")


def _meet_at_first() -> None:
    join = ReplicaGroups.join

    def joined(groups: ReplicaGroups, *arguments: Any) -> Any:
        if groups.quorum is None:
            for number in range(groups._cluster.replica_groups):
                await_heartbeat(groups, number)
        return join(groups, *arguments)

    ReplicaGroups.join = joined  # type: ignore[method-assign]


def wait_for(path: Path, seconds: float = 120.0) -> None:
    """Wait in a rank for a file of another one."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"there is no {path.name} after {seconds:.0f} s"
        time.sleep(0.02)


def _train(path: str, group: ReplicaGroup, mutate: Mutation | None, together: bool) -> dict[str, torch.Tensor]:
    os.environ.update(group.to_environment())
    if mutate is not None:
        mutate(group)
    if together:
        _meet_at_first()
    return trained_weights(RunFolder(path, world_logs=group.logs))
