"""The parts of a run, in their order, with the reason of each position. Phases come first (`trainer/part.py`)."""

import gc
import math
from collections.abc import Iterator
from typing import Any

from titan_exp.checkpoint.formats.sharded_hf_export import ShardedHFExporter
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.extension import load, loaded, provided
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.training import PartConfig
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.component import Call, import_callable
from titan_exp.config.secrets import revealed
from titan_exp.data.validation_loader import ValidationLoader
from titan_exp.parallel.qk_clip import QKClip
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.trainer.module_metrics.metric import observe_modules
from titan_exp.trainer.part import Part, Phase, Run, Step
from titan_exp.trainer.profiling.memory_snapshot import MemorySnapshot
from titan_exp.trainer.profiling.profiler import ProfileWindow
from titan_exp.trainer.profiling.roofline_note import RooflineNote
from titan_exp.trainer.train_state import TrainState
from titan_exp.trainer.updates import Averaging, ClippingState, LogitClipping, Routing
from titan_exp.trainer.validate import Evaluation


class GarbageCollection(Part):
    """Collects every `every` steps only."""

    name = "garbage_collection"
    isolated = False  # it runs nothing of a model's

    def __init__(self, every: int) -> None:
        self._every = every

    def begin(self, run: Run) -> None:
        """Disable automatic collection."""
        gc.disable()
        gc.collect(1)

    def after(self, step: Step) -> None:
        """Collect if due."""
        if step.step % self._every == 0:
            # Generation 1 is cheap, and garbage of a training loop is young.
            gc.collect(1)

    def close(self) -> None:
        """Enable automatic collection again."""
        gc.enable()


def acting_parts(experiment: Experiment, state: TrainState) -> Iterator[Part]:
    """Parts that follow the optimizer's update, which the planner runs, too."""
    # They are no parts: the report, which is built later, finds modules that report.
    observe_modules(experiment, state)
    # First, so that all others see the scaled weights.
    if (limit := experiment.optimizer.max_logit) is not None:
        yield LogitClipping(QKClip(state.built.module, [*state.model.parts], limit, state.mesh))
    # Anywhere after the optimizer, which creates its own state where it finds none.
    yield ClippingState(state.clipper)
    # Of the weights as the next step begins with them.
    if state.average is not None:
        yield Averaging(state.average)
    # Those of extensions see the weights as the next step begins with them, too.
    for updates in loaded("updates"):
        yield from updates(experiment, state)
    # First of those that observe, since others may read the load.
    if state.model.load is not None:
        yield Routing(state.model.load, experiment.training)


def all_parts(experiment: Experiment, folder: RunFolder, state: TrainState, layout: ResolvedLayout) -> Iterator[Part]:
    """All parts of a run.

    Raises:
        UserError: the data of one cannot be loaded.
    """
    training, profiling, mesh = experiment.training, experiment.profiling, state.mesh
    yield from acting_parts(experiment, state)
    # Instruments first: they measure the step, not what follows it.
    if profiling.enabled:
        yield ProfileWindow(profiling, folder.traces, mesh.device)
    if profiling.memory_step is not None:
        yield MemorySnapshot(profiling.memory_step, folder.traces, state)
    # Its numbers join the row that the phases after it see.
    if training.evaluate_every:
        shard: dict[str, Any] = {"dp_rank": mesh.dp_rank, "dp_degree": mesh.dp_degree}
        loader = ValidationLoader(experiment.data, training.seq_len, **shard, micro_batch_size=layout.micro_batch_size)
        yield Evaluation(state, loader, training.evaluate_every)
    # After all that leaves garbage.
    if training.gc_every:
        yield GarbageCollection(training.gc_every)
    # The row that shows it is written, the checkpoint is not.
    if training.stop_on_nonfinite:
        yield FiniteLoss()
    # Before those of extensions, since others wait for it.
    yield Export(experiment, folder, state)
    for path in provided("parts").values():
        yield from load(path)(experiment, state)
    # After all steps, with a note of the whole run.
    yield RooflineNote()
    # Yours are the last of their phases: they see what the others have done.
    for label, config in training.parts.items():
        yield build_part(label, config)


def build_part(label: str, config: PartConfig) -> Part:
    """Build a part of the user's.

    Raises:
        UserError: the class cannot be imported, is no `Part`, or takes other options.
    """
    key = f"training.parts.{label}"
    kind = import_callable(config.name, f"{key}.name", Call((), (), f"{key}.options", config.options))
    if not (isinstance(kind, type) and issubclass(kind, Part)):
        own = config.name.rpartition(".")[2]
        remedy = f"from titan_exp.trainer.part import Part; class {own}(Part): ..."
        raise UserError("This run cannot be started.", [Violation(f"{key}.name", config.name, "it is no Part", remedy)])
    if not kind.fatal and kind.phase is not Phase.REPORT:
        reason = "only a part of phase REPORT may go on after an error"
        remedy = "phase = Phase.REPORT, or fatal = True"
        raise UserError("This run cannot be started.", [Violation(f"{key}.name", config.name, reason, remedy)])
    part = kind(**revealed(config.options, f"{key}.options"))
    part.name, part.prefix = key, f"{label}/"  # no part of ours is called like a key
    return part


class Diverged(RuntimeError):
    """Loss or gradients are no longer finite."""


class FiniteLoss(Part):
    """Ends the run as failed if the loss or the gradient norm of a logged step is not finite."""

    name = "finite_loss"
    phase = Phase.SAVE
    isolated = False  # it reads numbers

    def after(self, step: Step) -> None:
        """Raise Diverged."""
        for row in step.rows:
            loss, grad_norm = row.values["loss"], row.values["grad_norm"]
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise Diverged(
                    f"step {step.step}: loss {loss}, gradient norm {grad_norm}. The last checkpoint is from before. "
                    "A lower optimizer.lr or a longer lr_schedule.warmup_steps may help; "
                    "training.stop_on_nonfinite=false trains on."
                )


class Export(Part):
    """Exports the weights in Hugging Face's format."""

    name = "export"
    phase = Phase.REPORT
    isolated = False  # it copies weights

    def __init__(self, experiment: Experiment, folder: RunFolder, state: TrainState) -> None:
        config = experiment.checkpoint
        self._exporter = ShardedHFExporter(config, experiment.model, experiment.data, folder.export, state.mesh)
        self._state = state

    def begin(self, run: Run) -> None:
        """One of several worlds exports."""
        self._report = run.report

    def due(self, step: int, *, last: bool) -> bool:
        """True if an export follows this step; the last one waits for the last checkpoint."""
        return self._exporter.due(step) and not last

    def after(self, step: Step) -> None:
        """Export if due."""
        if self._report.writes and self.due(step.step, last=step.last):
            self._exporter.write(step.step, self._state.model.parts)

    def finish(self, step: Step) -> None:
        """Export the last weights."""
        if step.last and not self._exporter.write(step.step, self._state.model.parts):
            raise UserError(
                f"The weights after step {step.step} could not be exported; see the log for the reason. Free disk "
                "space and start the run again: it then exports them."
            )
