"""Replica groups in warm processes, as the launcher starts them; and moments at which a rank kills itself."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.parity.runs import SMALL, Curve, trained_weights
from tests.ranks import Ranks
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import ResolvedLayout, resolve_layout
from titan_exp.config.schema.typed_config import to_experiment, to_yaml
from titan_exp.launch.local.lighthouse import Lighthouse
from titan_exp.rules import check
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.replica_group import ReplicaGroup
from titan_exp.tracking.run_folder.run_folder import RunFolder

Mutation = Callable[[ReplicaGroup], None]


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
        self.lighthouse = Lighthouse(self.experiment.cluster, self.folder, path / "lighthouse.log")
        self.lighthouse.poll()
        self.groups: list[Ranks] = []

    def start(self, number: int, mutate: Mutation | None = None) -> Ranks:
        """Start a group, or start it again."""
        group = ReplicaGroup(number, len(self.groups), self.lighthouse.url)
        self.groups.append(Ranks(self.layout.world_size, _train, str(self.folder.path), group, mutate))
        return self.groups[-1]

    def curve(self, groups: Sequence[Ranks], limit: float = 90.0) -> Curve:
        """Curve of the run, once these groups have ended; weights on which they disagree are disputed."""
        weights: dict[str, torch.Tensor] = {}
        disputed: list[str] = []
        for group in groups:
            for part in group.results(limit):
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
        from titan_exp.trainer.replica_groups.replica_groups import ReplicaGroups

        join, committed = ReplicaGroups.join, [0]

        def joined(groups: ReplicaGroups, step: int, *position: int | None) -> Any:
            committed[0], marker = step, groups._folder.path / "newcomer"
            if group.number == 1 and group.start > 1:
                marker.touch()
            elif step == self.step + 2:
                wait_for(marker)
                time.sleep(0.5)  # so that the newcomer is in the next quorum
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


def wait_for(path: Path, seconds: float = 40.0) -> None:
    """Wait for a file."""
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def _train(path: str, group: ReplicaGroup, mutate: Mutation | None) -> dict[str, torch.Tensor]:
    os.environ.update(group.to_environment())
    if mutate is not None:
        mutate(group)
    return trained_weights(RunFolder(path, group_logs=group.logs))
