"""Environment of a launch: package versions, hardware, and environment variables that affect the computation."""

import os
import platform
import re
import socket
import sys
from importlib import metadata
from typing import Any

import psutil

from titan_exp.config.machine.devices import command_lines, cpu_model, usable_cores
from titan_exp.config.secrets import is_secret_variable
from titan_exp.launch.provenance.secrets import mask

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
