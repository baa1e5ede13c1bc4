"""Executor interface: submit, query and cancel runs; identify a rank and join its rendezvous.

An executor is `launch/KIND/executor.py` (`local`, `slurm`), or your class; `cluster.kind` is KIND or its import path.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from titan_exp.config.errors.user_error import UserError, Violation, listed
from titan_exp.config.extension import loaded
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.run import LOCAL, ClusterConfig
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.component import import_dotted, is_dotted
from titan_exp.config.schema.foreign_code import executor_names
from titan_exp.config.schema.typed_config import load_group, read_values, typed_options
from titan_exp.config.secrets import revealed
from titan_exp.launch.rank.rank_env import RankInfo
from titan_exp.tracking.run_folder.run_folder import RunFolder, shown_state

if TYPE_CHECKING:
    from titan_exp.launch.attempt_end import AttemptResult


class Processes(Protocol):
    """Processes of one attempt on this machine. The launcher polls them and holds the run lock."""

    job_id: str  # ids of their parent processes, once started

    def log(self, rank: int) -> Path:
        """Path of a rank's log; with several worlds, of the first."""
        ...

    def start(self) -> None:
        """Start them. Raises OSError if the logs cannot be written."""

    def poll(self) -> bool:
        """Poll them; returns True once the attempt is over."""
        ...

    def news(self) -> Iterable[str]:
        """Lines for the console since the last call, besides those of the logs."""
        ...

    def kill(self) -> None:
        """Kill them."""

    def close(self) -> None:
        """Kill the processes that are left."""

    def result(self) -> AttemptResult:
        """Result of the attempt; call after `poll` returned True."""
        ...


class WorldsSummary(ABC):
    """Summary of a run's worlds; a dataclass, whose fields `titan-exp status --json` prints."""

    @property
    @abstractmethod
    def lost(self) -> float:
        """Seconds lost to failures of worlds, over all attempts."""

    @abstractmethod
    def cells(self) -> dict[str, str]:
        """Cells of the `titan-exp status` table, by column."""


class Worlds(ABC):
    """Launch of runs with several worlds; on SLURM, each is a task of one array, whose comment has the run's token."""

    noun: ClassVar[str]  # noun for one world, in texts for users
    leave: ClassVar[str]
    """Module, and words before the run folder, that a batch script calls shortly before SLURM ends its job. Exit code 0
    ends this world alone; 1 saves and stops the whole run."""
    epilogue: ClassVar[str]  # module, and words before its arguments, that replaces `titan_exp.launch.slurm.epilogue`
    status_help: ClassVar[str]  # sentence about its columns, for `titan-exp status --help`

    @abstractmethod
    def supervise(self, layout: ResolvedLayout, folder: RunFolder, attempt: int) -> Processes:
        """Processes of all worlds of an attempt on this machine."""

    @abstractmethod
    def join(self, folder: RunFolder, rank: RankInfo, number: int) -> tuple[RunFolder, RankInfo]:
        """Join the run's attempt as a rank of world `number`, which has a job of its own. Returns the folder as this
        world's ranks see it, and the rank with its attempt number. Raises UserError if it cannot join."""

    @abstractmethod
    def summarize(self, folder: RunFolder) -> WorldsSummary | None:
        """Summary of a run; None if it has one world. Raises UserError if its metrics are damaged."""


@cache
def worlds_launch() -> Worlds | None:
    """Launch of runs with several worlds; None if no installed extension provides one. Raises UserError if two do."""
    kinds = list(loaded("worlds"))
    if len(kinds) > 1:
        modules = listed([kind.__module__ for kind in kinds], "and")
        raise UserError(f"Several extensions launch the worlds of a run: {modules}. Uninstall all but one.")
    return kinds[0]() if kinds else None


def several_worlds() -> Worlds:
    """Launch of runs with several worlds; an extension must provide it."""
    launch = worlds_launch()
    assert launch is not None, "an extension's keys ask for several"
    return launch


def summarize_worlds(folder: RunFolder) -> WorldsSummary | None:
    """Summary of a run's worlds; None if it has one. Raises UserError if its metrics are damaged."""
    launch = worlds_launch()
    return None if launch is None else launch.summarize(folder)


def size_in_words(nodes: int, tasks: int) -> str:
    """Nodes, and processes on each, in words."""
    return f"{nodes} node{'s' * (nodes > 1)} with {tasks} process{'es' * (tasks > 1)} each"


NOT_CANCELLED = "not cancelled"
"""First words of an `Executor.cancel` message about a run that it leaves running or queued."""


