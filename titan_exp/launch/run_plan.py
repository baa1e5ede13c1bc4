"""Run plan and run folder.

Planning checks a run and computes its id without writing. The folder is written under a temporary name and renamed.
"""

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from titan_exp.config.checkpoint_files import initial_folder, is_url, normalize_parent, saved_state
from titan_exp.config.devices import offered_devices
from titan_exp.config.errors.explained_errors import REMEDIES
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.foreign_file import read_file, read_text
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.nondefault import nondefault_overrides
from titan_exp.config.layout.resolved_layout import compilation, resolve_layout, with_automatic_kernels
from titan_exp.config.schema.data_sets import validation_sets
from titan_exp.config.schema.foreign_code import import_paths, signed, sources
from titan_exp.config.schema.typed_config import load_experiment, to_dict, to_yaml
from titan_exp.launch.executor import RunPlan, check_executor
from titan_exp.launch.provenance.changes import refuse_other_data
from titan_exp.launch.provenance.provenance import Provenance, read_provenance
from titan_exp.launch.provenance.secrets import mask_override, refuse_secrets
from titan_exp.launch.run_id import AUTO, experiment_id, run_id, with_auto_parent
from titan_exp.launch.state.run_lookup import run_path
from titan_exp.rules import check
from titan_exp.tracking.run_folder.files import sync_all
from titan_exp.tracking.run_folder.folder_owner import refuse_foreign_folders
from titan_exp.tracking.run_folder.run import overrides_text, read_overrides
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState, write_atomically


def plan_run(experiment: Experiment, overrides: Sequence[str] = (), folder: RunFolder | None = None) -> RunPlan:
    """Check an experiment, resolve its layout and compute its ids; writes nothing.

    `folder` is the existing folder of a run that was moved or named by an older version. Raises UserError if the run
    cannot start, contains credentials, or has no canonical JSON.
    """
    # This comes before the rules, whose messages quote values.
    refuse_secrets(to_dict(experiment))
    experiment = _with_parent(_with_initial(experiment))

    def path_of(resolved: Experiment) -> Path:
        return _path(resolved, run_id(resolved)) if folder is None else Path(os.path.abspath(folder.path))

    def has_begun(resolved: Experiment) -> bool:
        # A run with a checkpoint no longer needs `checkpoint.initial`.
        return saved_state(str(path_of(resolved))) is not None

    resolved = resolve_layout(check(experiment, has_begun), offered_devices(experiment.cluster))
    check_executor(resolved.cluster)
    run_folder = RunFolder(path_of(resolved))
    refuse_other_data(resolved, run_folder)
    state = run_folder.read_state()
    if resolved.data.source in sources() and (state is None or state.state != "done"):  # the gate opens your own
        from titan_exp.data.source_check import check_source  # imports NumPy, which --help does not need

        check_source(resolved.data, evaluates=resolved.evaluation.enabled)
        for found in validation_sets(resolved).values() if resolved.evaluation.enabled else ():
            check_source(found.data, evaluates=False)
    return RunPlan(
        resolved,
        tuple(overrides),
        run_id(resolved),
        experiment_id(resolved),
        run_folder,
        compilation=tuple(compilation(experiment)),
        fills_node=experiment.parallelism.dp_shard == -1 and resolved.parallelism.dp_shard > 1,
    )


def plan_relaunch(folder: RunFolder, trust: bool = False) -> RunPlan:
    """Plan an existing run folder, which may have moved. Raises UserError if it is not a run, cannot start here, or
    names code that is not trusted."""
    experiment = load_experiment(folder.config, trust)
    return plan_run(experiment, read_overrides(folder.overrides) or (), folder)


def _with_initial(experiment: Experiment) -> Experiment:
    """Name the run of `checkpoint.initial` by its folder, if a name or its experiment's folder is given."""
    initial = experiment.checkpoint.initial
    if not initial or is_url(initial) or initial_folder(initial) is not None:
        return experiment
    try:
        path = run_path(initial, Path(experiment.paths.runs).expanduser())
    except UserError:
        if Path(initial).expanduser().exists():
            raise  # several runs
        return experiment  # the rules explain what a run is
    return replace(experiment, checkpoint=replace(experiment.checkpoint, initial=path))


def _with_parent(experiment: Experiment) -> Experiment:
    """Name the parent of a continued run in one form, however it was typed."""
    checkpoint, runs = experiment.checkpoint, Path(experiment.paths.runs).expanduser()
    if checkpoint.continue_from == AUTO:
        return with_auto_parent(resolve_layout(experiment, offered_devices(experiment.cluster)))
    if checkpoint.continue_from is None:
        return experiment
    if not os.path.isabs(checkpoint.continue_from) and (runs / checkpoint.continue_from / "config.yaml").is_file():
        return experiment
    parent, step = normalize_parent(run_path(checkpoint.continue_from, runs), runs)
    step = checkpoint.continue_step if checkpoint.continue_step is not None else step
    return replace(experiment, checkpoint=replace(checkpoint, continue_from=parent, continue_step=step))


