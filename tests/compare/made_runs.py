"""Synthetic run folders with a real configuration and known metrics."""

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_dict, to_experiment
from titan_exp.launch.ledger import Question
from titan_exp.launch.run_plan import experiment_id, run_id
from titan_exp.tracking.run_folder.metrics_jsonl import JsonlSink
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState


@cache
def _composed() -> str:
    return yaml.safe_dump(to_dict(to_experiment(compose(["+experiment=smoke"]))), sort_keys=False)


def config(values: dict[str, Any]) -> dict[str, Any]:
    """The smoke configuration with some values replaced, by dotted key."""
    found = yaml.load(_composed(), yaml.CSafeLoader)
    found["parallelism"]["dp_shard"] = 1
    for key, value in values.items():
        *path, last = key.split(".")
        group = found
        for part in path:
            group = group[part]
        assert last in group, key
        group[last] = value
    return found


def rows(
    loss: float, *, steps: int = 50, per_step: int = 1000, speed: float = 5000.0, more: dict[str, float] | None = None
) -> list[dict]:
    """Rows of a run whose loss falls to `loss`, constant over the last tenth, with an evaluation at the end."""
    found = []
    for step in range(1, steps + 1):
        here = loss + max(0.0, 1 - step / (0.9 * steps)) * 2
        row = {"step": step, "tokens": step * per_step, "loss": here, "grad_norm": 1.0, "lr": 1e-3, "memory": 2.0}
        row |= {"tokens_per_second": speed if step > 3 else None, "tokens_per_second_per_device": None, **(more or {})}
        found.append(row)
    found[-1]["validation_loss"] = loss + 0.1
    return found


def make_run(
    runs: Path,
    values: dict[str, Any] | None = None,
    *,
    metrics: Iterable[dict] = (),
    state: str = "done",
    reason: str | None = None,
    study: str = "made",
    world_size: int = 1,
    seconds: float = 36.0,
    dirty: bool = False,
) -> Path:
    """A run folder; its ids are the real ones of its configuration."""
    whole = config({"experiment.name": study, **(values or {})})
    digests = _ids(json.dumps(whole))
    folder = RunFolder(runs / study / digests[0])
    folder.path.mkdir(parents=True)
    folder.config.write_text(yaml.dump(whole, Dumper=yaml.CSafeDumper, sort_keys=False))
    folder.code.write_text(
        json.dumps({"run_id": digests[0], "experiment_id": digests[1], "commit": "c0ffee1234567", "dirty": dirty})
    )
    folder.env.write_text(json.dumps({"cpu": "a CPU", "gpus": []}))
    sink = JsonlSink(folder.metrics, attempt=1)
    step = 0
    for row in metrics:
        sink.log(row)
        step = row["step"]
    sink.close("done")
    if state != "pending":
        attempt = folder.add_attempt(world_size=world_size, hosts=["here"])
        folder.update_attempt(attempt.attempt, start=1000.0, end=1000.0 + seconds, exit=0)
    if state == "running":
        folder.beat(step, force=True)
    folder.write_state(RunState(state, step, 1.0, 1, reason))  # type: ignore[arg-type]
    return folder.path


def make_study(runs: Path, losses: dict[float, list[float]], **also: Any) -> Path:
    """A run for each learning rate and seed, with these final losses."""
    for lr, by_seed in losses.items():
        for seed, loss in enumerate(by_seed):
            if not math.isnan(loss):
                make_run(runs, {"optimizer.lr": lr, "experiment.seed": seed}, metrics=rows(loss), **also)
    return runs / also.get("study", "made")


@cache
def _ids(whole: str) -> tuple[str, str]:
    from omegaconf import DictConfig

    experiment = to_experiment(DictConfig(json.loads(whole)))
    return run_id(experiment), experiment_id(experiment)


def made_question(study: str, **values: Any) -> Question:
    """A row of the ledger, of the first look unless values say otherwise."""
    row = Question(
        id=f"id of {study}",
        study=study,
        candidate="new",
        baseline="plain",
        arms=(f"new {study}", f"plain {study}"),
        metric="validation_loss",
        scale="1M parameters and 1M tokens",
        rule="looks after 3, 5 and 8 pairs, alpha 0.05",
        pairs=3,
        outcome="continue",
        why="a look to come",
        e_better=1.0,
        p_better=0.5,
        changed=(),
        dropped="",
        time=0.0,
    )
    return replace(row, **values)
