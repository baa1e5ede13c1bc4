"""Keys of replica groups in the group `cluster`, and the group `semi_sync` for replica groups that train alone for some
steps and then average what they have learnt."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from titan_exp.config.groups.types import Count, PositiveFloat, PositiveInt, Share

if TYPE_CHECKING:
    from titan_exp.config.groups.experiment import Experiment
    from titan_exp.config.groups.run import ClusterConfig
    from titan_exp.config.layout.resolved_layout import ResolvedLayout


@dataclass(frozen=True)
class ReplicaGroupsConfig:
    """Replica groups, each a world of the run."""

    replica_groups: PositiveInt = 1
    """Number of replica groups: each trains in the layout of `parallelism`, and the living ones divide every step among
    them. A group that fails costs no step, and comes back by itself.

    Groups exchange tensors over host memory and the network by TCP, also on GPUs: a death then closes connections, and
    no communicator of GPUs must be aborted. More than 1 needs `pip install titan_exp[replica-groups]`.
    E.g. `cluster.replica_groups=2`."""
    min_groups: PositiveInt = 1
    """Smallest number of living replica groups that train on. With fewer, training waits.
    E.g. `cluster.min_groups=2`."""
    group_heartbeat_seconds: PositiveFloat = 5.0
    """Seconds without a heartbeat after which a replica group counts as dead.
    E.g. `cluster.group_heartbeat_seconds=1`."""
    group_timeout_seconds: PositiveFloat = 300.0
    """Timeout in seconds of a collective between replica groups. It must be at least two heartbeats, longer than the
    difference between the groups' step times, and shorter than `cluster.hang_kill_minutes` and the 20 minutes of a
    collective within a group. E.g. `cluster.group_timeout_seconds=60`."""
    group_history: str | None = None
    """Run folder whose history of replica groups is replayed: every step is divided as it was there, so that the same
    layout gives the same bits; null replays none.

    It needs at least as many of `replica_groups` as were alive there.
    E.g. `cluster.group_history=runs/default/20261126-abcdef`."""

    @property
    def worlds(self) -> int:
        """Number of replica groups."""
        return self.replica_groups


@dataclass(frozen=True)
class SemiSyncConfig:
    """Semi-synchronous training of `cluster.replica_groups`, which exchange nothing between two synchronizations. It is
    another experiment than synchronous training: part of the run id."""

    mode: Literal["none", "local_sgd", "diloco", "streaming_diloco"] = "none"
    """Mode of semi-synchronous training. `none` synchronizes every step. `local_sgd` averages the weights of the groups
    (Stich 2019). `diloco` steps an outer SGD with their mean pseudo-gradient (Douillard et al. 2023), and
    `streaming_diloco` does so fragment by fragment, in the background of training (Douillard et al. 2025).

    The pseudo-gradient is the change of a group's weights since the last synchronization. The state of the optimizer
    stays in its group. Each mode but none takes 4 bytes per parameter, and 4 more for an outer momentum, sharded like
    the weights. E.g. `semi_sync.mode=diloco`."""
    groups: PositiveInt = 2
    """Number of groups, among which every step's batch is divided once and for all. It must equal
    `cluster.replica_groups`. E.g. `semi_sync=diloco semi_sync.groups=4`."""
    interval: PositiveInt = 50
    """Steps between synchronizations of the same weights. Evaluations, checkpoints, exports and the last step are
    multiples of it. E.g. `semi_sync=diloco semi_sync.interval=100`."""
    outer_lr: PositiveFloat = 0.7
    """Learning rate of the outer SGD in modes `diloco` and `streaming_diloco`.
    E.g. `semi_sync=diloco semi_sync.outer_lr=0.5`."""
    outer_momentum: Share = 0.9
    """Decay rate of the outer SGD's momentum in modes `diloco` and `streaming_diloco`; 0 keeps none.
    E.g. `semi_sync=diloco semi_sync.outer_momentum=0.8`."""
    outer_nesterov: bool = True
    """True if the outer momentum is Nesterov's, in modes `diloco` and `streaming_diloco`. It has no effect without a
    momentum. E.g. `semi_sync=diloco semi_sync.outer_nesterov=false`."""
    fragments: PositiveInt = 1
    """Number of fragments of the blocks in mode `streaming_diloco`. They are synchronized one after another within an
    interval.

    A weight outside of the blocks (embedding, final norm, head) is in the fragment of the block before it in the
    model's order, or of the first. E.g. `semi_sync=streaming_diloco semi_sync.fragments=2`."""
    fragment_pattern: Literal["strided", "sequential"] = "strided"
    """Division of blocks into fragments in mode `streaming_diloco`: with `strided`, fragment i has the blocks i, i +
    fragments, i + 2·fragments and so on, and with `sequential` it has consecutive blocks.
    E.g. `semi_sync=streaming_diloco semi_sync.fragment_pattern=sequential`."""
    delay: Count = 0
    """Delay τ in steps in mode `streaming_diloco`: a group trains on for so long between sending what a fragment has
    learnt and the outer step with the mean of all groups. E.g. `semi_sync=streaming_diloco semi_sync.delay=5`."""
    mixing: Share = 0.0
    """Mixing factor α in mode `streaming_diloco`: the share of a group's own weights after that outer step, θ ← α·θ_own
    + (1 − α)·θ_outer. 0 takes the outer optimizer's weights. E.g. `semi_sync=streaming_diloco semi_sync.mixing=0`."""

    @property
    def enabled(self) -> bool:
        """True if groups train alone between synchronizations."""
        return self.mode != "none"

    @property
    def outer(self) -> tuple[float, float, bool]:
        """Learning rate, momentum and Nesterov of the outer SGD. A step of 1 without momentum is the average."""
        if self.mode == "local_sgd":
            return 1.0, 0.0, False
        return self.outer_lr, self.outer_momentum, self.outer_nesterov and self.outer_momentum > 0

    @property
    def keeps_own_weights(self) -> bool:
        """True if the weights of groups differ after synchronizations, too."""
        return self.fragments > 1 or self.mixing > 0

    def applied_fragment(self, step: int) -> int | None:
        """Fragment whose outer step follows a step; the last fragment's follows multiples of the interval."""
        within = (step - 1) % self.interval + 1
        for fragment in range(self.fragments):
            if step and within == (fragment + 1) * self.interval // self.fragments:
                return fragment
        return None

    def sent_fragment(self, step: int) -> int | None:
        """Fragment whose pseudo-gradient is sent after a step."""
        return None if step == 0 else self.applied_fragment(step + self.delay)