def create_run_folder(plan: RunPlan, provenance: Provenance | None = None) -> bool:
    """Create the run folder if it is missing; returns True if it existed.

    `provenance` defaults to the current one. Raises UserError if the folder belongs to another run, or cannot be
    written; a partial folder is removed.
    """
    target = plan.folder.path
    with explain_write_errors(target):
        exists = target.exists() or _create(plan, provenance)
        if exists:
            _require_same(plan)
            state = plan.folder.read_state()
            if state is None or state.state != "done":
                refuse_foreign_folders(target.parents[1], target)
    return exists


def refresh_snapshot(plan: RunPlan, last_attempt: int, provenance: Provenance | None = None) -> None:
    """Update configuration, code and environment files before another attempt; the caller holds the run lock.

    Replaced files are kept in the previous attempt's log folder. Raises UserError if the folder cannot be written.
    """
    with explain_write_errors(plan.folder.path):
        for name, text in _snapshot(plan, provenance).items():
            path, old = plan.folder.path / name, None
            with contextlib.suppress(FileNotFoundError):
                old = read_file(path).decode(errors="surrogateescape")
            if old == text:
                continue
            if old is not None and last_attempt:
                logs = plan.folder.make_attempt_logs(last_attempt)
                write_atomically(logs / name, old)
            write_atomically(path, text)


@contextlib.contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Convert an OSError while writing under `path` into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"Cannot write {error.filename or path} ({error.strerror or error}). "
            f"{REMEDIES.get(error.errno or 0, 'Set paths.runs to a folder that you can write to')}."
        ) from error


def _path(resolved: Experiment, name: str) -> Path:
    runs = Path(os.path.abspath(Path(resolved.paths.runs).expanduser()))
    return runs / resolved.experiment.name / name


def _snapshot(plan: RunPlan, provenance: Provenance | None) -> dict[str, str]:
    """Contents by file name: configuration, overrides, code, environment, prediction."""
    provenance = provenance or read_provenance()
    ids = {"run_id": plan.run_id, "experiment_id": plan.experiment_id}
    prediction = {} if plan.prediction is None else {plan.folder.plan.name: plan.prediction}
    config = to_yaml(plan.experiment)
    signature = signed(config, plan.folder.signature)
    return {
        **prediction,
        plan.folder.config.name: config,
        **({} if signature is None else {plan.folder.signature.name: signature}),
        plan.folder.overrides.name: overrides_text(list(map(mask_override, plan.overrides))),
        plan.folder.nondefault.name: _nondefault(plan, config),
        plan.folder.code.name: provenance.code_record(plan.experiment, **ids).to_json(),
        plan.folder.diff.name: provenance.patch(plan.experiment),
        plan.folder.env.name: json.dumps(provenance.environment, indent=2) + "\n",
    }


def _nondefault(plan: RunPlan, config: str) -> str:
    """Overrides that differ from the defaults: those in the folder, unless its configuration changes."""
    folder = plan.folder
    if (recorded := read_overrides(folder.nondefault)) is not None and read_text(folder.config) == config:
        return overrides_text(recorded)
    differing = nondefault_overrides(to_dict(with_automatic_kernels(plan.experiment)))
    return overrides_text(list(map(mask_override, differing)))


def _create(plan: RunPlan, provenance: Provenance | None) -> bool:
    """Write a temporary folder and rename it; returns True if another process created the folder first."""
    target = plan.folder.path
    missing = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        refuse_foreign_folders(target.parents[1], target)
        # We do not use mkdtemp, whose folders are closed to the group that shares the runs.
        temporary = target.with_name(f".{plan.run_id}.{uuid.uuid4().hex[:8]}")
        temporary.mkdir()
        try:
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
    """Check that the existing folder holds this run."""
    folder = plan.folder
    if not folder.config.exists():
        raise UserError(
            f"{folder.path} exists without a config.yaml, so it is not a run. Move it away, or choose another "
            "experiment.name."
        )
    found = run_id(load_experiment(folder.config, trust=import_paths(plan.experiment).values()))
    if found != plan.run_id:
        raise UserError(
            f"{folder.config} has changed: it now describes run {found} instead of {plan.run_id}, and to continue "
            "would mix the two. Move the folder away, or choose another experiment.name."
        )
