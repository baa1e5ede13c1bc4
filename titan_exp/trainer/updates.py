"""Parts that change weights or routers after the optimizer's step. The planner runs them, too."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from titan_exp.config.groups.training import TrainingConfig
from titan_exp.optim.grad_clip import AVERAGE_NORM, GradientClipper, NormClipper
from titan_exp.optim.weight_average import AVERAGE, WeightAverage
from titan_exp.parallel.qk_clip import QKClip
from titan_exp.tracking.logging import get_logger
from titan_exp.trainer.experts import ExpertLoad
from titan_exp.trainer.part import Part, Phase, Update


class Acting(Part):
    """Built-in part that draws no random numbers and leaves training modes as they are."""

    phase: ClassVar[Phase] = Phase.ACT
    isolated: ClassVar[bool] = False


class LogitClipping(Acting):
    """QK-Clip: limits attention logits by scaling queries and keys."""

    name = "qk_clip"

    def __init__(self, clip: QKClip) -> None:
        self._clip = clip

    @property
    def maxima(self) -> Sequence[Tensor]:  # type: ignore[override]
        """Largest logits of the step, by layer."""
        return self._clip.largest

    def on_update(self, update: Update) -> None:
        """Scale the query and key weights."""
        self._clip.clip()


class ClippingState(Acting):
    """Averages of gradient norms, kept as optimizer state, and the step at which they began."""

    name = "clipping"
    keeps = (AVERAGE_NORM,)

    def __init__(self, clipper: GradientClipper | NormClipper) -> None:
        self._clipper = clipper

    def state(self) -> dict[str, Any]:
        """Step at which the averages began."""
        return self._clipper.state()

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Continue from the averages in the optimizer's state."""
        self._clipper.restore(state, step)

    def on_update(self, update: Update) -> None:
        """Add the averages of parameters that the optimizer's state does not have yet."""
        self._clipper.keep()


class Averaging(Acting):
    """Average of the weights over steps."""

    name = AVERAGE
    keeps = (AVERAGE,)

    def __init__(self, average: WeightAverage) -> None:
        self._average = average

    def state(self) -> dict[str, Any]:
        """Kind of the average and its number of steps; the average itself is in the optimizer's state."""
        return self._average.progress()

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Continue the average of a checkpoint, or log from where a shorter one begins."""
        shorter = self._average.restore(state, step)
        if shorter is not None:
            get_logger().warning(shorter)

    def on_update(self, update: Update) -> None:
        """Add the weights after this step to the average."""
        self._average.update(update.step)


class Routing(Acting):
    """Load balance of experts: each router learns the load of the global batch. The biases of routers are not weights,
    which other parts keep in another dtype."""

    name = "routing"
    phase = Phase.OBSERVE

    def __init__(self, load: ExpertLoad, training: TrainingConfig) -> None:
        self._load, self._training = load, training
        self.shares = 1
        """Number of equal parts of a batch, each of which is counted and balanced alone."""

    @property
    def sums(self) -> Sequence[Tensor]:  # type: ignore[override]
        """Token counts and losses of experts in the step."""
        return self._load.step_sums

    def before(self, step: int) -> None:
        """Tell routers the size of the next batch."""
        self._load.set_sequences(self._training.batch_size_at(step) // self.shares)

    def on_update(self, update: Update) -> None:
        """Update the biases from the token counts of the step."""
        self._load.update()

    def refused(self, step: int) -> None:
        """Forget the token counts of a step that is repeated."""
        self._load.discard()
