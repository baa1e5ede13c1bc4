"""Any `torch.optim.Optimizer` class by import path, torch's or yours."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_exp.config.groups.optimizer import AdamWConfig
from titan_exp.config.schema.component import Call, import_callable

if TYPE_CHECKING:
    import torch

    from titan_exp.optim.parameter_groups import NamedParameter


@dataclass(frozen=True, kw_only=True)
class Config(AdamWConfig):
    """Fields of AdamW, so that an override of `optimizer.name` alone is valid. The class gets `lr`, the weight decay of
    each parameter group, and `options` as keyword arguments."""

    @property
    def max_state(self) -> float | None:
        """Three numbers for torch's optimizers except LBFGS; unknown for yours."""
        return 3 if self.name.startswith("torch.optim.") and not self.name.endswith("LBFGS") else None

    @property
    def is_scale_invariant(self) -> bool:
        """False, because the update of an arbitrary optimizer is unknown."""
        return False


def build(parameters: Sequence["NamedParameter"], config: Config) -> "torch.optim.Optimizer":
    """Call the class as `Class(groups, lr=lr, **options)`; every parameter group has a key `role`."""
    from titan_exp.optim.parameter_groups import parameter_groups

    groups = parameter_groups(parameters, config, by_role=True)
    return optimizer_class(config)(groups, lr=config.lr, **config.options)


def optimizer_class(config: Config) -> Callable[..., "torch.optim.Optimizer"]:
    """Import the class. Raises UserError if it cannot be imported, or takes other arguments."""
    call = Call(("params",), ("lr",), "optimizer.options", config.options)
    return import_callable(config.name, "optimizer.name", call)
