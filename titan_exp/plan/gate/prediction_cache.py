"""On-disk prediction cache, keyed by the options that affect memory or speed, unlike learning rate, seed and name.

The key includes a digest of this package's code and the versions of torch and torchao.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import titan_exp
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.pipeline_schedules import is_file
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.devices import uses_expandable_segments
from titan_exp.config.schema.foreign_code import import_paths
from titan_exp.config.schema.typed_config import to_dict
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.exchange import exchange_of
from titan_exp.plan.prediction import Prediction, from_json
from titan_exp.tracking.run_folder.files import write_atomically

FOLDER = "plan"
"""Folder below `.cache` of the runs."""
IRRELEVANT_KEYS = {
    "model": ("name", "init_std", "norm_eps"),
    "training": ("steps", "stop_after", "evaluate_every", "gc_every", "deterministic", "stop_on_nonfinite"),
    "optimizer": ("lr", "betas", "eps"),
    "grad_clip": ("max_value", "relative", "decay", "warmup_steps"),
    "weight_average": ("decay", "steps"),
}
"""Keys of relevant groups without effect on predictions."""
ON_OFF_KEYS = {"training": ("max_grad_norm", "z_loss"), "optimizer": ("weight_decay",)}
"""Keys compared only as set or unset."""
STEP_KEYS = ("model.architecture", "parametrization.name", "training.objective", "training.parts", "tracking.metrics")
"""Keys that may name user-defined code of a step, beside `optimizer.name`, whose `max_state` is None then."""
RELEVANT_GROUPS = (
    *("model", "training", "parallelism", "optimizer", "parametrization", "quantization"),
    *("grad_clip", "weight_average", "activation_checkpoint", "compile"),
)


def cache_key(experiment: Experiment, device: Device | None) -> str | None:
    """Cache key of a prediction, by its code and every value that affects it; None with user-defined code."""
    if import_paths(experiment, STEP_KEYS) or experiment.optimizer.max_state is None:
        return None
    config = to_dict(experiment)
    inputs: dict[str, Any] = {group: config[group] for group in RELEVANT_GROUPS}
    for group, names in IRRELEVANT_KEYS.items():
        inputs[group] = {name: value for name, value in inputs[group].items() if name not in names}
    for group, names in ON_OFF_KEYS.items():
        inputs[group] |= {name: bool(inputs[group][name]) for name in names}
    inputs["exchange"] = exchange_of(experiment).inputs
    schedule = experiment.parallelism.pp_schedule
    if is_file(schedule):
        inputs["parallelism"]["pp_schedule"] = Path(schedule).expanduser().read_text(encoding="utf-8")
    inputs["data"] = {name: config["data"][name] for name in ("document_mask", "reset_positions")}
    layout = ResolvedLayout.of(experiment)
    expandable = uses_expandable_segments(experiment.cluster, experiment.compile)
    inputs["cluster"] = [layout.device_type, layout.node_size, expandable, experiment.cluster.worlds]
    inputs["device"] = None if device is None else asdict(device)
    inputs["metrics"] = experiment.tracking.metrics
    return hashlib.sha256(f"{_code()} {json.dumps(inputs, sort_keys=True)}".encode()).hexdigest()[:24]


def get(cache: Path, key: str) -> Prediction | None:
    """Read a cached prediction; None if missing or unreadable."""
    try:
        return from_json(json.loads((cache / FOLDER / f"{key}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def put(cache: Path, key: str, prediction: Prediction) -> None:
    """Write a prediction; a full disk is ignored."""
    path = cache / FOLDER / f"{key}.json"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(prediction)) + "\n", durable=False)


@cache
def _code() -> str:
    """Digest of this package's source and the versions of torch and torchao."""
    package, digest = Path(titan_exp.__file__).parent, hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    for name in ("torch", "torchao"):
        with suppress(metadata.PackageNotFoundError):
            digest.update(metadata.version(name).encode())
    return digest.hexdigest()
