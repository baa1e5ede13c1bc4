"""Compositions of the tests' fast Hydra are those of Hydra alone."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, base
from omegaconf.base import Metadata
from omegaconf.grammar_parser import parse

from tests import fast_hydra
from titan_exp.config.extension import CONF_DIR, CONFIG_NAME
from titan_exp.config.hydra.compose import HYDRA_VERSION, register_resolvers

INTERPOLATED = "defaults:\n  - llama_debug\n  - /optimizer@chosen: ${optimizer}\n  - _self_\n"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model=qwen3_moe_debug", "optimizer=muon", "+experiment=smoke", "training.steps=1e3"],
        ["model=chosen", "optimizer=lion"],
        ["tracking=[jsonl,console]"],
        ["cluster=slurm_h100", "~weight_average", "+optimizer.groups.head={match:[head]}"],
        ["model=chosen", "optimizer=nope"],
    ],
    ids=" ".join,
)
def test_compositions_are_those_of_hydra_alone(overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "conf"
    shutil.copytree(CONF_DIR, folder)
    (folder / "model" / "chosen.yaml").write_text(INTERPOLATED)
    register_resolvers()
    found = [composed(folder, overrides) for _ in range(2)]
    load: Any = OmegaConf.load
    choices: Any = defaults_list._create_interpolation_map
    monkeypatch.setattr(OmegaConf, "load", staticmethod(load.load))
    monkeypatch.setattr(defaults_list, "_create_interpolation_map", choices.index)
    monkeypatch.setattr(ConfigRepository, "load_config", fast_hydra.LOAD)
    monkeypatch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", fast_hydra.MERGE)
    monkeypatch.setattr(CachingConfigRepository, "__init__", fast_hydra.CACHE)
    monkeypatch.setattr(OverridesParser, "parse_rule", fast_hydra.PARSE)
    monkeypatch.setattr(base, "parse", parse)
    monkeypatch.delattr(Metadata, "__deepcopy__")
    assert found == [composed(folder, overrides)] * 2


def composed(folder: Path, overrides: list[str]) -> str:
    """The composed YAML with Hydra's own node, or the error."""
    with initialize_config_dir(str(folder), **HYDRA_VERSION):
        try:
            return OmegaConf.to_yaml(compose(CONFIG_NAME, overrides, return_hydra_config=True))
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def test_a_changed_option_is_composed_again(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("defaults: [group: one, _self_]\nb: ${group.a}")
    (tmp_path / "group").mkdir()
    for value in (1, 10):
        (tmp_path / "group" / "one.yaml").write_text(f"a: {value}")
        for _ in range(2):
            with initialize_config_dir(str(tmp_path), **HYDRA_VERSION):
                found = compose(CONFIG_NAME)
            assert found == {"group": {"a": value}, "b": value}
            found.group.a = 5


def test_a_changed_file_is_read_again(tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_text("a: 1")
    first = OmegaConf.load(path)
    first.a = 5
    assert OmegaConf.load(path).a == 1
    path.write_text("a: 10")
    assert OmegaConf.load(path).a == 10


def test_a_copy_has_flags_and_caches_of_its_own():
    config = OmegaConf.create({"a": {"b": 1}})
    OmegaConf.set_readonly(config, True)
    copied: DictConfig = copy.deepcopy(config)
    OmegaConf.set_readonly(copied, False)
    copied._metadata.resolver_cache["now"]["x"] = 1
    assert OmegaConf.is_readonly(config)
    assert not config._metadata.resolver_cache
    copied.a.b = 2
    assert config.a.b == 1
