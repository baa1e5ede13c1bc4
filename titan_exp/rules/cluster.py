"""Rules of a run's place: its folder, names and import paths, machines of a scheduler, and SLURM's options."""

import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import Violation, did_you_mean, divisors, listed
from titan_exp.config.groups.optimizer import LRScheduleConfig, OptimizerConfig
from titan_exp.config.groups.parallelism import CompileConfig
from titan_exp.config.groups.run import SLURM, ClusterConfig, DataConfig, PathsConfig, RunConfig, TrackingConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.layout.axes import DEGREES
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema import foreign_code
from titan_exp.config.schema.component import find_dotted, is_builtin, is_dotted, unknown_name
from titan_exp.rules.rule import Refuse, rules


def name_is_a_folder_name(run: RunConfig) -> Iterator[Violation]:
    """The experiment's name is a portable folder name."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", run.name) or len(run.name) > 128:
        cleaned = re.sub(r"[^A-Za-z0-9._-]+", "_", run.name).lstrip(".-")[:128] or "my_idea"
        allowed = "use letters, digits, `.`, `_` and `-`, at most 128, and begin with a letter, a digit or `_`"
        reason = f"it becomes the name of a folder, so {allowed}"
        yield Violation("experiment.name", run.name, reason, f"use experiment.name={cleaned}")


def runs_folder_is_a_folder(paths: PathsConfig) -> Iterator[Violation]:
    """The folder of runs is a folder or does not exist."""
    nearest = _nearest(paths)
    if not paths.runs:
        yield Violation("paths.runs", "''", "the path is empty", "use paths.runs=runs")
    elif not nearest.is_dir():
        yield Violation("paths.runs", paths.runs, f"{nearest} is a file", "give the path of a folder")


def runs_folder_is_writable(paths: PathsConfig) -> Iterator[Violation]:
    """The folder of runs can be created or written to."""
    nearest = _nearest(paths)
    if nearest.is_dir() and not os.access(nearest, os.W_OK | os.X_OK):
        remedy = "choose a folder that you can write to: paths.runs=/scratch/$USER/runs"
        yield Violation("paths.runs", paths.runs, f"you cannot write to {nearest}", remedy)


def _nearest(paths: PathsConfig) -> Path:
    folder = Path(paths.runs).expanduser().absolute()
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


PATH_RULES = rules(name_is_a_folder_name, runs_folder_is_a_folder)
PATH_LAUNCH_RULES = rules(runs_folder_is_writable)


CPP_COMPILERS = ("g++", "clang++", "c++")  # c++ compilers that inductor can use


def source_is_known(data: DataConfig) -> Iterator[Violation]:
    """The data source is built in or can be imported."""
    options = {} if foreign_code.described(data.source).has_options else data.options
    yield from _known("data.source", data.source, tuple(foreign_code.sources()), options, "my_package.data.Corpus")


def components_are_known(
    training: TrainingConfig, optimizer: OptimizerConfig, lr_schedule: LRScheduleConfig, cluster: ClusterConfig
) -> Iterator[Violation]:
    """Objective, decay and executor are built in or can be imported; those of the core have no options."""
    objective = "my_package.objectives.Distillation"
    options = training.objective_options if training.objective == foreign_code.LANGUAGE_MODELING else {}
    yield from _known("training.objective", training.objective, foreign_code.objective_names(), options, objective)
    if is_builtin("optimizer", optimizer.name):  # `component` has checked that it exists
        yield from _known("optimizer.name", optimizer.name, (optimizer.name,), optimizer.options)
    decay = "my_package.schedules.exponential"
    yield from _known("lr_schedule.decay", lr_schedule.decay, foreign_code.decay_names(), lr_schedule.options, decay)
    yield from _known("cluster.kind", cluster.kind, foreign_code.executor_names(), {}, "my_package.launch.MyExecutor")


def parts_are_known(training: TrainingConfig) -> Iterator[Violation]:
    """Parts of the user's are import paths, by names that are words."""
    for label, part in training.parts.items():
        key, name = f"training.parts.{label}", part.name
        if not label.isidentifier():
            word = re.sub(r"\W|^(?=\d)", "_", label)
            reason = "the name of a part is a word of letters, digits and `_`"
            yield Violation(key, label, reason, f"use +training.parts.{word}.name={name}")
        elif not is_dotted(name):
            remedy = f"write it as in +{key}.name=my_package.parts.Probe"
            yield Violation(f"{key}.name", name, "this is not an import path", remedy)
        elif (violation := find_dotted(name, f"{key}.name")) is not None:
            yield violation


