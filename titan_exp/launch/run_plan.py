"""Plan, then commit: a plan says what would run and where and touches nothing; committing makes its run folder.

The folder appears whole, by one rename, or not at all.
"""

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.machine.devices import offered_devices
from titan_exp.config.paths.checkpoint_paths import saved_state
from titan_exp.config.schema.typed_config import load_experiment, to_dict, to_yaml
from titan_exp.launch.provenance.provenance import Provenance, read_provenance
from titan_exp.launch.provenance.secrets import mask_override, require_none
from titan_exp.launch.run_id import experiment_id, run_id
from titan_exp.rules import check
from titan_exp.tracking.run_folder.atomic_write import sync_all
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState, write_atomically


@dataclass(frozen=True)
class RunPlan:
    """A run that may be started: checked, its layout resolved, and named."""

    experiment: Experiment
    """What to run."""
    overrides: tuple[str, ...]
    """What was typed."""
    run_id: str
    """Name of what it computes, in its layout."""
    experiment_id: str
    """Name of what it computes, in any layout."""
    folder: RunFolder
    """Where it is, or will be."""
    prediction: str | None = None
    """What plan.json is to say; None leaves it as it is."""


def plan_run(experiment: Experiment, overrides: Sequence[str] = ()) -> RunPlan:
    """Check an experiment and name it. Writes nothing.

    Raises:
        UserError: it cannot run, holds credentials, or has no stable name.
    """
    # Credentials first: what the rules say of a value repeats it.
    require_none(to_dict(experiment))
    resolved = resolve_layout(check(experiment, _has_begun), offered_devices(experiment.cluster))
    name = run_id(resolved)
    return RunPlan(resolved, tuple(overrides), name, experiment_id(resolved), RunFolder(_path(resolved, name)))


def create_run_folder(plan: RunPlan, provenance: Provenance | None = None) -> bool:
    """Make the plan's run folder, unless it is there already. Returns whether it was.

    Args:
        plan: of the run.
        scene: what it is launched from; read anew where none is given.

    Raises:
        UserError: it cannot be written, and nothing of it is left; or what is there is not this run.
    """
    target = plan.folder.path
    with explain_write_errors(target):
        there = target.exists() or _create(plan, provenance)
        if there:
            _require_same(plan)
    return there


def refresh_snapshot(plan: RunPlan, last_attempt: int, provenance: Provenance | None = None) -> None:
    """Bring the snapshot in an existing folder up to date before another start; the caller has claimed the folder.

    The configuration may differ in keys without effect, and the code and the machine in anything. What the attempt
    before ran with is kept beside its logs.

    Raises:
        UserError: the folder cannot be written.
    """
    with explain_write_errors(plan.folder.path):
        for name, text in _snapshot(plan, provenance).items():
            path = plan.folder.path / name
            old = path.read_bytes().decode(errors="surrogateescape") if path.exists() else None
            if old == text:
                continue
            if old is not None and last_attempt:
                logs = plan.folder.attempt_logs(last_attempt)
                logs.mkdir(parents=True, exist_ok=True)
                write_atomically(logs / name, old)
            write_atomically(path, text)


@contextlib.contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turns what the system says about writing under `path` into words for the user."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or path}: cannot be written ({error.strerror or error}). "
            "Free some space, or set paths.runs to a folder that you can write to."
        ) from error


def _path(resolved: Experiment, name: str) -> Path:
    runs = Path(os.path.abspath(Path(resolved.paths.runs).expanduser()))
    return runs / resolved.experiment.name / name


def _has_begun(resolved: Experiment) -> bool:
    """Whether the run has a checkpoint: then what it began with (`checkpoint.initial`) may be gone."""
    return saved_state(str(_path(resolved, run_id(resolved)))) is not None


def _snapshot(plan: RunPlan, provenance: Provenance | None) -> dict[str, str]:
    """Name and content of every file that describes the run before it starts."""
    provenance = provenance or read_provenance()
    ids = {"run_id": plan.run_id, "experiment_id": plan.experiment_id}
    typed = [f"- {json.dumps(mask_override(override), ensure_ascii=False)}\n" for override in plan.overrides]
    prediction = {} if plan.prediction is None else {plan.folder.plan.name: plan.prediction}
    return {
        **prediction,
        plan.folder.config.name: to_yaml(plan.experiment),
        plan.folder.overrides.name: "".join(typed) or "[]\n",
        plan.folder.code.name: provenance.code_json(ids),
        plan.folder.diff.name: provenance.diff,
        plan.folder.env.name: json.dumps(provenance.environment, indent=2) + "\n",
    }


def _create(plan: RunPlan, provenance: Provenance | None) -> bool:
    """Write the folder elsewhere and rename it; returns whether another process was first."""
    target = plan.folder.path
    missing = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{plan.run_id}.", dir=target.parent))
        try:
            temporary.chmod(target.parent.stat().st_mode & 0o777)
            for name, text in _snapshot(plan, provenance).items():
                write_atomically(temporary / name, text, durable=False)
            RunFolder(temporary).write_state(RunState("pending", 0, time.time(), 0, None), durable=False)
            sync_all(temporary)
            os.rename(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            if target.exists():
                return True
            raise
    except BaseException:
        for parent in missing:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise
    return False


def _require_same(plan: RunPlan) -> None:
    """Refuse a folder whose configuration computes something else: it was changed by hand, or is no run."""
    folder = plan.folder
    if not folder.config.exists():
        raise UserError(
            f"{folder.path} is there but holds no config.yaml, so it is not a run. Move it away, "
            "or choose another experiment.name."
        )
    found = run_id(load_experiment(folder.config))
    if found != plan.run_id:
        raise UserError(
            f"{folder.config} was changed: it now describes run {found}, not {plan.run_id}, and continuing would mix "
            "the two. Move the folder away, or choose another experiment.name."
        )
