"""sbatch options that the launcher sets, and those that would break it."""

from collections.abc import Iterator

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.run import ClusterConfig

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
