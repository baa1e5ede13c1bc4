"""Predictions kept on disk, under what decides them: learning rates, seeds and names do not.

What is kept is dropped when the code that it came from changes, torch's and torchao's versions included.
"""

import hashlib
import json
from dataclasses import asdict
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import titan_exp
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.parameter_count import has_known_state
from titan_exp.config.layout.pipeline_schedules import is_file
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.devices import device_type, node_size
from titan_exp.config.schema.typed_config import to_dict
from titan_exp.models.spec.lookup import model_spec
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.plan_json import Prediction, from_json, to_json
from titan_exp.tracking.run_folder.atomic_write import write_atomically

FOLDER = "plan"
"""In the `.cache` of the runs."""
IRRELEVANT_KEYS = {
    "model": ("name", "init_std", "norm_eps"),
    "training": ("steps", "evaluate_every", "gc_every", "deterministic", "stop_on_nonfinite"),
    "optimizer": ("lr", "betas", "eps"),
}
"""Keys of groups that decide, which do not."""
ON_OFF_KEYS = {"training": ("max_grad_norm", "z_loss"), "optimizer": ("weight_decay",)}
"""Keys whose being set decides, and not how."""
RELEVANT_GROUPS = ("model", "training", "parallelism", "optimizer", "quantization", "activation_checkpoint", "compile")


def cache_key(experiment: Experiment, device: Device | None) -> str | None:
    """What decides a prediction, as a name; None where code of the user's own does.

    Args:
        experiment: the run, its layout resolved.
        device: whose rates time is estimated by.
    """
    if model_spec(experiment.model) is None or not has_known_state(experiment.optimizer.name):
        return None
    return hashlib.sha256(f"{_code()} {prediction_inputs(experiment, device)}".encode()).hexdigest()[:24]


def prediction_inputs(experiment: Experiment, device: Device | None) -> str:
    """What decides a prediction, as text, less the code."""
    config = to_dict(experiment)
    found: dict[str, Any] = {group: config[group] for group in RELEVANT_GROUPS}
    for group, names in IRRELEVANT_KEYS.items():
        found[group] = {name: value for name, value in found[group].items() if name not in names}
    for group, names in ON_OFF_KEYS.items():
        found[group] |= {name: bool(found[group][name]) for name in names}
    schedule = experiment.parallelism.pp_schedule
    if is_file(schedule):
        found["parallelism"]["pp_schedule"] = Path(schedule).expanduser().read_text(encoding="utf-8")
    found["data"] = {name: config["data"][name] for name in ("document_mask", "reset_positions")}
    world = ResolvedLayout.of(experiment).world_size
    found["cluster"] = [device_type(experiment.cluster), node_size(experiment.cluster, world)]
    found["device"] = None if device is None else asdict(device)
    return json.dumps(found, sort_keys=True)


def get(cache: Path, key: str) -> Prediction | None:
    """What was predicted under this name; None where nothing was, or it cannot be read."""
    try:
        return from_json(json.loads((cache / FOLDER / f"{key}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def put(cache: Path, key: str, prediction: Prediction) -> None:
    """Keep a prediction under this name, unless the disk does not let it."""
    path = cache / FOLDER / f"{key}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(to_json(prediction)) + "\n", durable=False)
    except OSError:
        return  # it is predicted anew the next time


@cache
def _code() -> str:
    """A digest of our own source and of the versions of what it stands on."""
    package, digest = Path(titan_exp.__file__).parent, hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    for name in ("torch", "torchao"):
        try:
            digest.update(metadata.version(name).encode())
        except metadata.PackageNotFoundError:
            continue
    return digest.hexdigest()
