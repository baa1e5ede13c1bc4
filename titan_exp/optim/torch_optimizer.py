"""A `torch.optim.Optimizer` class by import path, torch's or the user's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_exp.config.groups.optimizer import AdamWConfig
from titan_exp.config.schema.import_path import import_dotted

if TYPE_CHECKING:
    import torch

    from titan_exp.optim.parameter_groups import NamedParameter


@dataclass(frozen=True, kw_only=True)
class Config(AdamWConfig):
    """Fields of AdamW, so that `optimizer.name` alone changes the class; the class takes `options`."""

    @property
    def is_homogeneous(self) -> bool:
        """False: the class is not known."""
        return False


def build(parameters: Sequence["NamedParameter"], config: Config) -> "torch.optim.Optimizer":
    """Call the class as `Class(groups, lr=lr, **options)`; every parameter group has its `role`."""
    from titan_exp.optim.parameter_groups import parameter_groups

    groups = parameter_groups(parameters, config, by_role=True)
    return import_dotted(config.name, "optimizer.name")(groups, lr=config.lr, **config.options)