@dataclass(frozen=True)
class RunPlan:
    """Checked run with its id and folder."""

    experiment: Experiment
    overrides: tuple[str, ...]
    run_id: str
    experiment_id: str
    folder: RunFolder
    """Run folder; may not exist yet."""
    prediction: str | None = None
    """Content of plan.json; None keeps an existing file."""
    compilation: tuple[str, ...] = ()
    """Sentence about the value that `compile.enabled=auto` took."""
    fills_node: bool = False
    """True if several shards only come from `parallelism.dp_shard=-1`, which takes what the cluster offers."""

    @property
    def layout(self) -> ResolvedLayout:
        """Resolved layout of the experiment."""
        return ResolvedLayout.of(self.experiment)

    @property
    def size(self) -> str:
        """Nodes and processes, in words."""
        size = size_in_words(self.layout.nodes, min(self.layout.world_size, self.layout.node_size))
        worlds = self.layout.cluster.worlds
        return size if worlds == 1 else f"{worlds} {several_worlds().noun}s, each of {size}"

    @property
    def runs(self) -> Path:
        """Folder with the runs of all experiments."""
        return self.folder.path.parents[1]

    @property
    def name(self) -> str:
        """NAME/ID, by which other verbs find it."""
        return "/".join(self.folder.path.parts[-2:])

    @property
    def job_name(self) -> str:
        """Name in a list of jobs."""
        return f"{self.experiment.experiment.name}-{self.run_id}"

    @property
    def is_done(self) -> bool:
        """True if state.json records the run as done."""
        state = self.folder.read_state()
        return state is not None and state.state == "done"


@dataclass(frozen=True)
class Submission:
    """Result of submitting one run."""

    plan: RunPlan
    outcome: Literal["submitted", "done", "queued", "running", "failed", "preempted", "refused", "not started"]
    """Outcome: `submitted` by this call; `done`, `queued` or `running` already; the final state if the executor waits;
    `refused`; `not started` after a signal or a stop request."""
    job_id: str | None = None
    reason: str | None = None
    exit_code: int = 0
    """Exit code of the run if the executor waits, 2 if refused; if not started, 85 after a stop request, else 130."""

    @classmethod
    def refused(cls, plan: RunPlan, reason: str, job_id: str | None = None) -> Submission:
        """Result of a run that is not submitted."""
        return cls(plan, "refused", job_id, reason, UserError.exit_code)

    @property
    def shown(self) -> str:
        """Word for the outcome."""
        return shown_state(self.outcome, self.reason)


@dataclass(frozen=True)
class SubmitOptions:
    """Options of `Executor.submit`."""

    echo: Callable[[str], None] = print
    title: Callable[[RunPlan], str] = lambda plan: str(plan.folder.path)
    jobs: int = 1
    """Maximum number of concurrent runs, for executors that wait."""
    stop_requested: Callable[[], bool] = lambda: False
    """Polled before each start; no run starts once it returns True."""


@dataclass(frozen=True)
class JobStatus:
    """Scheduler state of a run."""

    state: Literal["queued", "running", "gone", "unknown"]
    """`gone`: ended or no longer known to the scheduler; `unknown`: the scheduler did not respond."""
    job_id: str | None = None
    reason: str | None = None
    """Reason for waiting, or how the job ended."""
    jobs: Mapping[str, str] = field(default_factory=dict)
    """State, `queued` or `running`, by job id, if each of several worlds has a job."""


@dataclass(frozen=True)
class NoOptions:
    """Options of an executor that has none."""


class Executor(ABC):
    """Launches runs and identifies their ranks, in separate processes: it holds no state between calls."""

    Options: ClassVar[type[Any]] = NoOptions
    """Dataclass of `cluster.options`, which are recorded but are not part of the run's id."""
    waits = False
    """True if `submit` blocks until the runs have ended."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        """`cluster.kind`, recorded as `launched_by` of its attempts."""

    def options(self, cluster: ClusterConfig) -> Any:
        """`Options` of a run. Raises UserError if a name or a value in `cluster.options` does not fit."""
        return typed_options(self.Options, revealed(cluster.options, "cluster.options"), "cluster.options")

    def options_of(self, folder: RunFolder) -> Any:
        """`Options` of a run that was launched, as its folder records them."""
        return self.options(load_group(folder.config, "cluster", trust=True))

    def require(self, plans: Sequence[RunPlan]) -> None:  # noqa: B027  # not every executor needs something
        """Raise UserError if runs cannot be submitted from this machine, before anything is written."""

    @abstractmethod
    def submit(self, plans: Sequence[RunPlan], options: SubmitOptions) -> list[Submission]:
        """Submit runs that are not done, queued or running; returns one result per plan, in order.

        The intent is recorded in attempts.jsonl before the job exists: `launched_by=self.kind`, and a token that the
        ranks read from `TITAN_EXP_TOKEN`.
        """

    def launch(self, plan: RunPlan) -> Submission:
        """Submit one run for `titan-exp train`, and print the outcome and the next commands."""
        (submission,) = self.submit([plan], SubmitOptions())
        name = typed_path(plan.folder.path)
        line = submission.shown + (f" job {submission.job_id}" if submission.job_id else "")
        if submission.outcome == "submitted":
            line += f", {plan.size}"
        if submission.outcome == "refused":
            print(f"{line}: {name}\n{indent(submission.reason or '', '  ')}", file=sys.stderr)
            return submission
        print(f"{line}{f' ({submission.reason})' if submission.reason else ''}: {name}")
        if submission.outcome in ("submitted", "queued", "running"):
            print(f"  titan-exp status {name}\n  titan-exp logs -f {name}\n  titan-exp cancel {name}")
        return submission

    def script(self, plan: RunPlan) -> str | None:
        """Job script of a run as `submit` would write it, for `titan-exp train --dry-run`; None if there is none."""
        return None

    def status(self, folders: Sequence[RunFolder]) -> Mapping[Path, JobStatus]:
        """Job status by run folder path, in one query. The status of omitted runs comes from files and locks."""
        return {}

    def cancel(self, folders: Sequence[RunFolder], *, reason: str) -> Mapping[Path, str]:
        """Dequeue waiting runs and request save-and-stop of active ones; returns a message per folder path."""
        statuses = self.status(folders)
        return {folder.path: ask_to_stop(folder, statuses.get(folder.path), reason) for folder in folders}

    @abstractmethod
    def rank_info(self) -> RankInfo | None:
        """Rank of this process, from the environment; None under another launcher."""

    def join_world(self, folder: RunFolder, rank: RankInfo) -> tuple[RunFolder, RankInfo] | None:
        """Join the attempt as a rank of the world that has this job, if there are several worlds. Returns the folder as
        this world's ranks see it, and the rank with its attempt number; None if the job has the whole run."""
        return None

    def publish_rendezvous(self, folder: RunFolder, rank: RankInfo) -> None:  # noqa: B027  # optional
        """Publish the rendezvous address. Rank 0 calls it before the attempt's start is recorded."""

    def join_rendezvous(self, folder: RunFolder, rank: RankInfo) -> None:  # noqa: B027  # optional
        """Set MASTER_ADDR and MASTER_PORT. Every rank calls it after rank 0 has recorded the start."""


