import dataclasses
import json
from pathlib import Path

import pytest

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.tracking.run_folder.run import Lineage
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.tracking.sinks import NAME_LENGTH, WandbRun, describe_wandb_run


def experiment(*overrides: str) -> Experiment:
    return resolve_layout(to_experiment(compose(["model=llama_debug", *overrides])), 1)


def described(folder: Path, *overrides: str) -> WandbRun:
    return describe_wandb_run(experiment(*overrides), RunFolder(folder), "3f2a")


def test_configured_fields(tmp_path: Path) -> None:
    run = described(
        tmp_path,
        "experiment.name=heads",
        "experiment.tags=[debug]",
        "experiment.notes=why",
        "tracking.wandb_project=p",
        "tracking.wandb_entity=e",
        "tracking.wandb_mode=offline",
    )
    assert (run.group, run.tags, run.notes) == ("heads", ("debug",), "why")
    assert (run.project, run.entity, run.mode) == ("p", "e", "offline")


def test_a_folder_keeps_its_id_and_another_folder_has_another(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    first = described(tmp_path / "a").id
    assert first.startswith("3f2a-")
    assert described(tmp_path / "a", "experiment.seed=3").id == first
    assert described(tmp_path / "b").id != first


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["optimizer.lr=1e-3", "+model.options.a=1"], "optimizer.lr=1e-3 +model.options.a=1"),
        (
            ["tracking=wandb", "paths.runs=/x", "optimizer.lr=1", "experiment.name=n", "hydra.verbose=true"],
            "optimizer.lr=1",
        ),
        (["cluster=local", "cluster.nodes=2", "profiling@profiling=trace"], "3f2a"),
        (["training.steps=${model.layers}"], "training.steps=${model.layers}"),
        ([], "3f2a"),
        (None, "3f2a"),
    ],
)
def test_name_has_typed_overrides(tmp_path: Path, overrides: list[str] | None, name: str) -> None:
    if overrides is not None:
        (tmp_path / "overrides.yaml").write_text(json.dumps(overrides))
    assert described(tmp_path).name == name


def test_a_long_name_is_cut(tmp_path: Path) -> None:
    (tmp_path / "overrides.yaml").write_text(json.dumps([f"data.options.key{n}=value" for n in range(20)]))
    assert len(described(tmp_path).name) == NAME_LENGTH


def test_configuration_without_machine(tmp_path: Path) -> None:
    (tmp_path / "code.json").write_text('{"commit": "abc", "dirty": true, "branch": "main", "experiment_id": "e1"}')
    (tmp_path / "overrides.yaml").write_text(
        '["optimizer.lr=1e-3", "experiment.seed=2", "tracking=wandb", "compile=all"]'
    )
    config = described(tmp_path, "paths.runs=/somewhere/special", "parallelism.dp_shard=2").config
    assert config["model"]["rope"]["theta"] == 10000.0
    assert config["experiment"] == {"name": "first", "seed": 0}
    assert config["run"] == {
        "study": "first",
        "axis": "optimizer.lr compile",
        "value": "1e-3 all",
        "experiment_id": "e1",
        "run_id": "3f2a",
        "world_size": 2,
        "commit": "abc",
        "dirty": True,
    }
    assert not {"paths", "cluster", "tracking", "profiling"} & set(config)
    assert "/somewhere/special" not in json.dumps(config)


def test_a_continued_run_has_its_parent(tmp_path: Path) -> None:
    parent, child = tmp_path / "first" / "aaaa", tmp_path / "first" / "bbbb"
    for folder in (parent, child):
        folder.mkdir(parents=True)
    Lineage(str(parent), 20, 20_000).write(child)
    assert described(child).parent_id is None  # the parent was not logged to W&B
    parent_id = described(parent).id
    run = described(child)
    assert run.parent_id == parent_id
    found = {name: run.config["run"][name] for name in ("parent", "parent_step", "parent_tokens")}
    assert found == {"parent": "first/aaaa", "parent_step": 20, "parent_tokens": 20_000}


@pytest.mark.parametrize(
    ("point", "axis", "value"),
    [
        ({"label": "optimizer.lr=1 experiment.seed=2", "variant": "optimizer.lr=1"}, "optimizer.lr", "1"),
        ({"label": "parallelism.tp=2 parallelism.pp=2"}, "parallelism.tp parallelism.pp", "2 2"),
        ({"variant": "muon"}, "", "muon"),
        ({"variant": ""}, "", ""),
    ],
)
def test_axis_of_a_study(tmp_path: Path, point: dict, axis: str, value: str) -> None:
    (tmp_path / "study.json").write_text(json.dumps({"points": [{"run_id": "3f2a", **point}]}))
    folder = tmp_path / "3f2a"
    folder.mkdir()
    (folder / "overrides.yaml").write_text('["training.steps=5", "optimizer.lr=1"]')
    run = described(folder).config["run"]
    assert (run["axis"], run["value"]) == (axis, value)


@pytest.mark.parametrize("text", ["", "[]", '{"points": 3}', '{"points": [{}]}', '{"points": []}'])
def test_unreadable_study_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "study.json").write_text(text)
    folder = tmp_path / "3f2a"
    folder.mkdir()
    (folder / "overrides.yaml").write_text('["optimizer.lr=1"]')
    assert described(folder).config["run"]["axis"] == "optimizer.lr"


def test_configurations_differ_only_in_the_changed_value(tmp_path: Path) -> None:
    one = described(tmp_path, "optimizer.lr=1e-3", "cluster.threads_per_process=1")
    two = described(tmp_path, "optimizer.lr=1e-4", "experiment.notes=later")
    one.config["optimizer"]["lr"] = two.config["optimizer"]["lr"]
    assert dataclasses.replace(one, notes=two.notes) == two
