"""Provenance of runs: versions and diffs of titan_exp and of your code, the environment (package versions, hardware,
and variables that affect the computation), and what has changed of code and data since a recorded start."""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from titan_exp.config.checkpoint_files import parent_location, saved_state
from titan_exp.config.devices import command_lines, cpu_model, usable_cores
from titan_exp.config.errors.user_error import UserError, some_of
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.foreign_code import import_paths
from titan_exp.config.secrets import is_secret_variable
from titan_exp.data.sources.base import known_identity, require_same_data
from titan_exp.launch.code_snapshot import CodeSnapshot, is_installed, scope, user_modules
from titan_exp.launch.executor import RunPlan
from titan_exp.launch.git import checksums, mask, read_code_version, read_files, read_repository, repository_of
from titan_exp.rules.checkpoint import local_checkpoint, recorded_data
from titan_exp.tracking.display import format_bytes, format_items, format_time
from titan_exp.tracking.run_folder.run import CodeRecord, CodeVersion, Run, read_code
from titan_exp.tracking.run_folder.run_folder import RunFolder

VARIABLES = re.compile(
    r"(CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|CUDA_LAUNCH_BLOCKING|CUBLAS_WORKSPACE_CONFIG|CUDA_DEVICE_MAX_CONNECTIONS"
    r"|PYTORCH_\w+|TORCH_\w+|TORCHINDUCTOR_\w+|TRITON_\w+|NCCL_\w+|GLOO_\w+|OMP_\w+|MKL_\w+|KMP_\w+|MALLOC_\w+"
    r"|LD_PRELOAD|PYTHONHASHSEED|PYTHONPATH|CONDA_DEFAULT_ENV|VIRTUAL_ENV"
    r"|HF_HOME|HF_HUB_OFFLINE|HF_DATASETS_CACHE|WANDB_MODE|SLURM_JOB_ID|SLURM_JOB_NODELIST)"
)

_FIELD = re.compile(r"^(Name|Version):[ \t]*(\S+)[ \t\r]*$", re.MULTILINE)


def read_environment() -> dict[str, Any]:
    """Versions, hardware, host and selected environment variables, as JSON values. Imports no torch."""
    packages = _packages()
    lines = command_lines("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    gpus = [[part.strip() for part in line.split(",")] for line in lines]
    variables = {name: value for name, value in sorted(os.environ.items()) if VARIABLES.fullmatch(name)}
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": packages.get("torch"),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "cores_usable": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [dict(zip(("name", "memory", "driver"), row, strict=True)) for row in gpus if len(row) == 3],
        "environment": {name: mask(value) for name, value in variables.items() if not is_secret_variable(name)},
        "packages": packages,
    }


def _packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        # `distribution.metadata` parses the whole file: one second for a hundred packages.
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        fields = dict(_FIELD.findall(text.partition("\n\n")[0]))
        if "Name" in fields and "Version" in fields:
            found.setdefault(fields["Name"].lower().replace("_", "-"), fields["Version"])
    return dict(sorted(found.items()))


PART = "# code of "  # first words of the line before each part of diff.patch; git apply skips such lines


@dataclass(frozen=True)
class Provenance:
    """Provenance shared by the runs of one launch; your code is read once per set of import paths."""

    code: CodeVersion
    diff: str
    environment: dict[str, Any]
    frozen: CodeSnapshot | None = None  # code snapshot; None if ranks import the code in place
    _imported: dict[tuple[str, ...], list[tuple[CodeVersion, str]]] = field(default_factory=dict)

    def imported(self, experiment: Experiment) -> list[tuple[CodeVersion, str]]:
        """Versions and diffs of your code that a configuration names, by name."""
        names = tuple(sorted(set(import_paths(experiment).values())))
        if names not in self._imported:
            self._imported[names] = _read_user_code(names, self.code)
        return self._imported[names]

    def code_record(self, experiment: Experiment, **ids: str) -> CodeRecord:
        """Versions of titan_exp and of your code, with ids of the run."""
        imported = [version for version, _ in self.imported(experiment)]
        frozen = None if self.frozen is None else asdict(self.frozen)
        return CodeRecord((self.code, *imported), import_paths(experiment), frozen, **ids)

    def patch(self, experiment: Experiment) -> str:
        """Content of diff.patch: one part per repository, each after a line that names the repository."""
        text = ""
        for version, diff in [(self.code, self.diff), *self.imported(experiment)]:
            base = "in no repository" if version.diff is None else f"from commit {version.commit or 'none'}"
            text += f"{PART}{version.name}: {version.path}, {base}\n{diff}" if diff else ""
        return text


