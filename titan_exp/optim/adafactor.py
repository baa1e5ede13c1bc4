"""Adafactor (Shazeer and Stern 2018): a second moment kept as row and column means, no momentum."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Interval

from titan_exp.config.groups.optimizer import OptimizerConfig
from titan_exp.config.groups.types import PositiveFloat

if TYPE_CHECKING:
    import torch

    from titan_exp.optim.parameter_groups import NamedParameter


@dataclass(frozen=True, kw_only=True)
class Config(OptimizerConfig):
    """Fields of Adafactor; `lr` is relative to the root mean square of a matrix, as in torch's."""

    beta2_decay: Annotated[float, Interval(lt=0)]
    """Exponent of the step: the second moment forgets at the rate 1 - step ** beta2_decay.
    E.g. `optimizer=adafactor optimizer.beta2_decay=-0.5`."""
    eps: PositiveFloat
    """Smallest root of a second moment. E.g. `optimizer=adafactor optimizer.eps=1e-8`."""
    min_rms: PositiveFloat
    """Smallest root mean square of a matrix that the learning rate is relative to.
    E.g. `optimizer=adafactor optimizer.min_rms=1e-2`."""
    clip_threshold: PositiveFloat
    """Largest root mean square of an update, before the learning rate.
    E.g. `optimizer=adafactor optimizer.clip_threshold=2.0`."""

    @property
    def sends_messages(self) -> bool:
        """True: means are over whole rows and columns."""
        return True

    @property
    def max_state(self) -> float | None:
        """A second moment in vectors; less in matrices."""
        return 2


def build(parameters: Sequence["NamedParameter"], config: Config) -> "torch.optim.Optimizer":
    """Build Adafactor."""
    from titan_exp.optim.parameter_groups import parameter_groups
    from titan_exp.optim.updates.adafactor import Adafactor

    return Adafactor(parameter_groups(parameters, config), config)
