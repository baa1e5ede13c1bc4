"""Rules of semi-synchronous training: groups, their shares of a step, and what happens at synchronizations only."""

from collections.abc import Iterator

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.checkpoint import CheckpointConfig
from titan_exp.config.groups.cluster import ClusterConfig
from titan_exp.config.groups.semi_sync import SemiSyncConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.layout.pipeline_schedules import is_file
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.rules.layout.pipeline_parallel import schedule_can_be_read
from titan_exp.rules.rule import Refuse, check_multiple, rules


def every_group_is_started(semi_sync: SemiSyncConfig, cluster: ClusterConfig) -> Iterator[Violation]:
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
    semi_sync: SemiSyncConfig, training: TrainingConfig, cluster: ClusterConfig, layout: ResolvedLayout
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


def _enabled(semi_sync: SemiSyncConfig) -> bool:
    return semi_sync.enabled


RULES = rules(
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
)
LAYOUT_RULES = rules(batch_is_divided_among_groups, when=_enabled)