def read_provenance(frozen: CodeSnapshot | None = None) -> Provenance:
    """Read the current version and diff of titan_exp, and the environment."""
    code, diff = read_code_version()
    return Provenance(code, diff, read_environment(), frozen)


def _read_user_code(names: Sequence[str], own: CodeVersion) -> list[tuple[CodeVersion, str]]:
    scopes: dict[tuple[str, Path], dict[Path, None]] = {}
    repositories = cache(repository_of)
    for module, file in user_modules(names).items():
        code = scope(module, file)
        if is_installed(file):
            key = ("installed", Path(module.partition(".")[0]))
        else:
            key = ("files", code.parent) if (top := repositories(code)) is None else ("repository", top)
        scopes.setdefault(key, {})[code] = None
    found, short = [], [own.name, *(place.name for _, place in scopes)]
    for (kind, place), folders in scopes.items():
        name = place.name if short.count(place.name) == 1 else str(place)
        if kind == "installed":
            # With checksums, because the same version may be installed again with other content.
            known, folder = metadata.packages_distributions().get(place.name), next(iter(folders)).parent
            version = metadata.version(known[0]) if known else None
            found.append(read_files(known[0] if known else place.name, folder, list(folders), version=version))
        elif kind == "files":
            found.append(read_files(name, place, list(folders), save=True))
        else:
            version, diff = read_repository(name, place, list(folders))
            # The diff of titan_exp's repository already exists and includes untracked files.
            found.append((version, "" if own.commit is not None and str(place) == own.path else diff))
    return sorted(found, key=lambda part: part[0].name)


LARGE_PATCH = 1_000_000  # size in bytes at which a diff counts as large
DATA_NAMES = {"data.content": "data files", "data.paths": "token stores", "data.tokenizer": "tokenizer"}


def code_changes(before: CodeRecord, after: CodeRecord) -> list[str]:
    """Differences between two code records (`code.json`), a line per repository or package; other files of the
    repositories do not count."""
    old, new = ({part.name: part for part in record.parts} for record in (before, after))
    lines = [line for name in old if name in new and (line := _change(old[name], new[name]))]
    lines += [f"{name}: this run does not import it any more" for name in old if name not in new]
    added = [name for name in new if name not in old]
    return lines + [f"{name}: this run imports it now, and did not before ({new[name].state})" for name in added]


def attempt_changes(run: Run, attempt: int) -> tuple[str, list[str]]:
    """Start that attempt `attempt` continues (the last attempt, or the parent run), and the code changes since then."""
    folder, present = run.folder, run.code
    if present is None:
        return "", []
    if attempt > 1:
        kept = read_code(folder.attempt_logs(attempt - 1) / folder.code.name)
        return f"attempt {attempt - 1}", [] if kept is None else code_changes(kept, present)
    name, runs = run.group("checkpoint").continue_from, run.group("paths").runs
    if name is None:
        return "", []
    parent = parent_location(name, Path(runs).expanduser().absolute())
    recorded = read_code(Path(parent) / folder.code.name)
    return name, [] if recorded is None else code_changes(recorded, present)


def edited_code(folder: RunFolder) -> list[str]:
    """Recorded files that were edited before this process imported them, a line per repository. Snapshots, which
    replace titan_exp and the repository of the current folder, never change."""
    record, lines = read_code(folder.code), []
    frozen = record.frozen if record else None
    for part in record.parts[1 if frozen else 0 :] if record else ():
        place = Path(part.path or "/")
        copied = frozen and frozen.get("own") is not None and place in (Path.cwd(), *Path.cwd().parents)
        if place.is_dir() and not copied:
            present = checksums(place, part.files)
            edited = sorted(file for file, checksum in part.files.items() if present.get(file) != checksum)
            lines += [f"{part.name}: {_count(edited)}"] if edited else []
    return lines


def report_changes(plans: Sequence[RunPlan], echo: Callable[[str], None]) -> None:
    """Print the code changes since the attempts or parents that these runs continue. The folders must be up to date."""
    continued: dict[tuple[str, ...], int] = {}
    for plan in plans:
        rows = plan.folder.read_attempts()
        since, lines = attempt_changes(Run(plan.folder), (rows[-1].attempt if rows else 0) + 1)
        if lines:
            heading = f"Code changed since {since}:" if len(plans) == 1 else "continue with other code:"
            continued[heading, *lines] = continued.get((heading, *lines), 0) + 1
    for (heading, *lines), count in continued.items():
        echo("\n  ".join([heading if len(plans) == 1 else f"{format_items(count, 'run')} {heading}", *lines]))


