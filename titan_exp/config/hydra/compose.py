"""Hydra composition from overrides, outside the command line."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import __version__, initialize_config_dir
from hydra import compose as hydra_compose
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from titan_exp.config.command_line.options import Arguments
from titan_exp.config.extension import CONF_DIR, CONFIG_NAME
from titan_exp.config.hydra.resolvers import register_resolvers

HYDRA_VERSION: dict[str, Any] = {"version_base": "1.3"} if __version__.startswith("1.3") else {}
"""Version argument of Hydra's entry points: required by 1.3, rejected by 1.4."""

OWN_FILE = [
    *(
        "hydra.run.dir=.",
        "hydra.sweep.dir=.",
        "hydra.sweep.subdir=.",
        "hydra.output_subdir=null",
        "hydra.job.chdir=false",
    ),
    *("hydra/job_logging=none", "hydra/hydra_logging=none", "hydra/sweeper=titan_exp"),
]
"""Hydra settings of `conf/config.yaml`, for other primary files (`--config-path`) such as a run's."""


def primary_file(arguments: Arguments) -> Path:
    """Primary configuration: the file of `--config-path` and `--config-name`, else `conf/config.yaml`."""
    folder = arguments.value_of("--config-path", "-cp") or CONF_DIR
    name = arguments.value_of("--config-name", "-cn") or CONFIG_NAME
    return Path(folder).absolute() / f"{name.removesuffix('.yaml')}.yaml"


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """Compose the configuration like `titan-exp train`, without Hydra's own node."""
    register_resolvers()
    with config_folder():
        return hydra_compose(CONFIG_NAME, [*default_overrides(), *overrides])


@contextmanager
def config_folder() -> Iterator[None]:
    """Initialize Hydra with `CONF_DIR`, also inside a verb that Hydra has started."""
    hydra = GlobalHydra.instance()
    before, hydra.hydra = hydra.hydra, None
    try:
        with initialize_config_dir(str(CONF_DIR), **HYDRA_VERSION):
            yield
    finally:
        GlobalHydra.instance().hydra = before  # leaving Hydra's context has replaced the instance


def default_overrides() -> list[str]:
    """Overrides from the environment: `TITAN_EXP_LOCAL=none` omits `conf/local/default.yaml`."""
    leave_out = os.environ.get("TITAN_EXP_LOCAL") == "none" and (CONF_DIR / "local").is_dir()
    return ["~local@_global_"] if leave_out else []