def metrics_are_known(tracking: TrackingConfig) -> Iterator[Violation]:
    """Metrics of modules are built in or can be imported."""
    example = "[my_package.metrics.BlockSquares]"
    for name in tracking.metrics:
        yield from _known("tracking.metrics", name, foreign_code.metric_names(), {}, example)


def compiler_exists(compile: CompileConfig, device: str) -> Iterator[Violation]:
    """The compile backend exists in torch, and the C++ compiler that it needs on CPU is installed."""
    backend, known, on_cpu = compile.backend, foreign_code.COMPILE_BACKENDS, compile.enabled and device == "cpu"
    if backend not in known:
        reason = "torch.compile has no such backend"
        remedy = did_you_mean(backend, known) or f"use one of {listed(known)}"
    elif on_cpu and backend == "cudagraphs":
        reason = "CUDA graphs need a GPU, and this run trains on the CPU"
        remedy = "use compile.backend=inductor or aot_eager"
    elif on_cpu and backend == "inductor" and not any(map(shutil.which, CPP_COMPILERS)):
        reason = "on a CPU inductor needs a C++ compiler, and none is on your PATH"
        remedy = "install g++, or use compile=none"
    else:
        return
    yield Violation("compile.backend", backend, reason, remedy)


def _known(
    field: str, name: str, builtin: tuple[str, ...], options: dict[str, Any], example: str = ""
) -> Iterator[Violation]:
    """The name is built in, without options, or an existing import path."""
    group, _, key = field.partition(".")
    if name in builtin and options:
        option_key = f"{group}.objective_options" if key == "objective" else f"{group}.options"
        reason = f"{field}={name} is built in, and options are for your own code"
        remedy = f"leave options out and set keys of {group}, or give the import path of your own code as {field}"
        yield Violation(option_key, options, reason, remedy)
    elif name not in builtin and not is_dotted(name):
        yield unknown_name(field, name, builtin, example)
    elif name not in builtin and (violation := find_dotted(name, field)) is not None:
        yield violation


NAME_RULES = rules(components_are_known, source_is_known, parts_are_known, metrics_are_known, compiler_exists)


KEYS = {
    **{name: f"cluster.{name}" for name in ("comment", "partition", "account", "qos", "constraint", "reservation")},
    "job-name": "experiment.name",
    "nodes": "cluster.nodes",
    "ntasks": "parallelism",
    "ntasks-per-node": "cluster.gpus_per_node, or cluster.processes_per_node on CPU",
    "gpus-per-node": "cluster.gpus_per_node",
    "cpus-per-task": "cluster.cpus_per_gpu",
    "mem": "cluster.memory_gb",
    "time": "cluster.time_limit",
    "exclude": "cluster.exclude",
    "signal": "cluster.signal_lead",
    "requeue": "cluster.requeue",
    "no-requeue": "cluster.requeue",
    "array": "cluster.array_limit",
}
"""Keys of sbatch options with one."""

