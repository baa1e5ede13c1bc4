"""Exchange between the worlds of a run, and memory beside its steps, as the planner counts them. Imports no torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan_exp.config.extension import loaded
from titan_exp.config.groups.experiment import Experiment
from titan_exp.plan.cuda.devices import Device

if TYPE_CHECKING:
    from titan_exp.plan.predict import Plan
    from titan_exp.plan.trace.fake_world import FakeRank
    from titan_exp.plan.trace.trace_step import Trace


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

    def beside(self, rank: "FakeRank") -> Sequence[Beside]:
        """What it does in the phase."""
        return ()

    def traced_on_cpu(self, trace: "Trace") -> "Trace":
        """Trace of a rank on a CPU, with a peak within the exchange."""
        return trace

    def lines(self, plan: "Plan") -> Iterator[str]:
        """Lines of a plan about it."""
        yield from ()

    def values(self, plan: "Plan") -> dict[str, Any]:
        """Values of a plan about it, for its JSON."""
        return {}


def exchange_of(experiment: Experiment) -> Exchange:
    """Exchange of a run: that of the extension whose run it is."""
    found = (exchange(experiment) for exchange in loaded("exchange"))
    return next(filter(None, found), Exchange(experiment))
