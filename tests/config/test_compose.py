"""Composition: every shipped option against its golden text, overlays, and what the comments promise."""

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError

from tests.config.composing import experiment
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.extension import CONF_DIR, added_groups, added_keys, extension_folders
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.schema import keys
from titan_exp.rules import violations

GOLDEN = Path(__file__).parent / "golden"
TESTS = Path(__file__).parents[1] / "extensions"
FOLDERS = {CONF_DIR: GOLDEN} | {path: TESTS / path.parent.name / "golden" for path in extension_folders("conf")}
"""Folder of golden texts by folder of options: those of an extension lie with its tests."""
FILES = [(folder, path.relative_to(folder)) for folder in FOLDERS for path in sorted(folder.rglob("*.yaml"))]
FILES = [(folder, file) for folder, file in FILES if file.parts[0] != "local"]
SINGLE = [(folder, file) for folder, file in FILES if len(file.parts) == 2]
GROUPS = sorted({file.parts[0] for _, file in SINGLE})
OPTIONS = {f"{file.parent}={file.stem}": FOLDERS[folder] / file for folder, file in SINGLE}
"""Golden text of every option."""
OF_EXTENSIONS = [group for group in added_groups() if not (CONF_DIR / group).is_dir()]
OVERLAYS = [option for option in OPTIONS if option.startswith("experiment=")]


def text_of(overrides: list[str], group: str | None = None) -> str:
    cfg = compose(overrides)
    if group not in OF_EXTENSIONS:
        cfg = without_added_keys(cfg)
    shown = cfg[group] if group else cfg
    try:
        return OmegaConf.to_yaml(shown, resolve=True)
    except InterpolationToMissingValueError:  # values that follow from a key without a default
        return OmegaConf.to_yaml(shown)


def without_added_keys(cfg: DictConfig) -> DictConfig:
    """A configuration without the keys of extensions at their defaults, as the core alone composes it."""
    OmegaConf.set_struct(cfg, False)
    for group in added_groups():
        for key, value in added_keys(group).items():
            if cfg[group].get(key) == value:
                cfg[group].pop(key)
        if not cfg[group]:
            cfg.pop(group)
    return cfg


def test_the_default_configuration(golden: Callable[[Path, str], None]):
    golden(GOLDEN / "config.yaml", text_of([]))


@pytest.mark.parametrize("option", [option for option in OPTIONS if option not in OVERLAYS])
def test_every_option(option: str, golden: Callable[[Path, str], None]):
    golden(OPTIONS[option], text_of([option], option.partition("=")[0]))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay(overlay: str, golden: Callable[[Path, str], None]):
    golden(OPTIONS[overlay], text_of([f"+{overlay}"]))


