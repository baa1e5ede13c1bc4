"""Rules of replica groups: sequences to divide, torchft, and what groups cannot do yet. Rules of semi-synchronous
training: groups, their shares of a step, and what happens at synchronizations only."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from titan_exp.config.errors.user_error import Violation, divisors, listed
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.config.groups.run import COLLECTIVE_SECONDS, LOCAL, SLURM, CheckpointConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.layout.pipeline_schedules import is_file, takes
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.extensions.replica_groups.config import SemiSyncConfig
from titan_exp.extensions.replica_groups.events import GroupHistory
from titan_exp.extensions.replica_groups.lighthouse import TORCHFT, torchft_version
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.rules.pipeline_parallel import schedule_can_be_read
from titan_exp.rules.rule import Refuse, check_multiple, rules
from titan_exp.rules.training import keys_of_other_modes

if TYPE_CHECKING:
    from titan_exp.extensions.replica_groups.config import GroupedCluster

_WITHOUT = "cluster.replica_groups=1"


def torchft_is_installed(cluster: "GroupedCluster") -> Iterator[Violation]:
    """torchft is installed, in the version whose requests the trainer speaks."""
    version = torchft_version()
    if version != TORCHFT:
        found = "torchft is not installed" if version is None else f"torchft {version} is installed"
        reason = f"groups meet through torchft {TORCHFT}, and {found}"
        remedy = f"pip install 'torchft=={TORCHFT}', or {_WITHOUT}"
        yield Violation("cluster.replica_groups", cluster.replica_groups, reason, remedy)


def every_group_has_work(
    cluster: "GroupedCluster", training: TrainingConfig, parallelism: ParallelismConfig, layout: ResolvedLayout
) -> Iterator[Violation]:
    """Every group has a micro-batch of every step, or a pass of micro-batches through its pipeline."""
    smallest, groups, unit = min(training.batch_sizes), cluster.replica_groups, 1
    per_rank = smallest // layout.dp_degree
    if parallelism.pp > 1:
        if not schedule_can_be_read(parallelism):
            return
        unit = layout.pipeline_microbatches
        passes = [count for count in divisors(per_rank) if per_rank // count >= groups and takes(parallelism, count)]
        if parallelism.pp_microbatches is None and not is_file(parallelism.pp_schedule):
            reason = "replica groups divide whole passes through the pipeline, and a step is a single pass"
            remedy = f"parallelism.pp_microbatches={listed(passes)}" if passes else f"larger batches, or {_WITHOUT}"
            yield Violation("parallelism.pp_microbatches", None, reason, remedy)
            return
    if layout.micro_batch_size < 1 or per_rank // (layout.micro_batch_size * unit) >= groups:
        return
    works = [size for size in divisors(per_rank // unit) if per_rank // (size * unit) >= groups]
    has = f"{per_rank // layout.micro_batch_size} micro-batches of {layout.micro_batch_size}"
    if unit > 1:
        has += f" in passes of {unit}"
    reason = f"of a step's {smallest} sequences a data rank of a group has {has}, fewer than groups"
    enough = groups * layout.dp_degree * unit
    fewer = f"batches of at least {enough} sequences, or cluster.replica_groups={per_rank // unit} or less"
    remedy = f"training.micro_batch_size={works[-1]}" if works else fewer
    yield Violation("cluster.replica_groups", groups, reason, remedy)


def every_group_has_gpus(
    cluster: "GroupedCluster", layout: ResolvedLayout, device: str, gpus: int
) -> Iterator[Violation]:
    """On this machine, every rank of every group has its own GPU."""
    groups, ranks, offered = cluster.replica_groups, layout.world_size, min(gpus, cluster.gpus_per_node or gpus)
    if device != "cuda" or cluster.is_remote or not offered or groups * ranks <= offered:
        return
    number = "a process" if ranks == 1 else f"{ranks} processes"
    reason = f"{groups} groups of {number} take {groups * ranks} GPUs, and {offered} can be used"
    remedies = [f"cluster.replica_groups={offered // ranks}"] if offered >= 2 * ranks else []
    if ranks > 1 and offered >= groups:
        remedies.append(f"degrees that multiply to {offered // groups} or less")
    yield Violation("cluster.replica_groups", groups, reason, " or ".join([*remedies, _WITHOUT]))


def history_can_be_replayed(cluster: "GroupedCluster") -> Iterator[Violation]:
    """The replayed run has a history of groups, of at most as many as this one has."""
    if cluster.group_history is None:
        return
    largest, key = GroupHistory(cluster.group_history).largest, "cluster.group_history"
    if largest == 0:
        reason = "it has no groups.jsonl with a quorum, so it was not trained by replica groups"
        yield Violation(key, cluster.group_history, reason, "the folder of a run with replica groups, or null")
    elif largest > cluster.replica_groups:
        reason = f"{largest} groups divided its steps, and cluster.replica_groups={cluster.replica_groups}"
        yield Violation(key, cluster.group_history, reason, f"cluster.replica_groups={largest}")


def timeouts_nest(cluster: "GroupedCluster") -> Iterator[Violation]:
    """A dead group is noticed by its heartbeat first, then by collectives between groups, then by the watchdog."""
    beats, hang = 2 * cluster.group_heartbeat_seconds, (cluster.hang_kill_minutes or math.inf) * 60
    limit = min(hang, COLLECTIVE_SECONDS)
    if beats <= cluster.group_timeout_seconds < limit:
        return
    reason = (
        f"time-outs must nest: two heartbeats ({beats:g} s) < collectives between groups < the first of the watchdog "
        f"({hang:g} s) and collectives within a group ({COLLECTIVE_SECONDS} s)"
    )
    remedy = f"cluster.group_timeout_seconds={max(beats, limit / 3):g}"
    if beats >= limit:
        remedy = "a shorter cluster.group_heartbeat_seconds, or a longer cluster.hang_kill_minutes"
    yield Violation("cluster.group_timeout_seconds", cluster.group_timeout_seconds, reason, remedy)


def model_is_described(cluster: "GroupedCluster", model: ModelConfig) -> Iterator[Violation]:
    """The model is of a family, which draws no random numbers."""
    if model_spec(model) is None:
        reason = "a plain class may draw random numbers, which would depend on the living groups"
        yield Violation("cluster.replica_groups", cluster.replica_groups, reason, f"{_WITHOUT}, or a model family")


def semi_synchronous_training_has_its_own_keys(semi_sync: SemiSyncConfig) -> Iterator[Violation]:
    """Keys of the other modes of semi-synchronous training have their defaults."""
    return keys_of_other_modes("semi_sync", semi_sync)


def every_group_is_started(semi_sync: SemiSyncConfig, cluster: "GroupedCluster") -> Iterator[Violation]:
    """The launcher starts as many groups as the batch is divided among."""
    groups, started = semi_sync.groups, cluster.replica_groups
    if started != groups:
        reason = f"semi_sync.groups={groups} divides every step's batch among that many groups"
        other = f"semi_sync.groups={started}" if started > 1 else "semi_sync=none"
        yield Violation("cluster.replica_groups", started, reason, f"cluster.replica_groups={groups}, or {other}")


def training_ends_at_a_synchronization(
    semi_sync: SemiSyncConfig, training: TrainingConfig, checkpoint: CheckpointConfig
) -> Iterator[Violation]:
    """Evaluations, checkpoints, exports and the end fall on synchronizations: in between there is no model."""
    interval = semi_sync.interval
    reason = (
        f"semi_sync.interval={interval}: between synchronizations every group has weights of its own, "
        "and there is none to evaluate or to keep"
    )
    steps = {
        "training.steps": training.steps if training.stop_after is None else 0,
        "training.stop_after": training.stop_after or 0,
        "training.evaluate_every": training.evaluate_every,
        "checkpoint.every": 0 if checkpoint.mode == "off" else checkpoint.every or 0,
        "checkpoint.export_every": checkpoint.export_every or 0,
    }
    for key, value in steps.items():
        yield from check_multiple(key, value, interval, reason, "; or another semi_sync.interval")


def fragments_and_delay_fit(semi_sync: SemiSyncConfig) -> Iterator[Violation]:
    """One fragment at a time is in flight, and none at the end of an interval."""
    interval, fragments, delay = semi_sync.interval, semi_sync.fragments, semi_sync.delay
    apart = interval // fragments
    if fragments > interval:
        reason = f"semi_sync.interval={interval}: at most one fragment is synchronized after a step"
        yield Violation("semi_sync.fragments", fragments, reason, f"semi_sync.fragments={interval}, or less")
    elif delay >= apart:
        reason = (
            f"semi_sync.interval={interval} with {fragments} fragment{'s' * (fragments > 1)} has a synchronization "
            f"every {apart} steps, and it ends before the next begins"
        )
        longer = f"semi_sync.interval={fragments * (delay + 1)}"
        less = f"semi_sync.delay={apart - 1}" if apart == 1 else f"semi_sync.delay={apart - 1} or less"
        yield Violation("semi_sync.delay", delay, reason, f"{less}, or {longer} or more")


def every_fragment_has_a_block(semi_sync: SemiSyncConfig, spec: ModelSpec) -> Iterator[Violation]:
    """Fragments are made of blocks."""
    blocks = len(spec.blocks)
    if semi_sync.fragments > blocks:
        reason = f"the model has {blocks} blocks, of which every fragment has one at least"
        yield Violation("semi_sync.fragments", semi_sync.fragments, reason, f"semi_sync.fragments={blocks}, or less")


def batch_is_divided_among_groups(
    semi_sync: SemiSyncConfig, training: TrainingConfig, cluster: "GroupedCluster", layout: ResolvedLayout
) -> Iterator[Violation]:
    """Every group computes the same number of whole micro-batches of every step, or of passes through its pipeline."""
    parallelism = layout.parallelism
    if cluster.replica_groups != semi_sync.groups:
        return  # micro-batches are divided among the groups that are started
    unit = 1
    if parallelism.pp > 1:
        is_given = parallelism.pp_microbatches or is_file(parallelism.pp_schedule)
        if not schedule_can_be_read(parallelism) or not is_given:
            return  # refused by the rules of pipelines and of replica groups
        unit = layout.pipeline_microbatches
    rows = semi_sync.groups * layout.dp_degree * max(1, layout.micro_batch_size) * unit
    for size in training.batch_sizes:
        if size % rows:
            least = semi_sync.groups * layout.dp_degree * unit
            passes = f"passes of {unit} " if unit > 1 else ""
            reason = (
                f"{semi_sync.groups} groups with {layout.dp_degree} data ranks each, in {passes}micro-batches of "
                f"{layout.micro_batch_size}, compute multiples of {rows} sequences"
            )
            given = training.micro_batch_size is not None and size % least == 0
            least_batch = f"training.global_batch_size={-(-size // least) * least}"
            remedy = f"training.micro_batch_size={size // least}" if given else least_batch
            yield Violation("training.global_batch_size", size, reason, remedy)
            return


def _has_groups(cluster: "GroupedCluster") -> bool:
    return cluster.replica_groups > 1


def _enabled(semi_sync: SemiSyncConfig) -> bool:
    return semi_sync.enabled


RULES = (
    *rules(
        Refuse(
            "cluster.min_groups",
            lambda cluster: cluster.min_groups > cluster.replica_groups,
            "with cluster.replica_groups={cluster.replica_groups} training would wait for ever",
            "cluster.min_groups={cluster.replica_groups} or less; or more of cluster.replica_groups",
        ),
        history_can_be_replayed,
    ),
    *rules(
        torchft_is_installed,
        Refuse(
            "cluster.replica_groups",
            lambda cluster: cluster.kind not in (LOCAL, SLURM),
            "groups are started by cluster=local and cluster=slurm, not by {cluster.kind}",
            f"cluster=slurm, cluster=local, or {_WITHOUT}",
        ),
        Refuse(
            "parallelism.dp_replicate",
            lambda parallelism: parallelism.dp_replicate > 1,
            "replica groups are replicas already, which may die",
            "parallelism.dp_replicate=1 and more of cluster.replica_groups",
        ),
        Refuse(
            "checkpoint.remote",
            lambda checkpoint: checkpoint.remote is not None,
            "replica groups do not share an uploader yet",
            f"checkpoint.remote=null, or {_WITHOUT}",
        ),
        Refuse(
            "optimizer.name",
            lambda optimizer: optimizer.name == "schedule_free_adamw",
            "it moves the weights before a step, which replica groups may have to repeat",
            f"another optimizer, or {_WITHOUT}",
        ),
        timeouts_nest,
        model_is_described,
        when=_has_groups,
    ),
    *rules(semi_synchronous_training_has_its_own_keys),
    *rules(
        Refuse(
            "semi_sync.groups",
            lambda semi_sync: semi_sync.groups == 1,
            "one group has nothing to average with",
            "semi_sync.groups=2 cluster.replica_groups=2, or semi_sync=none",
        ),
        every_group_is_started,
        Refuse(
            "cluster.group_history",
            lambda cluster: cluster.group_history is not None,
            "a history divides steps anew, and in semi-synchronous training every group has its own share",
            "cluster.group_history=null, or semi_sync=none",
        ),
        Refuse(
            "weight_average.mode",
            lambda weight_average: weight_average.enabled,
            "between synchronizations it would average the weights of one group",
            "weight_average=none, or semi_sync=none",
        ),
        training_ends_at_a_synchronization,
        fragments_and_delay_fit,
        every_fragment_has_a_block,
        when=_enabled,
    ),
)
LAYOUT_RULES = (
    *rules(every_group_has_work, every_group_has_gpus, when=_has_groups),
    *rules(batch_is_divided_among_groups, when=_enabled),
)
