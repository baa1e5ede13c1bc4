"""sbatch script of a run or a job array, rendered to text."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from titan_exp.config.devices import device_type
from titan_exp.config.groups.run import ClusterConfig
from titan_exp.launch.code_snapshot import CodeSnapshot
from titan_exp.launch.executor import several_worlds
from titan_exp.launch.rank.rank_env import GROUP
from titan_exp.tracking.run_folder.run_folder import PREEMPTED

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

    @property
    def tasks(self) -> bool:
        """True if the job is an array."""
        return self.array is not None or self.worlds is not None


def render(script: Script) -> str:
    """Render the batch script."""
    cluster = script.resources.cluster
    # A world that comes back must not take back the request to the others.
    clear, leave = 'rm -f "$RUN/stop"\n', ""
    if script.worlds is not None:
        launch = several_worlds()
        clear, leave = "", _LEAVE.replace("@NOUN@", launch.noun)
        leave = leave.replace("@LEAVE@", f"{_closing(script)} -m {launch.leave}")
    lead, limit = cluster.signal_lead, cluster.stop_limit
    values = {"CLEAR": clear, "LEAVE": leave, "LEAD": lead, "LIMIT": limit, "EARLIEST": lead + EARLY}
    stop = _STOP.replace("@PREEMPTED@", PREEMPTED)
    for name, value in values.items():
        stop = stop.replace(f"@{name}@", str(value))
    return "\n".join([_head(script), _run(script), _environment(script), stop, _ranks(script)])


def sbatch_options(script: Script) -> Iterator[tuple[str, object]]:
    """sbatch options with their values; True for a flag."""
    cluster = script.resources.cluster
    log = "%A_%a" if script.tasks else "%j"
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


def _head(script: Script) -> str:
    nodes, tasks = script.resources.nodes, script.resources.tasks_per_node
    size = f"{nodes} node{'s' * (nodes > 1)} with {tasks} process{'es' * (tasks > 1)} each"
    if script.worlds is not None:
        size = f"{len(script.worlds)} {several_worlds().noun}{'s' * (len(script.worlds) > 1)}, each of {size}"
    elif script.array is not None:
        size = f"{script.array} runs, each of {size}"
    lines = ["#!/bin/bash", f"# {script.name}: {size}. Written by titan_exp.", ""]
    for option, value in sbatch_options(script):
        if value is not None:
            lines.append(f"#SBATCH --{option}" + ("" if value is True else f"={shlex.quote(str(value))}"))
    lines += [f"#SBATCH {shlex.quote(argument)}" for argument in script.resources.cluster.sbatch_args]
    return "\n".join([*lines, ""])


def _run(script: Script) -> str:
    if script.worlds is not None:
        lines = [
            f"# The run, and the {several_worlds().noun} of this array task.",
            f"RUN={shlex.quote(script.folder)}",
            f'export {GROUP}="$SLURM_ARRAY_TASK_ID"',
            'JOB="${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"',
            f"export TITAN_EXP_TOKEN={script.token}",
        ]
    elif script.array is None:
        lines = ["# The run.", f"RUN={shlex.quote(script.folder)}", 'JOB="$SLURM_JOB_ID"']
        lines.append(f"export TITAN_EXP_TOKEN={script.token}")
    else:
        lines = [
            "# The run of this array task.",
            f'RUN="$(readlink -m {shlex.quote(script.folder)}/"$SLURM_ARRAY_TASK_ID")"',
            "# One task has the id of the whole array as its own, so tasks are named by both.",
            'JOB="${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"',
            f'export TITAN_EXP_TOKEN="{script.token}_$SLURM_ARRAY_TASK_ID"',
        ]
    return "\n".join([*lines, "", _CHECK.replace("@LOG@", shlex.quote(script.submission))])


def _environment(script: Script) -> str:
    cluster, snapshot = script.resources.cluster, script.snapshot
    lines = [
        "# Numbers of ranks that the submitting shell, or an image, holds: those of srun count.",
        "unset {,LOCAL_,GROUP_,ROLE_}{RANK,WORLD_SIZE} ROLE_NAME MASTER_{ADDR,PORT} ${!TORCHELASTIC_@}",
        "# srun hands on what follows, also where the job itself got no environment (--export=NONE).",
        "export SLURM_EXPORT_ENV=ALL",
        "# The code as it was at submission: edits since then have no effect.",
        f"export PYTHONPATH={shlex.quote(snapshot.package)}",
        f"export TITAN_EXP_IMPORT_PATH={shlex.quote(':'.join(script.import_path))}",
        "export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 PYTHONDONTWRITEBYTECODE=1",
    ]
    threads = cluster.threads_per_process or cluster.cpus_per_gpu
    if threads is not None:
        lines.append(f"export OMP_NUM_THREADS={threads}")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in cluster.environment.items()]
    if cluster.setup:
        lines += ["", "# cluster.setup", *cluster.setup]
    return "\n".join([*lines, ""])


_CHECK = f"""\
echo "{START} $JOB, start ${{SLURM_RESTART_COUNT:-0}} on $SLURM_JOB_NODELIST, $(date +%FT%T)"
if [ ! -e "$RUN/config.yaml" ]; then
    echo "$RUN: the run folder was deleted or moved, so job $JOB ends."
    exit 2
