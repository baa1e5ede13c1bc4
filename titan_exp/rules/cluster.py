"""Cluster rules: machines of a scheduler, full nodes, and SLURM's options."""

import re
from collections.abc import Iterator
from pathlib import Path

from titan_exp.config.errors.user_error import Violation, divisors, listed
from titan_exp.config.groups.run import SLURM, ClusterConfig, PathsConfig
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.rules.rule import Refuse, rules

KEYS = {
    "comment": "cluster.comment",
    "job-name": "experiment.name",
    "nodes": "cluster.nodes",
    "ntasks": "parallelism",
    "ntasks-per-node": "cluster.gpus_per_node, or cluster.processes_per_node on CPU",
    "gpus-per-node": "cluster.gpus_per_node",
    "cpus-per-task": "cluster.cpus_per_gpu",
    "mem": "cluster.memory_gb",
    "time": "cluster.time_limit",
    "partition": "cluster.partition",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "constraint": "cluster.constraint",
    "reservation": "cluster.reservation",
    "exclude": "cluster.exclude",
    "signal": "cluster.signal_lead",
    "requeue": "cluster.requeue",
    "no-requeue": "cluster.requeue",
    "array": "cluster.array_limit",
}
"""Keys of sbatch options with one."""

RESERVED = {
    "output": "logs are in the run folder, where titan-exp logs reads them",
    "error": "logs are in the run folder, where titan-exp logs reads them",
    "input": "ranks read nothing from it",
    "open-mode": "a requeued job appends to its log",
    "parsable": "the submission reads what sbatch prints",
    "quiet": "the submission reads what sbatch prints",
    "verbose": "the submission reads what sbatch prints",
    "help": "sbatch would submit nothing",
    "usage": "sbatch would submit nothing",
    "version": "sbatch would submit nothing",
    "test-only": "sbatch would submit nothing",
    "wrap": "the job is the launcher's batch script",
    "wait": "submitting returns at once; titan-exp status shows the job",
}
"""Reasons to refuse sbatch options without a key."""

SHORT = {
    "J": "job-name",
    "N": "nodes",
    "n": "ntasks",
    "c": "cpus-per-task",
    "t": "time",
    "p": "partition",
    "A": "account",
    "q": "qos",
    "C": "constraint",
    "x": "exclude",
    "a": "array",
    "o": "output",
    "e": "error",
    "i": "input",
    "Q": "quiet",
    "v": "verbose",
    "h": "help",
    "V": "version",
    "W": "wait",
}
"""Long names of short sbatch options."""


def long_name(argument: str) -> str:
    """Long name of an sbatch argument; sbatch takes abbreviations of long options."""
    if not argument.startswith("--"):
        return SHORT.get(argument[1:2], argument)
    typed = argument[2:].partition("=")[0]
    known = [name for name in (*KEYS, *RESERVED) if name.startswith(typed)]
    # --gpus is an option of its own, no abbreviation.
    return typed if typed in (*known, "gpus") or not known else known[0]


def sbatch_options_are_free(cluster: ClusterConfig) -> Iterator[Violation]:
    """`cluster.sbatch_args` sets no option that the launcher sets or relies on."""
    for argument in cluster.sbatch_args:
        name = long_name(argument)
        if name in KEYS:
            reason, remedy = f"--{name} has a key of its own", f"set {KEYS[name]}"
        elif name in RESERVED:
            reason, remedy = f"--{name} cannot be set: {RESERVED[name]}", "leave it out"
        else:
            continue
        yield Violation("cluster.sbatch_args", argument, reason, remedy)


_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")


