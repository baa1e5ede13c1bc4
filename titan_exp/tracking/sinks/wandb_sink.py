"""Weights & Biases sink: one W&B run per run folder across all attempts, online or offline."""

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.sinks.sink import Row
from titan_exp.tracking.sinks.wandb_run import WandbRun, stop_wandb_service

if TYPE_CHECKING:
    import wandb

LOWER_IS_BETTER = ("loss", "perplexity")
"""Substrings of metric names whose W&B summary is the minimum."""

EXIT_CODES = {"done": 0, "preempted": 85}
"""Exit codes of W&B runs by final state; any other state is a failure."""


class WandbSink:
    """Logs to W&B, with files under `folder/wandb`.

    Online, the server joins all attempts of a run by its id. Offline, each attempt has a separate directory, and its
    first row replays the earlier rows of `metrics`: syncing only the newest directory (`wandb/latest-run`) uploads the
    whole run.
    """

    def __init__(self, run: WandbRun, folder: Path, metrics: Path) -> None:
        self._metrics = metrics
        self._run = _start(run, folder)
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
                if _step(earlier) < _step(row):
                    self._log(earlier)
        self._log(row)

    def image(self, name: str, step: int, image: np.ndarray) -> None:
        """Log an image at its step."""
        import wandb

        self._run.log({name: wandb.Image(image), "step": step})

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
            if any(name in key for name in LOWER_IS_BETTER):
                self._run.define_metric(key, step_metric="step", summary="min")
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


def _start(run: WandbRun, folder: Path) -> "wandb.Run":
    if run.mode != "auto":
        return _init(run, folder, run.mode)
    mode = os.environ.get("WANDB_MODE") or ("online" if logged_in() else "offline")
    if mode != "online":
        return _init(run, folder, mode)
    try:
        return _init(run, folder, mode)
    except Exception as error:  # credentials but no route to the server: usual on compute nodes
        get_logger().warning(
            "W&B cannot be reached (%s); the run is logged offline in %s, and `wandb sync` uploads it. "
            "tracking.wandb_mode=offline skips the attempt.",
            str(error).strip().partition("\n")[0],
            folder / "wandb",
        )
        stop_wandb_service()  # the service still holds the id of the failed attempt
        return _init(run, folder, "offline")


def _init(run: WandbRun, folder: Path, mode: str) -> "wandb.Run":
    import wandb

    _machine_settings()
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
        settings=wandb.Settings(silent=True, console="off", **_timeouts()),
    )


def _machine_settings() -> "wandb.Settings":
    import wandb

    # Set for the whole library: it also prints outside a run.
    return wandb.setup(settings=wandb.Settings(silent=True, console="off")).settings


def _timeouts() -> Mapping[str, Any]:
    """Start and finish timeouts for an unreachable server, unless set by the user."""
    import wandb

    wanted = {"init_timeout": 60.0, "finish_timeout": 120.0}
    known = wandb.Settings.model_fields  # finish_timeout is not in every version
    return {key: value for key, value in wanted.items() if key in known and f"WANDB_{key.upper()}" not in os.environ}


def _step(row: Row) -> float:
    return row["step"] or 0