if TYPE_CHECKING:

    class GroupedCluster(ReplicaGroupsConfig, ClusterConfig):
        """Group `cluster` with the keys of replica groups, as it looks where this extension is installed."""


def cluster_of(experiment: "Experiment | ResolvedLayout") -> "GroupedCluster":
    """Group `cluster` of an experiment, or of its layout."""
    cluster: Any = experiment.cluster
    return cluster


def semi_sync_of(experiment: "Experiment") -> SemiSyncConfig:
    """Group `semi_sync` of an experiment."""
    return experiment.semi_sync  # type: ignore[attr-defined]


def asked(experiment: "Experiment") -> bool:
    """True for a run in replica groups, or with semi-synchronous training."""
    return semi_sync_of(experiment).enabled or experiment.cluster.worlds > 1


def fragments_of(names: Iterable[str], config: SemiSyncConfig, blocks: int) -> dict[str, int]:
    """Fragment of each parameter in streaming DiLoCo, by full names in the model's order (`blocks.NUMBER...`)."""
    block, found = 0, {}
    for name in names:
        first, _, rest = name.partition(".")
        number = rest.partition(".")[0]
        if first == "blocks" and number.isdecimal():
            block = int(number)
        found[name] = fragment_of_block(block, config, blocks)
    return found


def fragment_of_block(block: int, config: SemiSyncConfig, blocks: int) -> int:
    """Fragment of a block."""
    if config.fragment_pattern == "strided":
        return block % config.fragments
    return block * config.fragments // max(1, blocks)