def arguments_are_well_formed(cluster: ClusterConfig) -> Iterator[Violation]:
    """Environment variable names and arguments of sbatch and srun are well-formed."""
    for name in cluster.environment:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            reason = "this is no name of an environment variable"
            yield Violation("cluster.environment", name, reason, "letters, digits and `_`, no digit first")
    for field in ("sbatch_args", "srun_args"):
        for argument in getattr(cluster, field):
            if not argument.startswith("-") or "\n" in argument:
                reason = f"{argument!r} is not a single argument, which begins with a dash and includes its value"
                yield Violation(f"cluster.{field}", argument, reason, f"cluster.{field}='[\"--nice=100\"]'")
    for argument in cluster.srun_args:
        name, _, value = argument.partition("=")
        if name == "--export" and "ALL" not in value.split(","):
            reason = "ranks would miss what the job's script sets: the code snapshot, the token and the threads"
            remedy = f"cluster.srun_args='[\"--export={','.join(['ALL', *filter(_is_set, value.split(','))])}\"]'"
            yield Violation("cluster.srun_args", argument, reason, remedy)


def runs_can_be_named_in_a_script(paths: PathsConfig) -> Iterator[Violation]:
    """The path of the runs has no character that a line of a batch script cannot hold."""
    path = Path(paths.runs).expanduser().absolute()
    cleaned = re.sub(r"[\\\x00-\x1f\x7f]", "_", str(path))
    if cleaned != str(path):
        remedy = "paths.runs='{}'".format(cleaned.replace("'", r"\'"))
        reason = "SLURM cannot write logs below a path with a backslash or a control character"
        yield Violation("paths.runs", repr(str(path)), reason, remedy)


def nodes_are_full(cluster: ClusterConfig, layout: ResolvedLayout, device: str) -> Iterator[Violation]:
    """Every node runs the same number of processes, and `cluster.nodes` matches the degrees."""
    if device == "cuda" and not cluster.gpus_per_node:
        return
    world, size, nodes = layout.world_size, layout.node_size, layout.nodes
    key = "processes_per_node" if device == "cpu" else "gpus_per_node"
    if world > size and world % size:
        below = world // size * size
        yield Violation(
            f"cluster.{key}",
            size,
            f"the degrees multiply to {world} processes, which do not fill nodes of {size} evenly",
            f"degrees that multiply to {below} or {below + size}, or "
            f"cluster.{key}={listed([number for number in divisors(world) if number <= size])}",
        )
    elif cluster.nodes is not None and cluster.nodes != nodes:
        yield Violation(
            "cluster.nodes",
            cluster.nodes,
            f"the degrees multiply to {world} processes, which fill {nodes} node{'s' * (nodes > 1)} of {size}",
            f"cluster.nodes=null, which asks for {nodes}, or parallelism.dp_shard=-1, which fills "
            f"{cluster.nodes * size} processes",
        )


def _is_set(word: str) -> bool:
    return word not in ("", "NONE", "NIL")


REMOTE_RULES = rules(
    Refuse(
        "cluster.device",
        lambda cluster: cluster.device == "auto",
        "this machine does not know which devices the nodes of {cluster.kind} have",
        "cluster.device=cuda or cluster.device=cpu",
    ),
    Refuse(
        "cluster.gpus_per_node",
        lambda cluster: cluster.device == "cuda" and cluster.gpus_per_node is None,
        "the GPUs of the nodes of {cluster.kind} cannot be counted from here",
        "cluster.gpus_per_node=8",
    ),
    when=lambda cluster: cluster.is_remote,
)
SLURM_RULES = rules(
    Refuse(
        "cluster.time_limit",
        lambda cluster: cluster.time_limit is not None and not _TIME.fullmatch(cluster.time_limit),
        "SLURM takes minutes, M:S, H:M:S, D-H or D-H:M:S",
        "cluster.time_limit=24:00:00",
    ),
    Refuse(
        "cluster.stop_limit",
        lambda cluster: cluster.stop_limit >= cluster.signal_lead,
        "the time limit comes {cluster.signal_lead} s after the stop request, which leaves no time to requeue",
        "cluster.stop_limit below {cluster.signal_lead}, or a longer cluster.signal_lead",
    ),
    arguments_are_well_formed,
    sbatch_options_are_free,
    runs_can_be_named_in_a_script,
    when=lambda cluster: cluster.kind == SLURM,
)
CLUSTER_RULES = (*REMOTE_RULES, *SLURM_RULES)
CLUSTER_LAYOUT_RULES = rules(nodes_are_full, when=lambda cluster: cluster.is_remote)
