"""Rules of replica groups: sequences to divide, torchft, and what groups cannot do yet."""

from collections.abc import Iterator

from titan_exp.config.errors.did_you_mean import divisors
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.cluster import LOCAL, SLURM, ClusterConfig
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.torchft import TORCHFT, torchft_version
from titan_exp.config.paths.group_history import GroupHistory
from titan_exp.models.spec.lookup import model_spec
from titan_exp.rules.rule import Refuse, rules

_WITHOUT = "cluster.replica_groups=1"


def torchft_is_installed(cluster: ClusterConfig) -> Iterator[Violation]:
    """torchft is installed, in the version whose requests the trainer speaks."""
    version = torchft_version()
    if version != TORCHFT:
        found = "torchft is not installed" if version is None else f"torchft {version} is installed"
        reason = f"groups meet through torchft {TORCHFT}, and {found}"
        remedy = f"pip install 'torchft=={TORCHFT}', or {_WITHOUT}"
        yield Violation("cluster.replica_groups", cluster.replica_groups, reason, remedy)


def every_group_has_work(
    cluster: ClusterConfig, training: TrainingConfig, layout: ResolvedLayout
) -> Iterator[Violation]:
    """Every group has a micro-batch of every step."""
    smallest, groups = min(training.batch_sizes), cluster.replica_groups
    per_rank = smallest // layout.dp_degree
    if layout.micro_batch_size < 1 or per_rank // layout.micro_batch_size >= groups:
        return
    works = [size for size in divisors(per_rank) if per_rank // size >= groups]
    reason = (
        f"of a step's {smallest} sequences a data rank of a group has {per_rank // layout.micro_batch_size} "
        f"micro-batches of {layout.micro_batch_size}, fewer than groups"
    )
    enough = groups * layout.dp_degree
    fewer = f"batches of at least {enough} sequences, or cluster.replica_groups={per_rank} or less"
    remedy = f"training.micro_batch_size={works[-1]}" if works else fewer
    yield Violation("cluster.replica_groups", groups, reason, remedy)


def history_can_be_replayed(cluster: ClusterConfig) -> Iterator[Violation]:
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


def model_is_described_and_dense(cluster: ClusterConfig, model: ModelConfig) -> Iterator[Violation]:
    """The model has no experts, whose counts groups do not add up, and draws no random numbers."""
    spec, reason = model_spec(model), None
    if spec is None:
        reason = "a plain class may draw random numbers, which would depend on the living groups"
    elif spec.has_experts:
        reason = "token counts of experts are not added up over groups yet"
    if reason is not None:
        yield Violation("cluster.replica_groups", cluster.replica_groups, reason, f"{_WITHOUT}, or a dense family")


def _has_groups(cluster: ClusterConfig) -> bool:
    return cluster.replica_groups > 1


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
            "cluster.replica_groups",
            lambda device: device == "cuda",
            "groups exchange gradients over the CPU, not between GPUs yet",
            f"cluster.device=cpu, or {_WITHOUT}",
        ),
        Refuse(
            "parallelism.dp_replicate",
            lambda parallelism: parallelism.dp_replicate > 1,
            "replica groups are replicas already, which may die",
            "parallelism.dp_replicate=1 and more of cluster.replica_groups",
        ),
        Refuse(
            "parallelism.pp",
            lambda parallelism: parallelism.pp > 1,
            "replica groups do not divide the micro-batches of pipeline schedules yet",
            f"parallelism.pp=1, or {_WITHOUT}",
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
        Refuse(
            "optimizer.qk_clip",
            lambda optimizer: optimizer.max_logit is not None,
            "replica groups do not compare their largest logits yet",
            f"optimizer.qk_clip=null, or {_WITHOUT}",
        ),
        Refuse(
            "training.objective",
            lambda training: training.objective != "language_modeling",
            "replica groups are untested with other objectives than language modeling",
            f"training.objective=language_modeling, or {_WITHOUT}",
        ),
        Refuse(
            "cluster.group_timeout_seconds",
            lambda cluster: not 2 * cluster.group_heartbeat_seconds <= cluster.group_timeout_seconds < 1200,
            "time-outs must nest: two heartbeats ({cluster.group_heartbeat_seconds} s each) < collectives between "
            "groups < collectives within a group (1200 s)",
            "cluster.group_timeout_seconds=300",
        ),
        model_is_described_and_dense,
        when=_has_groups,
    ),
)
LAYOUT_RULES = rules(every_group_has_work, when=_has_groups)