def test_no_golden_text_is_left_over():
    found = {path for golden in FOLDERS.values() for path in golden.rglob("*.yaml")}
    assert found == {*OPTIONS.values(), GOLDEN / "config.yaml"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_are_experiments(overlay: str):
    experiment(f"+{overlay}")


def test_the_smoke_overlay_keeps_every_rule(tmp_path: Path):
    assert violations(experiment("+experiment=smoke", f"paths.runs={tmp_path}")) == []


def test_group_experiment_and_its_overlays_compose_together():
    run = experiment("+experiment=smoke", "experiment.name=mine", "training.steps=7")
    assert (run.experiment.name, run.model.name, run.training.steps) == ("mine", "llama-debug", 7)


@pytest.mark.parametrize(("steps", "warmup", "decay"), [(1, 1, 0), (2, 1, 1), (600, 30, 200)])
def test_the_schedule_follows_the_length_of_the_run(steps: int, warmup: int, decay: int):
    schedule = experiment(f"training.steps={steps}").lr_schedule
    assert (schedule.warmup_steps, schedule.decay_steps) == (warmup, decay)


def test_a_local_overlay_changes_the_defaults_and_loses_to_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    conf = tmp_path / "conf"
    shutil.copytree(CONF_DIR, conf, ignore=shutil.ignore_patterns("local"))
    (conf / "local").mkdir()
    overlay = "defaults:\n  - override /tracking: wandb\n\npaths: {runs: /scratch}\ntraining: {steps: 7}\n"
    (conf / "local" / "default.yaml").write_text(overlay)
    monkeypatch.setattr("titan_exp.config.hydra.compose.CONF_DIR", conf)
    monkeypatch.delenv("TITAN_EXP_LOCAL")
    for header in ("", "# @package _global_\n"):
        (conf / "local" / "default.yaml").write_text(header + overlay)
        cfg = compose()
        assert (cfg.tracking.wandb, cfg.paths.runs, cfg.training.steps) == (True, "/scratch", 7)
    cfg = compose(["tracking=jsonl", "experiment.name=mine", "+experiment=smoke"])
    assert (cfg.tracking.wandb, cfg.paths.runs, cfg.training.steps) == (False, "/scratch", 20)
    monkeypatch.setenv("TITAN_EXP_LOCAL", "none")
    assert compose().paths.runs == "runs"


def comments() -> list[tuple[str, str]]:
    """Every comment of the shipped YAML files, less the conditions on which a file is used."""
    found = []
    for folder, file in FILES:
        for line in (folder / file).read_text().splitlines():
            _, mark, comment = line.partition("#")
            if mark:
                found.append((file.as_posix(), comment.strip()))
    return found


def examples() -> list[tuple[str, ...]]:
    """Overrides that comments tell the reader to type, those of one comment together."""
    groups = "|".join([*GROUPS, "paths"])
    pattern = re.compile(rf"(?<![\w./])\+?(?:{groups})(?:\.\w+)*=(?:'[^']*'|[^\s,;)`]+)")
    return [tuple(found) for _, comment in comments() if (found := pattern.findall(comment))]


def test_every_comment_gives_examples_that_compose():
    assert len(examples()) > 80
    troubles = []
    for typed in dict.fromkeys(examples()):
        overrides = [word for text in typed for word in shlex.split(text)]
        try:
            experiment(*overrides)
        except (UserError, HydraException) as error:
            troubles.append((overrides, str(error)))
    assert troubles == []


def test_every_key_is_set_somewhere_and_has_a_comment_with_its_name():
    text = "\n".join(comment for _, comment in comments())
    documented = set(re.findall(r"(?<![\w./])\+?([a-z_]+(?:\.[a-z_0-9]+)+)=", text)) | set(GROUPS)
    documented |= {key.rpartition(".")[0] for key in documented}
    # The reference has those of extensions in groups of the core.
    added = {f"{group}.{key}" for group in GROUPS if (CONF_DIR / group).is_dir() for key in added_keys(group)}
    assert [key for key in keys() if key not in documented | added] == []


def test_every_yaml_key_stands_below_a_comment_or_changes_one_that_does():
    commented: set[tuple[str, str]] = set()
    bare: list[tuple[str, str, str]] = []
    for folder, relative in FILES:
        path = folder / relative
        lines = path.read_text().splitlines()
        assert lines[0].startswith("#"), f"{relative} does not begin by saying what it is"
        for dotted, line in key_lines(path):
            whole = relative.parts[0] in ("config.yaml", "experiment")
            group = dotted.split(".")[0] if whole else relative.parts[0]
            inside = dotted.split(".", 1)[1:] if whole else [dotted]
            if dotted == "defaults":
                continue
            place = (group, inside[0] if inside else "")
            if lines[line - 1].strip().startswith("#"):
                commented.add(place)
            else:
                bare.append((relative.as_posix(), *place))
    unexplained = [(file, group, key) for file, group, key in bare if key and (group, key) not in commented]
    # Keys written in one line after a comment share it.
    assert [entry for entry in unexplained if entry[1] != "hydra"] == []


def key_lines(path: Path) -> list[tuple[str, int]]:
    """Every key of a file, dotted, with the place of its line."""

    def walk(node: yaml.Node, prefix: str) -> list[tuple[str, int]]:
        found = []
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                found.append((f"{prefix}{key.value}", key.start_mark.line))
                found += walk(value, f"{prefix}{key.value}.")
        return found

    return walk(yaml.compose(path.read_text()) or yaml.MappingNode("", []), "")
