"""Metric sinks of a run from its configuration, and that of Weights & Biases: one W&B run per run folder."""

from __future__ import annotations

import netrc
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.foreign_file import read_text
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.typed_config import to_dict
from titan_exp.config.study.study import usual_direction
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.metrics_jsonl import ImageSink, JsonlSink, LateSink, Row, Sink, read_metrics
from titan_exp.tracking.run_folder.run import Ancestor, ancestors, read_code, read_overrides
from titan_exp.tracking.run_folder.run_folder import RunFolder, read_json

if TYPE_CHECKING:
    import wandb
    from torch.utils.tensorboard.writer import SummaryWriter

SECONDS = 15.0  # seconds for the service to send its remaining data after every run is finished


def stop_wandb_service(seconds: float = SECONDS) -> None:
    """Shut down wandb and its service process within `seconds`. A service that keeps retrying a lost network is killed.
    Call this after the last use of wandb: finished runs have sent their data, which also stays in their folders. Does
    nothing while a run of the caller is open, as in a notebook."""
    import wandb

    if wandb.run is not None:
        return

    def teardown() -> None:
        with suppress(Exception):  # errors of a stopped service do not matter
            wandb.teardown()

    # A daemon thread does not block interpreter exit; teardown first unregisters wandb's exit handler.
    thread = threading.Thread(target=teardown, name="wandb-teardown", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        for pid in service_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def service_pids() -> list[int]:
    """Process ids of wandb's services among the children of this process (Linux)."""
    found = []
    for pid in (word for path in Path("/proc/self/task").glob("*/children") for word in path.read_text().split()):
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().startswith("wandb"):
                found.append(int(pid))
    return found


VOLATILE = ("paths", "cluster", "tracking", "profiling", "plan")  # groups that do not affect the result
LABELS = ("experiment.name", "experiment.tags", "experiment.notes")
NAME_LENGTH = 128


@dataclass(frozen=True)
class WandbRun:
    """Arguments of `wandb.init`."""

    id: str  # constant over all attempts of a run folder
    name: str  # typed overrides, else the run id
    group: str
    project: str
    entity: str | None
    mode: str  # `auto`, `online` or `offline`
    tags: tuple[str, ...]
    notes: str
    config: dict[str, Any]  # resolved configuration, and a flat block `run` for filters
    parent_id: str | None = None  # W&B id of the parent of a continued run; None if it was not logged to W&B


def describe_wandb_run(experiment: Experiment, folder: RunFolder, run_id: str) -> WandbRun:
    """Build the W&B arguments of a run."""
    tracking, naming = experiment.tracking, experiment.experiment
    ancestor, parent_id = next(ancestors(folder.path), None), None
    if ancestor is not None and ancestor.folder is not None:
        with suppress(OSError, UserError):  # it was not logged to W&B
            parent_id = read_text(_id_file(ancestor.folder)).strip()
    return WandbRun(
        id=_fixed_id(folder.path, run_id),
        name=_name(folder.overrides) or run_id,
        group=naming.name,
        project=tracking.wandb_project,
        entity=tracking.wandb_entity,
        mode=tracking.wandb_mode,
        tags=naming.tags,
        notes=naming.notes,
        config=_config(to_dict(experiment), ResolvedLayout.of(experiment).world_size, folder, run_id, ancestor),
        parent_id=parent_id,
    )


def _fixed_id(folder: Path, run_id: str) -> str:
    """W&B id, created once and stored in the folder. The random suffix distinguishes folders of the same run: another
    user's folder in the same project, or a deleted one, whose id W&B never reuses."""
    path = _id_file(folder)
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_suffix(".new")
        temporary.write_text(f"{run_id}-{secrets.token_hex(3)}")
        temporary.replace(path)
    return read_text(path).strip()


def _id_file(folder: Path) -> Path:
    return folder / "wandb" / "id"


def _typed(overrides: Path) -> list[str]:
    found = []
    for override in read_overrides(overrides) or ():
        key = override.partition("=")[0].lstrip("+~")
        group = key.partition(".")[0].partition("@")[0]
        if group not in (*VOLATILE, "hydra") and key not in LABELS:
            found.append(override)
    return found


def _axis(folder: RunFolder, run_id: str) -> tuple[str, str]:
    """Keys that this run's study varies, and their values, without the seed; outside a study, the typed overrides. Keys
    and values are joined by spaces, in the same order. A named point has its name as the value and no key."""
    label = None
    with suppress(UserError, LookupError, TypeError, AttributeError):  # a missing label must not disable the sink
        study = read_json(folder.path.parent / "study.json") or {"points": ()}
        label = {point["run_id"]: point.get("variant", point.get("label")) for point in study["points"]}.get(run_id)
    words = _typed(folder.overrides) if label is None else label.split()
    pairs = [word.lstrip("+").partition("=") for word in words]
    named = [key for key, equals, _ in pairs if not equals]
    known = [(key, value) for key, equals, value in pairs if equals and key != "experiment.seed"]
    return " ".join(key for key, _ in known), " ".join([*named, *(value for _, value in known)])


def _name(overrides: Path) -> str:
    name = " ".join(_typed(overrides))
    return name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "…"


def _config(
    resolved: dict[str, Any], world_size: int, folder: RunFolder, run_id: str, ancestor: Ancestor | None
) -> dict[str, Any]:
    config = {group: values for group, values in resolved.items() if group not in VOLATILE}
    study = resolved["experiment"]["name"]
    config["experiment"] = {"name": study, "seed": resolved["experiment"]["seed"]}
    code = read_code(folder.code)
    axis, value = _axis(folder, run_id)
    config["run"] = {
        "study": study,
        "axis": axis,
        "value": value,
        "experiment_id": code and code.experiment_id,
        "run_id": run_id,
        "world_size": world_size,
        "commit": code and code.parts[0].commit,
        "dirty": code and code.dirty,
    }
    if ancestor is not None:
        lineage = ancestor.lineage
        config["run"] |= {"parent": lineage.name, "parent_step": lineage.step, "parent_tokens": lineage.tokens}
    return config


EXIT_CODES = {"done": 0, "preempted": 85}  # exit codes of W&B runs by final state; any other state is a failure


class WandbSink:
    """Logs to W&B, with files under `folder/wandb`. Online, the server joins all attempts of a run by its id. Offline,
    each attempt has a separate directory, and its first row replays the earlier rows of `metrics`: syncing only the
    newest directory (`wandb/latest-run`) uploads the whole run."""

    def __init__(self, run: WandbRun, folder: Path, metrics: Path) -> None:
        self._metrics, self._run = metrics, _start(run, folder)
        self._replay = self._run.settings.mode == "offline"
        self._run.define_metric("*", step_metric="step")
        if run.parent_id is not None and self._run.url:
            # `fork_from` would exclude `resume`, which every later attempt needs; W&B shows a URL as a link.
            self._run.summary["parent_url"] = f"{self._run.url.rpartition('/')[0]}/{run.parent_id}"
        self._defined: set[str] = set()

    def log(self, row: Row) -> None:
        """Log the known values of the row at its step."""
        if self._replay:
            self._replay = False
            for earlier in read_metrics(self._metrics):
                if (earlier["step"] or 0) < (row["step"] or 0):
                    self._log(earlier)
        self._log(row)

    def image(self, name: str, step: int, image: np.ndarray) -> None:
        """Log an image at its step."""
        import wandb

        self._run.log({name: wandb.Image(image), "step": step})

    def late(self, axis: str, row: Row) -> None:
        """Log the known values of an earlier step against their own axis."""
        known = {key: value for key, value in row.items() if value is not None}
        for key in known.keys() - self._defined - {axis}:
            self._defined.add(key)
            self._run.define_metric(key, step_metric=axis)
        self._run.log(known)

    def close(self, state: str) -> None:
        """Finish the W&B run with the exit code of `state`, and stop wandb's service process."""
        if state == "preempted":
            self._run.mark_preempting()
        self._run.finish(exit_code=EXIT_CODES.get(state, 1))
        stop_wandb_service()

    def _log(self, row: Row) -> None:
        known = {key: value for key, value in row.items() if value is not None}
        for key in known.keys() - self._defined:
            self._defined.add(key)
            if (better := usual_direction(key)) is not None:
                self._run.define_metric(key, step_metric="step", summary=better)
        self._run.log(known)


def logged_in() -> bool:
    """True if this machine has credentials for its W&B server, from the environment, the settings file or netrc."""
    settings = _machine_settings()
    if settings.api_key or settings.identity_token_file:
        return True
    host = urlsplit(settings.base_url).netloc
    candidates = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    for path in map(os.path.expanduser, candidates):
        try:
            if netrc.netrc(path).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _start(run: WandbRun, folder: Path) -> wandb.Run:
    if run.mode != "auto":
        return _init(run, folder, run.mode)
    mode = os.environ.get("WANDB_MODE") or ("online" if logged_in() else "offline")
    if mode != "online":
        return _init(run, folder, mode)
    try:
        return _init(run, folder, mode)
    except Exception as error:  # credentials but no route to the server: usual on compute nodes
        text = "W&B does not answer (%s), so we log the run offline in %s. Upload it with wandb sync. %s"
        skip = "To skip the attempt, use tracking.wandb_mode=offline."
        get_logger().warning(text, str(error).strip().partition("\n")[0], folder / "wandb", skip)
        stop_wandb_service()  # the service still holds the id of the failed attempt
        return _init(run, folder, "offline")


def _init(run: WandbRun, folder: Path, mode: str) -> wandb.Run:
    import wandb

    _machine_settings()
    # Start and finish timeouts for an unreachable server, unless set by the user.
    wanted = {"init_timeout": 60.0, "finish_timeout": 120.0}
    known = [key for key in wanted if key in wandb.Settings.model_fields]  # finish_timeout is not in every version
    timeouts: Any = {key: wanted[key] for key in known if f"WANDB_{key.upper()}" not in os.environ}
    return wandb.init(
        project=run.project,
        entity=run.entity,
        id=run.id,
        resume="allow",
        name=run.name,
        group=run.group,
        job_type="train",
        tags=run.tags,
        notes=run.notes or None,
        config=run.config,
        dir=folder,
        mode=mode,  # pyright: ignore[reportArgumentType]  # WANDB_MODE may be anything; wandb validates it
        settings=wandb.Settings(silent=True, console="off", **timeouts),
    )


def _machine_settings() -> wandb.Settings:
    import wandb

    # This is set for the whole library, which also prints outside a run.
    return wandb.setup(settings=wandb.Settings(silent=True, console="off")).settings


class BestEffortSink:
    """Wraps the sink that `start` builds, and suppresses all its exceptions, including those of construction."""

    def __init__(self, name: str, switch: str, start: Callable[[], Sink]) -> None:
        self._name, self._switch = name, switch
        self._sink: Sink | None = None
        self._guard(self._start, start)

    def log(self, row: Row) -> None:
        """Forward the row while the sink works."""
        if self._sink is not None:
            self._guard(self._sink.log, row)

    def image(self, name: str, step: int, image: np.ndarray) -> None:
        """Forward an image while the sink works, if it takes images."""
        if self._sink is not None and isinstance(self._sink, ImageSink):
            self._guard(self._sink.image, name, step, image)

    def late(self, axis: str, row: Row) -> None:
        """Forward a late row while the sink works, if it takes them."""
        if self._sink is not None and isinstance(self._sink, LateSink):
            self._guard(self._sink.late, axis, row)

    def close(self, state: str) -> None:
        """Close the sink if it still works."""
        sink, self._sink = self._sink, None
        if sink is not None:
            self._guard(sink.close, state)

    def _start(self, start: Callable[[], Sink]) -> None:
        self._sink = start()

    def _guard(self, action: Callable[..., None], *arguments: object) -> None:
        try:
            action(*arguments)
        except Exception as error:  # networks, servers and disks may fail in any way
            self._sink = None
            reason = str(error).strip().partition("\n")[0] or "it gives no reason"
            text = "%s gets no more metrics (%s: %s). The run continues, and metrics.jsonl has everything. %s"
            off = f"To turn this sink off, use {self._switch}=false."
            get_logger().warning(text, self._name, type(error).__name__, reason, off)


class TensorBoardSink:
    """Writes event files to `folder`. The first row of an attempt purges older events from its step on (purge_step), so
    that resumed curves do not overlap."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def log(self, row: Row) -> None:
        """Write every known value of the row."""
        step = row["step"]
        assert isinstance(step, int)
        writer = self._open(step)
        for key, value in row.items():
            if key != "step" and value is not None:
                writer.add_scalar(key, value, step)

    def image(self, name: str, step: int, image: np.ndarray) -> None:
        """Write an image."""
        self._open(step).add_image(name, image, step, dataformats="HWC")

    def late(self, axis: str, row: Row) -> None:
        """Write the values of an earlier step, in any order. A row comes first, since that purges events."""
        for key in row.keys() - {axis}:
            if self._writer is not None and row[key] is not None:
                self._writer.add_scalar(key, row[key], row[axis])

    def _open(self, step: int) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._folder.mkdir(exist_ok=True)  # torch would also create a deleted run folder
            self._writer = SummaryWriter(self._folder, purge_step=step, flush_secs=15)
        return self._writer

    def close(self, state: str) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def build_sinks(experiment: Experiment, folder_path: Path, run_id: str, attempt: int) -> list[Sink]:
    """Sinks of rank 0, metrics.jsonl first; the others are best-effort. `attempt` starts at 1."""
    folder = RunFolder(folder_path)
    sinks: list[Sink] = [JsonlSink(folder.metrics, attempt, time.time)]
    if experiment.tracking.tensorboard:
        events = folder.path / "tensorboard"
        sinks.append(BestEffortSink("TensorBoard", "tracking.tensorboard", lambda: TensorBoardSink(events)))
    if experiment.tracking.wandb:

        def start() -> Sink:
            return WandbSink(describe_wandb_run(experiment, folder, run_id), folder.path, folder.metrics)

        sinks.append(BestEffortSink("W&B", "tracking.wandb", start))
    return sinks
