"""Provenance of runs, read once per launch: versions and diffs of titan_exp and of your code, and the environment
(package versions, hardware, and variables that affect the computation)."""

import os
import platform
import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from titan_exp.config.devices import command_lines, cpu_model, usable_cores
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.foreign_code import import_paths
from titan_exp.config.secrets import is_secret_variable
from titan_exp.launch.provenance.code_snapshot import CodeSnapshot, is_installed, scope, user_modules
from titan_exp.launch.provenance.git import read_code_version, read_files, read_repository, repository_of
from titan_exp.launch.provenance.secrets import mask
from titan_exp.tracking.run_folder.run import CodeRecord, CodeVersion

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
        "gpus": _gpus(),
        "environment": {name: mask(value) for name, value in variables.items() if not is_secret_variable(name)},
        "packages": packages,
    }


def _packages() -> dict[str, str]:
    """Version by installed distribution; the first on sys.path wins."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        # `distribution.metadata` parses the whole file: one second for a hundred packages.
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        fields = dict(_FIELD.findall(text.partition("\n\n")[0]))
        if "Name" in fields and "Version" in fields:
            found.setdefault(fields["Name"].lower().replace("_", "-"), fields["Version"])
    return dict(sorted(found.items()))


def _gpus() -> list[dict[str, str]]:
    """Name, memory and driver of each NVIDIA GPU."""
    lines = command_lines("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    rows = [[part.strip() for part in line.split(",")] for line in lines]
    return [dict(zip(("name", "memory", "driver"), row, strict=False)) for row in rows if len(row) == 3]


PART = "# code of "
"""First words of the line before each part of diff.patch; git apply skips such lines."""


@dataclass(frozen=True)
class Provenance:
    """Provenance shared by the runs of one launch; your code is read once per set of import paths."""

    code: CodeVersion
    diff: str
    environment: dict[str, Any]
    frozen: CodeSnapshot | None = None
    """Code snapshot; None if ranks import the code in place."""
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
        parts = [(self.code, self.diff), *self.imported(experiment)]
        return "".join(f"{_heading(version)}\n{diff}" for version, diff in parts if diff)


def read_provenance(frozen: CodeSnapshot | None = None) -> Provenance:
    """Read the current version and diff of titan_exp, and the environment."""
    code, diff = read_code_version()
    return Provenance(code, diff, read_environment(), frozen)


def _heading(version: CodeVersion) -> str:
    base = "in no repository" if version.diff is None else f"from commit {version.commit or 'none'}"
    return f"{PART}{version.name}: {version.path}, {base}"


def _read_user_code(names: Sequence[str], own: CodeVersion) -> list[tuple[CodeVersion, str]]:
    """Version and diff of every repository, installed package and folder that contains your code."""
    scopes: dict[tuple[str, Path], dict[Path, None]] = {}
    repositories: dict[Path, Path | None] = {}
    for module, file in user_modules(names).items():
        code = scope(module, file)
        if is_installed(file):
            key = ("installed", Path(module.partition(".")[0]))
        else:
            top = repositories.setdefault(code, repository_of(code)) if code not in repositories else repositories[code]
            key = ("files", code.parent) if top is None else ("repository", top)
        scopes.setdefault(key, {})[code] = None
    found, short = [], [own.name, *(place.name for _, place in scopes)]
    for (kind, place), folders in scopes.items():
        name = place.name if short.count(place.name) == 1 else str(place)
        if kind == "installed":
            found.append(_installed(place.name, list(folders)))
        elif kind == "files":
            found.append(read_files(name, place, list(folders), save=True))
        else:
            version, diff = read_repository(name, place, list(folders))
            # The diff of titan_exp's repository already exists and includes untracked files.
            found.append((version, "" if own.commit is not None and str(place) == own.path else diff))
    return sorted(found, key=lambda part: part[0].name)


def _installed(package: str, folders: Sequence[Path]) -> tuple[CodeVersion, str]:
    """Version of an installed package, with checksums, because the same version may be installed again with other
    content."""
    distributions = metadata.packages_distributions().get(package, [])
    version = metadata.version(distributions[0]) if distributions else None
    return read_files(distributions[0] if distributions else package, folders[0].parent, folders, version=version)
