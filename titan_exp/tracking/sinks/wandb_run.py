"""How a run presents itself in W&B: what it is called, grouped by, and filtered on. Imports no wandb.

Paths, hosts and job numbers stay out of the configuration there, so that two runs differ only in what they compute.
"""

import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.layout import world_size
from titan_exp.config.schema.typed_config import to_dict
from titan_exp.tracking.run_folder.run_folder import RunFolder

VOLATILE = ("paths", "cluster", "tracking", "profiling", "plan")
"""Groups that do not change what is computed."""

NAME_LENGTH = 128
"""W&B refuses longer names."""


@dataclass(frozen=True)
class WandbRun:
    """What `wandb.init` is told."""

    id: str
    """The same on every start of this run folder."""
    name: str
    """What was typed to make this run differ from the defaults, else the run id."""
    group: str
    """`experiment.name`."""
    project: str
    entity: str | None
    mode: str
    """`auto`, `online` or `offline`."""
    tags: tuple[str, ...]
    notes: str
    config: dict[str, Any]
    """Nested, resolved, and one flat block `run` to filter by."""


def describe_wandb_run(experiment: Experiment, folder: RunFolder, run_id: str) -> WandbRun:
    """The run of this folder."""
    tracking, naming = experiment.tracking, experiment.experiment
    return WandbRun(
        id=_fixed_id(folder.path, run_id),
        name=_name(folder.overrides) or run_id,
        group=naming.name,
        project=tracking.wandb_project,
        entity=tracking.wandb_entity,
        mode=tracking.wandb_mode,
        tags=naming.tags,
        notes=naming.notes,
        config=_config(experiment, folder, run_id),
    )


def _fixed_id(folder: Path, run_id: str) -> str:
    """Made once and kept in the folder. Its random end keeps apart two folders that compute the same: other people's
    in one project, or the one that was deleted, whose id W&B never gives out again."""
    path = folder / "wandb" / "id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        temporary.write_text(f"{run_id}-{secrets.token_hex(3)}")
        temporary.replace(path)
    return path.read_text().strip()


def _typed(overrides: Path) -> list[str]:
    """What was typed and changes what is computed."""
    if not overrides.exists():
        return []
    typed = OmegaConf.to_container(OmegaConf.load(overrides), resolve=False)
    return [str(line) for line in typed if not _is_volatile(str(line))] if isinstance(typed, list) else []


def _axis(folder: RunFolder, run_id: str) -> tuple[str, str]:
    """What the study varies, and this run's value of it; outside a study what was typed. The seed is no axis.

    Several keys are joined by spaces, in the same order as their values. A point that its study calls by a name has
    that as its value, and no axis.
    """
    varied = _varied(folder, run_id)
    words = _typed(folder.overrides) if varied is None else varied.split()
    pairs = [word.lstrip("+").partition("=") for word in words]
    named = [key for key, equals, _ in pairs if not equals]
    known = [(key, value) for key, equals, value in pairs if equals and key != "experiment.seed"]
    return " ".join(key for key, _ in known), " ".join([*named, *(value for _, value in known)])


def _varied(folder: RunFolder, run_id: str) -> str | None:
    """How the study whose folder this run is in calls its point, the seed left out; None where there is none."""
    try:
        study = json.loads((folder.path.parent / "study.json").read_text(encoding="utf-8"))
        points = {point["run_id"]: point.get("variant", point.get("label")) for point in study["points"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a mirror does not fail over what only makes it prettier
    return points.get(run_id)


def _name(overrides: Path) -> str:
    name = " ".join(_typed(overrides))
    return name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "…"


def _is_volatile(override: str) -> bool:
    key = override.partition("=")[0].lstrip("+~")
    group = key.partition(".")[0].partition("@")[0]
    return group in (*VOLATILE, "hydra") or key in ("experiment.name", "experiment.tags", "experiment.notes")


def _config(experiment: Experiment, folder: RunFolder, run_id: str) -> dict[str, Any]:
    config = {group: values for group, values in to_dict(experiment).items() if group not in VOLATILE}
    config["experiment"] = {"name": experiment.experiment.name, "seed": experiment.experiment.seed}
    code = json.loads(folder.code.read_text()) if folder.code.exists() else {}
    axis, value = _axis(folder, run_id)
    config["run"] = {
        "study": experiment.experiment.name,
        "axis": axis,
        "value": value,
        "experiment_id": code.get("experiment_id"),
        "run_id": run_id,
        "world_size": world_size(experiment),
        "commit": code.get("commit"),
        "dirty": code.get("dirty"),
    }
    return config
