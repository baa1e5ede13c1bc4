"""Weights & Biases as a mirror: one W&B run for a run folder, whatever died in between, online or offline."""

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.sinks.sink import Row
from titan_exp.tracking.sinks.wandb_run import WandbRun
from titan_exp.tracking.sinks.wandb_service import stop_wandb_service

if TYPE_CHECKING:
    import wandb

LOSSES = ("loss", "validation_loss", "validation_perplexity")
"""Metrics whose best value is the lowest: the summary shows that one."""

EXIT_CODES = {"done": 0, "preempted": 85}
"""How W&B shows the end of a run; any other state is a failure."""


class WandbSink:
    """Logs to W&B, with files under `folder/wandb`.

    Online, the server joins all starts of a run by its id. Offline there is none to do that and every start makes its
    own directory, so the first row takes those before it along from `metrics`: the newest directory
    (`wandb/latest-run`) holds the whole run, and `wandb sync` of that one is enough.
    """

    def __init__(self, run: WandbRun, folder: Path, metrics: Path) -> None:
        self._metrics = metrics
        self._run = _start(run, folder)
        self._replay = self._run.settings.mode == "offline"
        self._run.define_metric("*", step_metric="step")
        for key in LOSSES:
            self._run.define_metric(key, step_metric="step", summary="min")

    def log(self, row: Row) -> None:
        """Log what is known of the row, over its own step."""
        if self._replay:
            self._replay = False
            for earlier in read_metrics(self._metrics):
                if _step(earlier) < _step(row):
                    self._run.log(_known(earlier))
        self._run.log(_known(row))

    def close(self, state: str) -> None:
        """End the W&B run with the exit code of `state`, and wandb's service in this process with it."""
        if state == "preempted":
            self._run.mark_preempting()
        self._run.finish(exit_code=EXIT_CODES.get(state, 1))
        stop_wandb_service()


def logged_in() -> bool:
    """Whether this machine has credentials for the W&B server it is set to: environment, settings file or netrc."""
    settings = _settings_of_machine()
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
    except Exception as error:  # a key, but no way to the server: usual on compute nodes
        get_logger().warning(
            "W&B cannot be reached (%s), so it is kept offline in %s; `wandb sync` uploads it. "
            "tracking.wandb_mode=offline does not try.",
            str(error).strip().partition("\n")[0],
            folder / "wandb",
        )
        stop_wandb_service()  # it still holds the id of the attempt that failed
        return _init(run, folder, "offline")


def _init(run: WandbRun, folder: Path, mode: str) -> "wandb.Run":
    import wandb

    _settings_of_machine()
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
        mode=mode,  # pyright: ignore[reportArgumentType]  # WANDB_MODE may be anything; wandb refuses it by itself
        settings=wandb.Settings(silent=True, console="off", **_timeouts()),
    )


def _settings_of_machine() -> "wandb.Settings":
    import wandb

    # Said to the whole library, not to the run only: it also talks before there is one.
    return wandb.setup(settings=wandb.Settings(silent=True, console="off")).settings


def _timeouts() -> Mapping[str, Any]:
    """Seconds that a lost server may hold training up at its start and its end, where the user has not set them."""
    import wandb

    wanted = {"init_timeout": 60.0, "finish_timeout": 120.0}
    known = wandb.Settings.model_fields  # finish_timeout is not in every version
    return {key: value for key, value in wanted.items() if key in known and f"WANDB_{key.upper()}" not in os.environ}


def _step(row: Row) -> float:
    return row["step"] or 0


def _known(row: Row) -> dict[str, float]:
    return {key: value for key, value in row.items() if value is not None}
