"""Run plan and run folder: planning checks and names a run and writes nothing; committing creates its folder.

The folder is published by one rename.
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
from titan_exp.config.layout.resolved_layout import ResolvedLayout, resolve_layout
from titan_exp.config.machine.devices import offered_devices
from titan_exp.config.paths.checkpoint_paths import saved_state
from titan_exp.config.schema.typed_config import load_experiment, to_dict, to_yaml
from titan_exp.launch.provenance.provenance import Provenance, read_provenance
from titan_exp.launch.provenance.secrets import mask_override, refuse_secrets
from titan_exp.launch.run_id import experiment_id, run_id
from titan_exp.rules import check
from titan_exp.tracking.run_folder.atomic_write import sync_all
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState, write_atomically


@dataclass(frozen=True)
class RunPlan:
    """A checked and named run that may start."""

    experiment: Experiment
    overrides: tuple[str, ...]
    run_id: str
    experiment_id: str
    folder: RunFolder
    """Run folder, which need not exist yet."""
    prediction: str | None = None
    """Content of plan.json; None keeps the file."""

    @property
    def layout(self) -> ResolvedLayout:
        """Layout of the experiment."""
        return ResolvedLayout.of(self.experiment)


def plan_run(experiment: Experiment, overrides: Sequence[str] = (), folder: RunFolder | None = None) -> RunPlan:
    """Check an experiment, resolve its layout and name it; writes nothing.

    `folder` is an existing folder of the run, which may have been moved or named by an older version. Raises UserError
    if the run cannot start, holds credentials, or has no stable name.
    """
    # Credentials first: messages of the rules quote values.
    refuse_secrets(to_dict(experiment))

    def path_of(resolved: Experiment) -> Path:
        return _path(resolved, run_id(resolved)) if folder is None else Path(os.path.abspath(folder.path))

    def has_begun(resolved: Experiment) -> bool:
        # Then the initial weights (`checkpoint.initial`) need not exist any more.
        return saved_state(str(path_of(resolved))) is not None

    resolved = resolve_layout(check(experiment, has_begun), offered_devices(experiment.cluster))
    return RunPlan(resolved, tuple(overrides), run_id(resolved), experiment_id(resolved), RunFolder(path_of(resolved)))


def create_run_folder(plan: RunPlan, provenance: Provenance | None = None) -> bool:
    """Create the plan's run folder unless it exists; returns True if it existed.

    The provenance is read anew if none is given. Raises UserError if the folder cannot be written, which leaves nothing
    of it, or is not of this run.
    """
    target = plan.folder.path
    with explain_write_errors(target):
        exists = target.exists() or _create(plan, provenance)
        if exists:
            _require_same(plan)
    return exists


def refresh_snapshot(plan: RunPlan, last_attempt: int, provenance: Provenance | None = None) -> None:
    """Update the snapshot in an existing folder before another start; the caller holds the run lock.

    Keys without effect, the code and the machine may differ; the files of the previous attempt are kept beside its
    logs. Raises UserError if the folder cannot be written.
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
    """Turn an OSError about writing under `path` into a UserError."""
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


def _snapshot(plan: RunPlan, provenance: Provenance | None) -> dict[str, str]:
    """Content by name of the files that describe the run before it starts."""
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
    """Write the folder elsewhere and rename it; returns True if another process was first."""
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
    """Refuse a folder of another run: it was edited by hand, or is no run."""
    folder = plan.folder
    if not folder.config.exists():
        raise UserError(
            f"{folder.path} exists without a config.yaml, so it is not a run. Move it away, or choose another "
            "experiment.name."
        )
    found = run_id(load_experiment(folder.config))
    if found != plan.run_id:
        raise UserError(
            f"{folder.config} was changed: it now describes run {found}, not {plan.run_id}, and continuing would mix "
            "the two. Move the folder away, or choose another experiment.name."
        )