elif ! tail -n 1 "$RUN/attempts.jsonl" | grep -qF '"token": "'"$TITAN_EXP_TOKEN"'"'; then
    echo "$RUN: this run was started anew after job $JOB was submitted, so it ends: titan-exp status $RUN"
    exit 2
fi
# The log's second name, in the run folder.
log=@LOG@"/slurm-$JOB.out"
[ -d "$RUN/logs" ] || mkdir "$RUN/logs"
[ -e "$RUN/logs/slurm-$JOB.out" ] || ln "$log" "$RUN/logs" 2> /dev/null || ln -s "$log" "$RUN/logs"
"""


_LEAVE = """\
    # A @NOUN@ leaves alone if others train on.
    if [ "$signals" = 1 ] && @LEAVE@ "$RUN"; then
        kill "$step"
        return
    fi
"""
_STOP = """\
# @LEAD@ s before the time limit SLURM sends USR2 to this script alone. All ranks poll the flag, agree on a step, save
# together and exit. Those that have not in @LIMIT@ s are killed, which leaves time to requeue the run.
@CLEAR@signals=0
stop() {
    signals=$((signals + 1))
@LEAVE@    why="SLURM is about to end the job (time limit, or preemption)"
    if [ -n "$SLURM_JOB_END_TIME" ]; then  # newer SLURMs set it
        why="SLURM is about to end the job (time limit)"
        [ $((SLURM_JOB_END_TIME - $(date +%s))) -le @EARLIEST@ ] || why="@PREEMPTED@ before its time limit"
    fi
    [ -e "$RUN/stop" ] || echo "$why" > "$RUN/stop"
    [ "$signals" = 1 ] || return
    (sleep @LIMIT@; kill "$step") > /dev/null 2>&1 &  # srun then kills all ranks
}
trap stop USR2
"""


def _ranks(script: Script) -> str:
    cluster = script.resources.cluster
    arguments = ["srun", "--kill-on-bad-exit=1", *_pyxis(script)]
    if cluster.cpus_per_gpu is not None:
        arguments.append(f"--cpus-per-task={cluster.cpus_per_gpu}")
    arguments += cluster.srun_args
    epilogue = "titan_exp.launch.slurm.epilogue" if script.worlds is None else several_worlds().epilogue
    log = '"${RUN//%/%%}/logs/slurm-$JOB-${SLURM_RESTART_COUNT:-0}-rank-%5t.log"'
    lines = [
        "# One process per rank. srun kills the peers of a failed rank.",
        f"{shlex.join(arguments)} \\",
        f"    --output={log} \\",
        f'    {_python(script)} -m titan_exp.launch.rank.main "$RUN" &',
        "step=$!",
        "# A signal ends `wait` early: repeat it until srun has ended.",
        "while",
        '    seen=$signals; wait "$step"; code=$?',
        '    [ "$seen" != "$signals" ]',
        "do :; done",
        "",
        "# Close the attempt. Exit code 0: done, 85: requeue, any other: failed.",
        f'{_closing(script)} -m {epilogue} "$RUN" "$JOB" "$code"',
        "code=$?",
    ]
    requeue = ['scontrol requeue "$JOB" && exit 0']
    task = "" if script.worlds is None else f' --array="${GROUP}"'
    chain = [f'sbatch{task} --dependency="afterany:$JOB" "$RUN/job.sh"']
    ways = {"requeue": requeue, "chain": chain}
    ways["auto"] = [*requeue, "# Requeueing is forbidden here: submit a new job.", *chain]
    if way := ways.get(cluster.requeue):
        lines += ['if [ "$code" = 85 ]; then', *(f"    {line}" for line in way), "fi"]
    return "\n".join([*lines, 'exit "$code"', ""])


def _closing(script: Script) -> str:
    start = shlex.join(["srun", "--nodes=1", "--ntasks=1", *_pyxis(script)]) + " " if _pyxis(script) else ""
    return start + _python(script)


def _python(script: Script) -> str:
    cluster = script.resources.cluster
    inside = cluster.container_image is not None
    python = cluster.python or ("python3" if inside else script.python)
    if not inside or cluster.container_runtime != "apptainer":
        return shlex.quote(python)
    bind = [f"--bind={mount}" for mount in (*cluster.container_mounts, f"{script.runs}:{script.runs}")]
    nvidia = ["--nv"] if device_type(cluster) == "cuda" else []
    return shlex.join(["apptainer", "exec", *nvidia, *bind, cluster.container_image or "", python])


def _pyxis(script: Script) -> list[str]:
    cluster = script.resources.cluster
    if cluster.container_image is None or cluster.container_runtime != "pyxis":
        return []
    mounts = ",".join([*cluster.container_mounts, f"{script.runs}:{script.runs}"])
    return [f"--container-image={cluster.container_image}", f"--container-mounts={mounts}"]
