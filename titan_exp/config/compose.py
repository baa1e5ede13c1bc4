"""From overrides to a composed configuration, outside the command line: what tests, plans and other rooms call."""

from collections.abc import Sequence
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig

from titan_exp.config.resolvers import register_resolvers

_PACKAGE = Path(__file__).resolve().parents[1]

CONF_DIR = next(folder for folder in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if folder.is_dir())
"""The folder of the groups' YAML: inside an installed package, beside the package in a checkout."""

CONFIG_NAME = "config"
"""The YAML file that lists the groups."""


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """Compose the configuration as `titan-exp train` does with these overrides, without Hydra's own node.

    Raises:
        HydraException: an override names no key or no option.
    """
    register_resolvers()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return hydra_compose(CONFIG_NAME, list(overrides))
