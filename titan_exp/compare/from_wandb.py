"""Read runs from Weights & Biases through its public API.

Run folders are authoritative: W&B may lack the last rows of a killed run and the times of attempts.
"""

import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_exp.compare.runs import ComparedRun, Selection
from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.metrics_jsonl import MetricRows, Value, decode
from titan_exp.tracking.run_folder.run import Lineage
from titan_exp.tracking.sinks import stop_wandb_service

if TYPE_CHECKING:
    from wandb.apis.public import Run as ApiRun


STATES = {
    "pending": "queued",
    "running": "running",
    "finished": "done",
    **dict.fromkeys(("preempted", "preempting"), "preempted"),
}
"""Run state by W&B state; any other is `failed`."""


def select_from_wandb(place: str, group: str | None, ids: Sequence[str], runs: Path) -> Selection:
    """Select runs of the W&B project `place` (`ENTITY/PROJECT`), by group (None is all) and by prefixes of W&B or run
    ids. Output files go to a folder in `runs`. Raises UserError if wandb or its server is unavailable, or no run
    matches."""
    with explain_wandb_errors(place):
        import wandb

        api = wandb.Api()
        filters = {"group": group} if group else None
        found = api.runs(place, filters=filters, lazy=False)
        known = [(run, [run.id, (run.config.get("run") or {}).get("run_id") or ""]) for run in found]
        wanted = [run for run, own in known if not ids or any(name.startswith(tuple(ids)) for name in own)]
        read = tuple(map(from_wandb, wanted))
    name = group or place.partition("/")[2]
    if not read:
        among = f" of group {group}" if group else ""
        named = f" named {', '.join(ids)}" if ids else ""
        raise UserError(f"--from-wandb {place} has no runs{among}{named}. A group is the experiment.name of its runs.")
    return Selection(read, None, name, runs / name)


def from_wandb(run: "ApiRun") -> ComparedRun:
    """Convert a run of W&B's API."""
    config = {key: value for key, value in run.config.items() if not key.startswith("_")}
    identity = config.pop("run", None) or {}
    world_size = identity.get("world_size")
    inner = run.summary.get("_wandb") or {}
    seconds = inner.get("runtime") if hasattr(inner, "get") else None  # of all attempts
    seconds = run.summary.get("_runtime") if seconds is None else seconds
    state = STATES.get(run.state, "failed")
    return ComparedRun(
        study=identity.get("study") or run.group or "",
        run_id=identity.get("run_id") or run.id,
        experiment_id=identity.get("experiment_id"),
        state=state,
        reason=f"W&B says {run.state}" if state == "failed" else None,
        config=config,
        rows=_rows(run.scan_history()),
        world_size=world_size,
        seconds=seconds,
        device_seconds=None if seconds is None or world_size is None else seconds * world_size,
        device=None,
        commit=identity.get("commit"),
        dirty=identity.get("dirty"),
        overrides=(),
        source=run.url,
        lineage=_lineage(identity),
    )


def _lineage(identity: Mapping[str, Any]) -> Lineage | None:
    found = [identity.get(name) for name in ("parent", "parent_step", "parent_tokens")]
    return None if None in found else Lineage(*found)  # pyright: ignore[reportArgumentType]  # as `wandb_run` wrote it


@contextmanager
def explain_wandb_errors(place: str) -> Iterator[None]:
    """Convert wandb's errors (package, login, network, project) into UserErrors; stop its service at the end."""
    try:
        yield
    except ImportError as error:
        package = {"wandb_workspaces": "wandb-workspaces"}.get((error.name or "").partition(".")[0], error.name)
        raise UserError(f"W&B needs a package that is not installed. Type pip install {package}") from error
    except UserError:
        raise
    except Exception as error:
        # wandb has no common error type.
        frames = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not any(name.partition(".")[0] in ("wandb", "wandb_workspaces") for name in frames):
            raise
        message = str(error).strip().partition("\n")[0]
        raise UserError(
            f"W&B refused {place}: {message or type(error).__name__}. Check the login (wandb login, or WANDB_API_KEY), "
            "the network and ENTITY/PROJECT. titan-exp compare STUDY reads run folders and needs none of them."
        ) from error
    finally:
        if "wandb" in sys.modules:
            stop_wandb_service()


def _rows(history: Any) -> MetricRows:
    """Rows sorted by step; a step logged again after a resume keeps the later row."""
    rows: dict[int, dict[str, Value]] = {}
    for entry in history:
        step = entry.get("step")
        if step is not None:
            known = {key: value for key, value in entry.items() if value is not None and not key.startswith("_")}
            rows[int(step)] = {**decode(known), "step": int(step)}
    return MetricRows(rows[step] for step in sorted(rows))