def patched_files(patch: str) -> dict[str, str]:
    """Parts of a diff.patch by the names of their files."""
    _, *parts = re.split(r'^diff --git "?a/(.+?)"? "?b/', patch, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def report_large_patch(folder: RunFolder, echo: Callable[[str], None]) -> None:
    """Print the largest files of a run's diff.patch if the patch is large, since every run has a copy."""
    size = folder.diff.stat().st_size
    if size < LARGE_PATCH:
        return
    parts = patched_files(folder.diff.read_bytes().decode(errors="replace"))
    largest = sorted(parts, key=lambda name: len(parts[name]), reverse=True)
    remedy = "Every run keeps a copy, so commit large files, or list them in .gitignore."
    echo(f"{folder.diff} has {format_bytes(size)}, most of it from {some_of(largest)}. {remedy}")


def report_stale(plans: Sequence[RunPlan], echo: Callable[[str], None]) -> None:
    """Print which finished runs have other code or data than the present, and how to run them anew."""
    done = [plan for plan in plans if (state := plan.folder.read_state()) is not None and state.state == "done"]
    if not done:
        return
    provenance, identities = read_provenance(), dict[str, Any]()
    stale: dict[tuple[str, ...], list[RunPlan]] = {}
    for plan in done:
        recorded = read_code(plan.folder.code)
        lines = [] if recorded is None else code_changes(recorded, provenance.code_record(plan.experiment))
        lines += _data_changes(plan.folder, plan.experiment, identities)
        if lines:
            stale.setdefault(tuple(lines), []).append(plan)
    for lines, runs in stale.items():
        subject = f"The result in {runs[0].folder.path}"
        if len(done) > 1:
            subject = f"{len(runs)} of {len(done)} results ({some_of([run.run_id for run in runs])})"
        echo(f"{subject} {'comes' if len(runs) == 1 else 'come'} from other code or data than you have now:")
        for line in lines:
            echo(f"  {line}")
    if stale:
        name = done[0].experiment.experiment.name
        folders = "that folder" if len(done) == 1 else f"those folders of {done[0].folder.path.parent}"
        echo(f"To train with what you have now, add experiment.name={name}-2 (any new name), or remove {folders}.")


def refuse_other_data(experiment: Experiment, folder: RunFolder) -> None:
    """Compare the data of a continued run, or of a parent whose data continue, with the files on this machine. Raises
    UserError if a rank would refuse to continue on them."""
    checkpoint, state = experiment.checkpoint, folder.read_state()
    if state is not None and state.state == "done":
        return
    continued, restart = folder.path, "checkpoint.continue_data=restart"
    if saved_state(str(folder.path)) is not None:
        restart = f"start a new run with checkpoint.continue_from={'/'.join(folder.path.parts[-2:])} {restart}"
    elif checkpoint.continue_data == "same" and (path := local_checkpoint(checkpoint, experiment.paths)) is not None:
        continued = path.parent.parent
    else:
        return
    if recorded := recorded_data(continued):
        with suppress(OSError):
            present, _ = known_identity(experiment.data)
            require_same_data(recorded, present, {*recorded} & {*present}, restart)


def _change(old: CodeVersion, new: CodeVersion) -> str | None:
    names = ""
    if old.files and new.files:
        changed = sorted(file for file in {*old.files, *new.files} if old.files.get(file) != new.files.get(file))
        if not changed:
            return None
        names = f"; {_count(changed)}"
    elif (old.state, old.diff) == (new.state, new.diff):
        return None
    return f"{old.name}: {old.state if old.state == new.state else f'from {old.state} to {new.state}'}{names}"


def _count(files: Sequence[str]) -> str:
    return f"{len(files)} file{'s differ' if len(files) > 1 else ' differs'}: {some_of(files)}"


def _data_changes(folder: RunFolder, experiment: Experiment, identities: dict[str, Any]) -> list[str]:
    rows = [row for row in folder.read_attempts() if row.data is not None]
    if not rows or rows[-1].data is None:
        return []
    key = repr(experiment.data)
    try:
        if key not in identities:
            identities[key] = known_identity(experiment.data)
        present, files = identities[key]
    except (UserError, OSError) as error:
        return [f"data: we could not compare it, since nothing can read it now ({str(error).splitlines()[0]})"]
    recorded = {name: rows[-1].data[name] for name in present if name in rows[-1].data}
    changed = {name: before for name, before in recorded.items() if before != present[name]}
    lines = [f"{DATA_NAMES.get(name, name)}: from {old} to {present[name]}" for name, old in changed.items()]
    began = rows[-1].start or rows[-1].intent
    if not lines and files is not None and files.is_sampled and files.modified > began:
        when = format_time(files.modified)
        lines += [f"data files: modified since, at {when} (the samples that we read are the same, others may differ)"]
    return lines
