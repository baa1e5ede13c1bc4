"""Rules of replica groups: sequences to divide, torchft, and features that groups lack. Rules of semi-synchronous
training: groups, their shares of a step, and events that may only happen at synchronizations."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from titan_exp.config.errors.user_error import Violation, divisors, listed
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.config.groups.run import COLLECTIVE_SECONDS, LOCAL, SLURM, CheckpointConfig
from titan_exp.config.groups.training import EvaluationConfig, TrainingConfig
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
    """torchft must be installed, in the version whose requests the trainer speaks."""
    version = torchft_version()
    if version != TORCHFT:
        found = "it is not installed" if version is None else f"you have torchft {version}"
        reason = f"replica groups need torchft {TORCHFT}, and {found}"
        remedy = f"pip install 'torchft=={TORCHFT}', or use {_WITHOUT}"
        yield Violation("cluster.replica_groups", cluster.replica_groups, reason, remedy)


def every_group_has_work(
    cluster: "GroupedCluster", training: TrainingConfig, parallelism: ParallelismConfig, layout: ResolvedLayout
) -> Iterator[Violation]:
    """Every group must have a micro-batch in every step, or a pass of micro-batches through its pipeline."""
    smallest, groups, unit = min(training.batch_sizes), cluster.replica_groups, 1
    per_rank = smallest // layout.dp_degree
    if parallelism.pp > 1:
        if not schedule_can_be_read(parallelism):
            return
        unit = layout.pipeline_microbatches
        passes = [count for count in divisors(per_rank) if per_rank // count >= groups and takes(parallelism, count)]
        if parallelism.pp_microbatches is None and not is_file(parallelism.pp_schedule):
            reason = "replica groups divide the pipeline passes of a step among them, and this step is a single pass"
            remedy = (
                f"use parallelism.pp_microbatches={listed(passes)}" if passes else f"use larger batches, or {_WITHOUT}"
            )
            yield Violation("parallelism.pp_microbatches", None, reason, remedy)
            return
    if layout.micro_batch_size < 1 or per_rank // (layout.micro_batch_size * unit) >= groups:
        return
    works = [size for size in divisors(per_rank // unit) if per_rank // (size * unit) >= groups]
    has = f"{per_rank // layout.micro_batch_size} micro-batches of {layout.micro_batch_size}"
    if unit > 1:
        has += f" in passes of {unit}"
    reason = f"every group needs work, and a step of {smallest} sequences has only {has} for each data rank"
    enough = groups * layout.dp_degree * unit
    fewer = f"use batches of at least {enough} sequences, or cluster.replica_groups={per_rank // unit} or less"
    remedy = f"use training.micro_batch_size={works[-1]}" if works else fewer
    yield Violation("cluster.replica_groups", groups, reason, remedy)


def every_group_has_gpus(
    cluster: "GroupedCluster", layout: ResolvedLayout, device: str, gpus: int
) -> Iterator[Violation]:
    """On this machine, every rank of every group must have its own GPU."""
    groups, ranks, offered = cluster.replica_groups, layout.world_size, min(gpus, cluster.gpus_per_node or gpus)
    if device != "cuda" or cluster.is_remote or not offered or groups * ranks <= offered:
        return
    number = "a process" if ranks == 1 else f"{ranks} processes"
    reason = f"{groups} groups of {number} need {groups * ranks} GPUs, and you can use {offered}"
    remedies = [f"cluster.replica_groups={offered // ranks}"] if offered >= 2 * ranks else []
    if ranks > 1 and offered >= groups:
        remedies.append(f"degrees that multiply to {offered // groups} or less")
    yield Violation("cluster.replica_groups", groups, reason, f"use {listed([*remedies, _WITHOUT])}")


def history_can_be_replayed(cluster: "GroupedCluster") -> Iterator[Violation]:
    """The replayed run must have a history of groups, with at most as many as this run."""
    if cluster.group_history is None:
        return
    largest, key = GroupHistory(cluster.group_history).largest, "cluster.group_history"
    if largest == 0:
        reason = "it has no groups.jsonl with a quorum, so replica groups did not train it"
        yield Violation(key, cluster.group_history, reason, f"give a run with replica groups, or use {key}=null")
    elif largest > cluster.replica_groups:
        reason = f"{largest} groups divided its steps, and this run has {cluster.replica_groups}"
        yield Violation(key, cluster.group_history, reason, f"use cluster.replica_groups={largest}")


def timeouts_nest(cluster: "GroupedCluster") -> Iterator[Violation]:
    """Heartbeats must notice a dead group first, then collectives between groups, then the watchdog."""
    beats, hang = 2 * cluster.group_heartbeat_seconds, (cluster.hang_kill_minutes or math.inf) * 60
    limit = min(hang, COLLECTIVE_SECONDS)
    if beats <= cluster.group_timeout_seconds < limit:
        return
    reason = (
        f"it must be at least two heartbeats ({beats:g} s), and less than the watchdog ({hang:g} s) and the time-out "
        f"of collectives within a group ({COLLECTIVE_SECONDS} s)"
    )
    remedy = f"use cluster.group_timeout_seconds={max(beats, limit / 3):g}"
    if beats >= limit:
        remedy = "use a shorter cluster.group_heartbeat_seconds, or a longer cluster.hang_kill_minutes"
    yield Violation("cluster.group_timeout_seconds", cluster.group_timeout_seconds, reason, remedy)


def model_is_described(cluster: "GroupedCluster", model: ModelConfig) -> Iterator[Violation]:
    """The model must belong to a family, since these draw no random numbers."""
    if model_spec(model) is None:
        reason = "your class may draw random numbers, and they would depend on which groups are alive"
        remedy = f"use {_WITHOUT}, or a model family"
        yield Violation("cluster.replica_groups", cluster.replica_groups, reason, remedy)


def semi_synchronous_training_has_its_own_keys(semi_sync: SemiSyncConfig) -> Iterator[Violation]:
    """Keys of other modes of semi-synchronous training must have their defaults."""
    return keys_of_other_modes("semi_sync", semi_sync)


def every_group_is_started(semi_sync: SemiSyncConfig, cluster: "GroupedCluster") -> Iterator[Violation]:
    """The launcher must start as many groups as the batch is divided among."""
    groups, started = semi_sync.groups, cluster.replica_groups
    if started != groups:
        reason = f"semi_sync.groups={groups} divides every step's batch among that many groups"
        other = f"semi_sync.groups={started}" if started > 1 else "semi_sync=none"
        yield Violation("cluster.replica_groups", started, reason, f"use cluster.replica_groups={groups}, or {other}")


def training_ends_at_a_synchronization(
    semi_sync: SemiSyncConfig, training: TrainingConfig, checkpoint: CheckpointConfig, evaluation: EvaluationConfig
) -> Iterator[Violation]:
    """Evaluations, checkpoints, exports and the end must fall on synchronizations: only then is there one model."""
    interval = semi_sync.interval
    reason = (
        f"between synchronizations (semi_sync.interval={interval}) every group has weights of its own, so there is no "
        "single model to evaluate or to save"
    )
    steps = {
        "training.steps": training.steps if training.stop_after is None else 0,
        "training.stop_after": training.stop_after or 0,
        "evaluation.every": evaluation.every,
        "checkpoint.every": 0 if checkpoint.mode == "off" else checkpoint.every or 0,
        "checkpoint.export_every": checkpoint.export_every or 0,
    }
    for key, value in steps.items():
        yield from check_multiple(key, value, interval, reason, ", or another semi_sync.interval")


def fragments_and_delay_fit(semi_sync: SemiSyncConfig) -> Iterator[Violation]:
    """Only one fragment may be in flight at a time, and none at the end of an interval."""
    interval, fragments, delay = semi_sync.interval, semi_sync.fragments, semi_sync.delay
    apart = interval // fragments
    if fragments > interval:
        reason = f"groups synchronize at most one fragment after a step, and semi_sync.interval={interval} has too few"
        yield Violation("semi_sync.fragments", fragments, reason, f"use semi_sync.fragments={interval} or less")
    elif delay >= apart:
        reason = (
            f"semi_sync.interval={interval} with {fragments} fragment{'s' * (fragments > 1)} has a synchronization "
            f"every {apart} step{'s' * (apart > 1)}, and each must end before the next begins"
        )
        longer = f"semi_sync.interval={fragments * (delay + 1)}"
        less = f"semi_sync.delay={apart - 1}" if apart == 1 else f"semi_sync.delay={apart - 1} or less"
        yield Violation("semi_sync.delay", delay, reason, f"use {less}, or {longer} or more")


def every_fragment_has_a_block(semi_sync: SemiSyncConfig, spec: ModelSpec) -> Iterator[Violation]:
    """Every fragment must have a block."""
    blocks = len(spec.blocks)
    if semi_sync.fragments > blocks:
        reason = f"every fragment needs a block, and the model has {blocks}"
        yield Violation("semi_sync.fragments", semi_sync.fragments, reason, f"use semi_sync.fragments={blocks} or less")


def batch_is_divided_among_groups(
    semi_sync: SemiSyncConfig, training: TrainingConfig, cluster: "GroupedCluster", layout: ResolvedLayout
) -> Iterator[Violation]:
    """Every group must compute equally many whole micro-batches, or pipeline passes, in every step."""
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
                f"{semi_sync.groups} groups with {layout.dp_degree} data rank{'s' * (layout.dp_degree > 1)} each, in "
                f"{passes}micro-batches of {layout.micro_batch_size}, need a multiple of {rows} sequences"
            )
            given = training.micro_batch_size is not None and size % least == 0
            least_batch = f"use training.global_batch_size={-(-size // least) * least}"
            remedy = f"use training.micro_batch_size={size // least}" if given else least_batch
            yield Violation("training.global_batch_size", size, reason, remedy)
            return


RULES = (
    *rules(
        Refuse(
            "cluster.min_groups",
            lambda cluster: cluster.min_groups > cluster.replica_groups,
            "with cluster.replica_groups={cluster.replica_groups} training would wait forever",
            "use cluster.min_groups={cluster.replica_groups} or less, or more of cluster.replica_groups",
        ),
        history_can_be_replayed,
    ),
    *rules(
        torchft_is_installed,
        Refuse(
            "cluster.replica_groups",
            lambda cluster: cluster.kind not in (LOCAL, SLURM),
            "only cluster=local and cluster=slurm start replica groups, and yours is {cluster.kind}",
            f"use cluster=slurm, cluster=local, or {_WITHOUT}",
        ),
        Refuse(
            "parallelism.dp_replicate",
            lambda parallelism: parallelism.dp_replicate > 1,
            "replica groups are replicas already, and any of them may die",
            "use parallelism.dp_replicate=1 and more of cluster.replica_groups",
        ),
        Refuse(
            "checkpoint.remote",
            lambda checkpoint: checkpoint.remote is not None,
            "replica groups do not share an uploader yet",
            f"use checkpoint.remote=null, or {_WITHOUT}",
        ),
        Refuse(
            "optimizer.name",
            lambda optimizer: optimizer.name == "schedule_free_adamw",
            "it moves the weights before a step, and replica groups may have to repeat a step",
            f"use another optimizer, or {_WITHOUT}",
        ),
        timeouts_nest,
        model_is_described,
        when=lambda cluster: cluster.replica_groups > 1,
    ),
    *rules(semi_synchronous_training_has_its_own_keys),
    *rules(
        Refuse(
            "semi_sync.groups",
            lambda semi_sync: semi_sync.groups == 1,
            "one group has nothing to average with",
            "use semi_sync.groups=2 cluster.replica_groups=2, or semi_sync=none",
        ),
        every_group_is_started,
        Refuse(
            "cluster.group_history",
            lambda cluster: cluster.group_history is not None,
            "a history divides every step anew, and in semi-synchronous training each group keeps its own share",
            "use cluster.group_history=null, or semi_sync=none",
        ),
        Refuse(
            "weight_average.mode",
            lambda weight_average: weight_average.enabled,
            "between synchronizations it would average the weights of one group",
            "use weight_average=none, or semi_sync=none",
        ),
        training_ends_at_a_synchronization,
        Refuse(
            "evaluation.every_tokens",
            lambda evaluation: evaluation.enabled and evaluation.every_tokens is not None,
            "evaluations fall on synchronizations, which are counted in steps (semi_sync.interval)",
            "use evaluation.every_tokens=null, or semi_sync=none",
        ),
        fragments_and_delay_fit,
        every_fragment_has_a_block,
        when=lambda semi_sync: semi_sync.enabled,
    ),
)
LAYOUT_RULES = (
    *rules(every_group_has_work, every_group_has_gpus, when=lambda cluster: cluster.replica_groups > 1),
    *rules(batch_is_divided_among_groups, when=lambda semi_sync: semi_sync.enabled),
)