RESERVED = {
    **dict.fromkeys(("output", "error"), "titan-exp logs finds the logs in the run folder only"),
    "input": "the ranks read no input",
    "open-mode": "a requeued job has to append to its log",
    **dict.fromkeys(("parsable", "quiet", "verbose"), "titan_exp reads the job id from what sbatch prints"),
    **dict.fromkeys(("help", "usage", "version", "test-only"), "with it sbatch submits nothing"),
    "wrap": "titan_exp writes the batch script",
    "wait": "titan-exp returns as soon as the job is submitted, and titan-exp status shows how it goes",
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
            reason, remedy = f"a key of the configuration sets --{name}", f"set {KEYS[name]} instead"
        elif name in RESERVED:
            reason, remedy = f"you cannot set --{name}: {RESERVED[name]}", "leave it out"
        else:
            continue
        yield Violation("cluster.sbatch_args", argument, reason, remedy)


_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")


def arguments_are_well_formed(cluster: ClusterConfig) -> Iterator[Violation]:
    """Environment variable names and arguments of sbatch and srun are well-formed."""
    for name in cluster.environment:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            reason = "this cannot be the name of an environment variable"
            yield Violation("cluster.environment", name, reason, "use letters, digits and `_`, and no digit first")
    for field in ("sbatch_args", "srun_args"):
        for argument in getattr(cluster, field):
            if not argument.startswith("-") or "\n" in argument:
                reason = f"{argument!r} is not an argument: one begins with a dash and includes its value"
                remedy = f"write it as in cluster.{field}='[\"--nice=100\"]'"
                yield Violation(f"cluster.{field}", argument, reason, remedy)
    for argument in cluster.srun_args:
        name, _, value = argument.partition("=")
        if name == "--export" and "ALL" not in value.split(","):
            kept = ",".join(["ALL", *(word for word in value.split(",") if word not in ("", "NONE", "NIL"))])
            lost = "the code snapshot, the token and the number of threads"
            reason = f"the ranks would not see what the batch script sets: {lost}"
            yield Violation("cluster.srun_args", argument, reason, f"use cluster.srun_args='[\"--export={kept}\"]'")


def runs_can_be_named_in_a_script(paths: PathsConfig) -> Iterator[Violation]:
    """The path of the runs has no character that a line of a batch script cannot hold."""
    path = Path(paths.runs).expanduser().absolute()
    cleaned = re.sub(r"[\\\x00-\x1f\x7f]", "_", str(path))
    if cleaned != str(path):
        remedy = "use paths.runs='{}'".format(cleaned.replace("'", r"\'"))
        reason = "SLURM cannot write logs to a path that has a backslash or a control character"
        yield Violation("paths.runs", repr(str(path)), reason, remedy)


def nodes_are_full(cluster: ClusterConfig, layout: ResolvedLayout, device: str) -> Iterator[Violation]:
    """Every node runs the same number of processes, and `cluster.nodes` matches the degrees."""
    if device == "cuda" and not cluster.gpus_per_node:
        return
    world, size, nodes = layout.world_size, layout.node_size, layout.nodes
    field = "cluster.processes_per_node" if device == "cpu" else "cluster.gpus_per_node"
    if world > size and world % size:
        below, whole = world // size * size, listed([number for number in divisors(world) if number <= size])
        reason = f"the layout needs {world} processes, which do not fill whole nodes of {size}"
        remedy = f"choose degrees whose product is {below} or {below + size}, or set {field}={whole}"
        yield Violation(field, size, reason, remedy)
    elif cluster.nodes is not None and cluster.nodes != nodes:
        offered, own = cluster.nodes * size, layout.parallelism
        others = [axis for axis in DEGREES if axis != "dp_shard" and getattr(own, axis) > 1]
        product = math.prod(getattr(own, axis) for axis in others)
        fills = f"parallelism.dp_shard=-1, which fills all {offered} processes"
        if product > offered:
            is_above = f"{'their product ' if len(others) > 1 else ''}{product} is above {offered}"
            fills = f"lower {listed([f'parallelism.{axis}' for axis in others])}: {is_above}"
        elif offered % product:
            fills = f"choose degrees whose product is {offered}"
        reason = f"the layout needs {world} processes, which fill {nodes} node{'s' * (nodes > 1)} of {size}"
        remedy = f"use cluster.nodes=null, which asks for {nodes}, or {fills}"
        yield Violation("cluster.nodes", cluster.nodes, reason, remedy)


_REMOTE_RULES = rules(
    Refuse(
        "cluster.device",
        lambda cluster: cluster.device == "auto",
        "titan_exp cannot see from here which devices the nodes of {cluster.kind} have",
        "set cluster.device=cuda or cluster.device=cpu",
    ),
    Refuse(
        "cluster.gpus_per_node",
        lambda cluster: cluster.device == "cuda" and cluster.gpus_per_node is None,
        "titan_exp cannot count the GPUs of the nodes of {cluster.kind} from here",
        "say how many GPUs a node has, for example cluster.gpus_per_node=8",
    ),
    when=lambda cluster: cluster.is_remote,
)
_SLURM_RULES = rules(
    Refuse(
        "cluster.time_limit",
        lambda cluster: cluster.time_limit is not None and not _TIME.fullmatch(cluster.time_limit),
        "SLURM reads a time as minutes, M:S, H:M:S, D-H or D-H:M:S",
        "write it as in cluster.time_limit=24:00:00",
    ),
    Refuse(
        "cluster.stop_limit",
        lambda cluster: cluster.stop_limit >= cluster.signal_lead,
        "SLURM kills the job {cluster.signal_lead} s after the stop request, so the run would have no time to requeue",
        "use a cluster.stop_limit below {cluster.signal_lead}, or a longer cluster.signal_lead",
    ),
    arguments_are_well_formed,
    sbatch_options_are_free,
    runs_can_be_named_in_a_script,
    when=lambda cluster: cluster.kind == SLURM,
)
RULES = (*_REMOTE_RULES, *_SLURM_RULES)
LAYOUT_RULES = rules(nodes_are_full, when=lambda cluster: cluster.is_remote)