def executor_for(kind: str) -> Executor:
    """Build the executor of a `cluster.kind` or a `launched_by`. Raises UserError if there is none."""
    if is_dotted(kind):
        return _own_executor(kind)(kind)
    kind = LOCAL if kind == BY_HAND else kind
    if kind not in executor_names():
        raise UserError(f"cluster.kind={kind}: there is no such executor. Built in are {', '.join(executor_names())}.")
    return import_dotted(f"titan_exp.launch.{kind}.executor.{kind.capitalize()}Executor", "cluster.kind")(kind)


def check_executor(cluster: ClusterConfig) -> None:
    """Raise UserError if `cluster.kind` is your class and not an executor, or if the executor takes other options."""
    if is_dotted(cluster.kind) or cluster.options:
        executor_for(cluster.kind).options(cluster)


def _own_executor(kind: str) -> type[Executor]:
    found, key, own = import_dotted(kind, "cluster.kind"), "cluster.kind", kind.rpartition(".")[2]
    reason = remedy = ""
    if not (isinstance(found, type) and issubclass(found, Executor)):
        reason = "this class does not extend Executor"
        remedy = f"write class {own}(Executor), and import Executor from titan_exp.launch.executor"
    elif missing := sorted(found.__abstractmethods__):
        reason = f"the class defines no {listed(missing, 'and no')}"
        remedy = f"define {listed(missing, 'and')} in {own}"
    elif not dataclasses.is_dataclass(found.Options):
        reason, remedy = f"{own}.Options is not a dataclass", "write @dataclass(frozen=True) class Options"
    if reason:
        raise UserError("This run cannot start.", [Violation(key, kind, reason, remedy)])
    return found


def ask_to_stop(folder: RunFolder, status: JobStatus | None, reason: str) -> str:
    """Request save-and-stop of an active run; returns a message."""
    who: object = folder.holder()  # a network disk may not show the locks of other machines
    if who is None and status is not None and status.state in ("queued", "running"):
        who = f"job {status.job_id}"
    if who is None:
        return "not running"
    folder.request_stop(reason)
    return f"asked to save and stop ({who})"


def worst_exit_code(submissions: Sequence[Submission]) -> int:
    """Combined exit code: 130 after Ctrl-C, else 1 if any run failed or was refused, 85 if any stopped, 0 otherwise."""
    order = (0, 85, 1, 130)
    codes = [code if code in order else 1 for code in (submission.exit_code for submission in submissions)]
    return max(codes, key=order.index, default=0)


def typed_path(path: Path) -> str:
    """Path as a user would type it: relative below the current folder."""
    name = os.path.relpath(path)
    return str(path) if name.startswith("..") else name


def last_executor(folder: RunFolder) -> str:
    """Executor kind of a run's last attempt; `local` before the first."""
    attempts = folder.read_attempts()
    return trusted_executor(folder, attempts[-1].launched_by) if attempts else LOCAL


def trusted_executor(folder: RunFolder, launched_by: str) -> str:
    """Executor kind of an attempt; `hand`, which asks no scheduler, if it names code that this user did not launch."""
    if not is_dotted(launched_by):
        return launched_by
    try:
        kind = read_values(folder.config, imports=("cluster.kind",))["cluster"]["kind"]
    except (UserError, KeyError, TypeError):
        return BY_HAND
    return launched_by if kind == launched_by else BY_HAND


BY_HAND = "hand"
"""`launched_by` of ranks that torchrun, srun or a user started; their status comes from files and locks."""
