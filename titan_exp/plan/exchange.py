"""Exchange between the worlds of a run, and memory beside its steps, as the planner counts them. Imports no torch."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan_exp.config.extension import loaded
from titan_exp.config.groups.experiment import Experiment
from titan_exp.plan.cuda.devices import Device

if TYPE_CHECKING:
    from titan_exp.plan.trace.memory_tracker import Moment
    from titan_exp.trainer.part import Part
    from titan_exp.trainer.train_state import TrainState


@dataclass(frozen=True)
class Beside:
    """Work beside some steps of a run, which is traced in memory, at no costs of a step."""

    category: str
    """Category of what it allocates."""
    phase: str
    """Name of its phase in a trace."""
    after: Sequence[Callable[[], object]]
    """What it does after the traced step."""
    before: Sequence[Callable[[], object]] = ()
    """What it does before that, after the first step."""


class Exchange:
    """Exchange between the worlds of a run. A run of one world has none; an extension's class overrides the rest."""

    phase = ""
    """Phase of what follows a step; empty if that needs no memory. It is not linear in the layers."""
    seconds_name = ""
    """Name of `seconds` in a plan."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment

    @property
    def title(self) -> str:
        """Words before the devices of a world in the title of a plan."""
        return ""

    @property
    def inputs(self) -> dict[str, Any]:
        """JSON values that affect a prediction, beside those of the core's groups."""
        return {}

    def most_numbers(self, state: float) -> float:
        """Upper bound of the numbers per parameter beside the `state` of the optimizer."""
        return 0

    def saved_numbers(self, state: float) -> float:
        """Numbers of a checkpoint per parameter, of which the optimizer keeps `state`."""
        return 1 + state

    def seconds(self, weights: float, device: Device, step: float) -> float:
        """Seconds of a step that a rank with so many bytes of fp32 `weights` waits for other worlds; the `step` takes
        so many seconds without."""
        return 0.0

    def beside(self, state: "TrainState", parts: "Iterable[Part]") -> Sequence[Beside]:
        """What it does in the phase, on a rank with parts that follow its update."""
        return ()

    def peak_on_cpu(self, peak: "Moment", persistent: Mapping[str, int], gradients: int) -> "Moment":
        """Peak of a rank on a CPU, which may be within the exchange. Its step has the given peak, `persistent` bytes by
        category before and after it, and bytes of reduced gradients."""
        return peak

    def lines(self, weights: Mapping[int, int]) -> Iterator[str]:
        """Lines of a plan about it; `weights` are bytes of parameters by predicted pipeline rank."""
        yield from ()

    def values(self, weights: Mapping[int, int]) -> dict[str, Any]:
        """Values of a plan about it, for its JSON; `weights` as in `lines`."""
        return {}


def exchange_of(experiment: Experiment) -> Exchange:
    """Exchange of a run: that of the extension whose run it is."""
    found = (exchange(experiment) for exchange in loaded("exchange"))
    return next(filter(None, found), Exchange(experiment))
