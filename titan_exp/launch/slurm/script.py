"""sbatch script of a run or a job array, rendered from the template `job.sh.jinja`."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from titan_exp.config.devices import device_type
from titan_exp.config.groups.run import ClusterConfig
from titan_exp.launch.code_snapshot import CodeSnapshot
from titan_exp.launch.executor import several_worlds, size_in_words
from titan_exp.launch.rank.rank_env import GROUP
from titan_exp.tracking.run_folder.run_folder import PREEMPTED

if TYPE_CHECKING:
    from jinja2 import Template

START = "titan_exp: job"
"""First words of the batch script's line at each start; the log of a requeued job holds several starts."""
MARK = "titan_exp:"  # prefix of the token in the job comment
EARLY = 120  # seconds by which SLURM may signal before the lead: a minute by its manual, and another of slack


@dataclass(frozen=True)
class Resources:
    """Resources of a job. Runs with equal resources share an array."""

    cluster: ClusterConfig
    nodes: int
    tasks_per_node: int  # processes per node, one per GPU


@dataclass(frozen=True)
class Script:
    """Parameters of a batch script."""

    name: str
    token: str  # token in the job comment; array tasks append their index
    resources: Resources
    snapshot: CodeSnapshot
    python: str  # interpreter of the submitting machine, for ranks outside a container
    import_path: Sequence[str]  # folders appended to the ranks' sys.path
    folder: str  # run folder; for an array, a folder whose entries 0, 1, ... link to the run folders.
    submission: str  # folder of the job's log; the run folder would not do, since it may be deleted while the job waits
    runs: str  # folder of all runs, mounted in a container
    array: int | None = None
    worlds: tuple[int, ...] | None = None  # worlds of one run, each an array task; None if the run has one world


@cache
def _template() -> "Template":
    from jinja2 import Environment, StrictUndefined  # submissions alone need it

    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["quote"] = shlex.quote
    return environment.from_string(Path(__file__).with_name("job.sh.jinja").read_text(encoding="utf-8"))


def render(script: Script) -> str:
    """Render the batch script, `job.sh.jinja`."""
    cluster, resources = script.resources.cluster, script.resources
    worlds = None if script.worlds is None else several_worlds()
    size = size_in_words(resources.nodes, resources.tasks_per_node)
    if worlds is not None and script.worlds is not None:
        size = f"{len(script.worlds)} {worlds.noun}{'s' * (len(script.worlds) > 1)}, each of {size}"
    elif script.array is not None:
        size = f"{script.array} runs, each of {size}"
    options = [
        f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}"
        for name, value in sbatch_options(script)
        if value is not None
    ]
    inside, python = _container(script)
    ranks = ["srun", "--kill-on-bad-exit=1", *inside]
    ranks += [] if cluster.cpus_per_gpu is None else [f"--cpus-per-task={cluster.cpus_per_gpu}"]
    closing = ["srun", "--nodes=1", "--ntasks=1", *inside, *python] if inside else python
    return _template().render(
        script=script,
        size=size,
        options=[*options, *map(shlex.quote, cluster.sbatch_args)],
        worlds=worlds,
        start=START,
        group=GROUP,
        cluster=cluster,
        threads=cluster.threads_per_process or cluster.cpus_per_gpu,
        lead=cluster.signal_lead,
        early=EARLY,
        limit=cluster.stop_limit,
        preempted=PREEMPTED,
        srun=shlex.join([*ranks, *cluster.srun_args]),
        python=shlex.join(python),
        closing=shlex.join(closing),
    )


def sbatch_options(script: Script) -> Iterator[tuple[str, object]]:
    """sbatch options with their values; True for a flag."""
    cluster = script.resources.cluster
    log = "%j" if script.array is None and script.worlds is None else "%A_%a"
    folder = script.submission.replace("%", "%%")  # SLURM expands a single pattern
    yield "job-name", script.name
    yield "comment", " ".join(filter(None, [cluster.comment, f"{MARK}{script.token}"]))
    if script.array is not None:
        limit = "" if cluster.array_limit is None else f"%{cluster.array_limit}"
        yield "array", f"0-{script.array - 1}{limit}"
    if script.worlds is not None:
        yield "array", ",".join(map(str, script.worlds))
    yield from resource_options(script.resources)
    yield "signal", f"B:USR2@{cluster.signal_lead}"
    yield ("requeue" if cluster.requeue in ("auto", "requeue") else "no-requeue"), True
    yield "open-mode", "append"
    yield "output", f"{folder}/slurm-{log}.out"


def resource_options(resources: Resources) -> Iterator[tuple[str, object]]:
    """sbatch options about the resources of a job, with their values; None leaves one out."""
    cluster = resources.cluster
    for option in ("partition", "account", "qos", "constraint", "reservation", "exclude"):
        yield option, getattr(cluster, option)
    yield "nodes", resources.nodes
    yield "ntasks-per-node", resources.tasks_per_node
    if device_type(cluster) == "cuda":
        kind = "" if cluster.gpu_type is None else f"{cluster.gpu_type}:"
        yield "gpus-per-node", f"{kind}{resources.tasks_per_node}"
    yield "cpus-per-task", cluster.cpus_per_gpu
    yield "mem", None if cluster.memory_gb is None else f"{cluster.memory_gb}G" if cluster.memory_gb else 0
    yield "time", cluster.time_limit


def _container(script: Script) -> tuple[list[str], list[str]]:
    """Arguments by which srun starts the container, if it does, and the command of Python."""
    cluster, image = script.resources.cluster, script.resources.cluster.container_image
    if image is None:
        return [], [cluster.python or script.python]
    mounts, python = [*cluster.container_mounts, f"{script.runs}:{script.runs}"], cluster.python or "python3"
    if cluster.container_runtime == "pyxis":
        return [f"--container-image={image}", f"--container-mounts={','.join(mounts)}"], [python]
    nvidia = ["--nv"] if device_type(cluster) == "cuda" else []
    return [], ["apptainer", "exec", *nvidia, *(f"--bind={mount}" for mount in mounts), image, python]
