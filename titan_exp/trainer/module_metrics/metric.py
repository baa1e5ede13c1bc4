"""Module metric: an observer of forward passes that `tracking.metrics` switches on, wherever it fits a model. A
built-in metric is a file of this folder with a class of the same name (`max_logit`, `MaxLogit`); yours is a class,
given by its import path. It reports like any module (see `MetricReducer`), so rows, sinks, `status` and `compare` know
its numbers."""

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from titan_exp.config.errors.user_error import UserError, Violation, listed
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.component import import_dotted
from titan_exp.config.schema.foreign_code import metric_names
from titan_exp.ops.autograd import is_recomputing
from titan_exp.parallel.mesh import Mesh
from titan_exp.trainer.objective import Reduction
from titan_exp.trainer.train_state import TrainState

KEY = "tracking.metrics"


class ModuleMetric(nn.Module, ABC):
    """Metric of one module over the tokens of a step, logged as `model/NAME/PATH` and, over all its modules, as
    `model/NAME`. It sees forward passes in training, recomputation excluded, and keeps no gradient."""

    name: ClassVar[str]
    """Name in rows."""
    reduction: ClassVar[Reduction] = "max"
    """Reduction over micro-batches, ranks and modules."""
    compiles: ClassVar[bool] = False
    """True if `torch.compile` may trace it without changing how other operators are compiled."""
    needs: ClassVar[str] = ""
    """Requirement that a model fails if it has no such module, for the error message."""

    def __init__(self, path: str, device: torch.device) -> None:
        super().__init__()
        self.metric_reductions = dict.fromkeys((self.name, f"{self.name}/{path}"), self.reduction)
        start = {"max": -math.inf, "sum": 0.0, "mean": [0.0, 0.0]}[self.reduction]
        self._start = self._found = torch.tensor(start, device=device)  # no buffers, which a checkpoint would hold

    @classmethod
    @abstractmethod
    def observes(cls, path: str, module: nn.Module) -> bool:
        """True for a module that the metric observes; `path` is its name in the whole model."""

    @classmethod
    def attach(cls, path: str, module: nn.Module, mesh: Mesh) -> None:
        """Make a module report this metric."""
        metric = cls(path, mesh.device)
        module.add_module(f"metric_{cls.name}", metric)
        module.register_forward_hook(metric._see)

    @abstractmethod
    def value(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Tensor:
        """Value for one micro-batch on this rank: a scalar, or for a `mean` a tensor [2] of sum and count."""

    def metrics(self) -> dict[str, Tensor]:
        """Value of the step so far, by name."""
        return dict.fromkeys(self.metric_reductions, self._found)

    def reset_metrics(self) -> None:
        """Reset the sums for the next step."""
        self._found = self._start

    def _see(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if torch.is_grad_enabled() and not is_recomputing():
            with torch.no_grad():
                value = self.value(module, inputs, output).to(self._start)
                self._found = torch.maximum(self._found, value) if self.reduction == "max" else self._found + value


def chosen_metrics(experiment: Experiment, model: nn.Module) -> list[type[ModuleMetric]]:
    """Metrics of a run. Raises UserError for one that cannot be imported or compiled, or does not fit the model."""
    kinds, found, config = dict[str, Any](), list[Violation](), experiment.compile
    for path in experiment.tracking.metrics:
        own = "".join(word.capitalize() for word in path.split("_"))
        built_in = f"titan_exp.trainer.module_metrics.{path}.{own}"
        kinds[path] = import_dotted(built_in if path in metric_names() else path, KEY)
    for path, kind in kinds.items():
        if not (isinstance(kind, type) and issubclass(kind, ModuleMetric)):
            remedy = f"write class {path.rpartition('.')[2]}(ModuleMetric), and import ModuleMetric from {__name__}"
            found.append(Violation(KEY, path, "this class does not extend ModuleMetric", remedy))
        elif missing := [word for word in ("name", "observes", "value") if not _defines(kind, word)]:
            found.append(Violation(KEY, path, f"the class defines no {listed(missing, 'and no')}", "define it there"))
        elif config.cuda_graphs:
            reason = "a captured pass (compile.cuda_graphs=true) calls no metric"
            found.append(Violation(KEY, path, reason, "compile.cuda_graphs=false"))
        elif config.enabled and not kind.compiles:
            reason = f"compiled code would contain {kind.__name__}, and might round differently"
            found.append(Violation(KEY, path, reason, "compile=none"))
        elif not any(kind.observes(name, module) for name, module in model.named_modules()):
            others = [other for other in experiment.tracking.metrics if other != path]
            reason = f"this metric observes no module of {experiment.model.name}{kind.needs and f': {kind.needs}'}"
            found.append(Violation(KEY, path, reason, f"{KEY}=[{','.join(others)}]"))
    names = [kind.name for kind in kinds.values()] if not found else []
    if len({*names}) < len(names):
        found.append(Violation(KEY, ", ".join(names), "two metrics have one name", "give one of them another `name`"))
    if found:
        raise UserError("This run cannot start.", found)
    return list(kinds.values())


def observe_modules(experiment: Experiment, state: TrainState) -> None:
    """Attach the metrics of a run to the modules of this rank, and to the whole model, whose names all ranks know."""
    for kind in chosen_metrics(experiment, state.built.module):
        modules = [named for model in (state.built.module, *state.model.parts) for named in model.named_modules()]
        for path, module in {id(module): (path, module) for path, module in modules}.values():
            if kind.observes(path, module):
                kind.attach(path, module, state.mesh)


def _defines(kind: type[ModuleMetric], word: str) -> bool:
    """True if a metric defines a required member; one that attaches another module needs no `value`."""
    attaches = kind.attach.__func__ is not ModuleMetric.attach.__func__  # type: ignore[attr-defined]  # of a method
    return hasattr(kind, word) and (word not in kind.__abstractmethods__ or (word == "value" and attaches))
