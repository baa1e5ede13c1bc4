"""The parts of a run in their order, with the reason for each position. Phases come first (`trainer/part.py`)."""

import gc
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from titan_exp.checkpoint.formats.sharded_hf_export import ShardedHFExporter
from titan_exp.config.errors.user_error import Outcome, UserError, Violation
from titan_exp.config.extension import asked_by, load, loaded
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.training import PartConfig
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.component import Call, import_callable
from titan_exp.config.schema.data_sets import validation_sets
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
from titan_exp.trainer.updates import Averaging, ClippingState, Evaluation, LogitClipping, Routing


class GarbageCollection(Part):
    """Garbage collection: collects only every `every` steps."""

    name = "garbage_collection"
    isolated = False  # it runs no module

    def __init__(self, every: int) -> None:
        self._every = every

    def begin(self, run: Run) -> None:
        gc.disable()
        gc.collect(1)

    def after(self, step: Step) -> None:
        if step.step % self._every == 0:
            # Generation 1 is cheap, and garbage of a training loop is young.
            gc.collect(1)

    def close(self) -> None:
        gc.enable()


def acting_parts(experiment: Experiment, state: TrainState) -> Iterator[Part]:
    """Parts that follow the optimizer's update, which the planner runs, too."""
    # Module metrics are not parts: the report, which is built later, finds the modules that have metrics.
    observe_modules(experiment, state)
    # First, so that all others see the scaled weights.
    if (limit := experiment.optimizer.max_logit) is not None:
        yield LogitClipping(QKClip(state.built.module, [*state.model.parts], limit, state.mesh))
    # Anywhere after the optimizer, which creates its own state where it finds none.
    yield ClippingState(state.clipper)
    # The average is of the weights with which the next step begins.
    if state.average is not None:
        yield Averaging(state.average)
    # Parts of extensions, too, see the weights with which the next step begins.
    for updates in loaded("updates", experiment):
        yield from updates(experiment, state)
    # First of those that observe, since others may read the load.
    if state.model.load is not None:
        yield Routing(state.model.load, experiment.training)


def all_parts(experiment: Experiment, folder: RunFolder, state: TrainState, layout: ResolvedLayout) -> Iterator[Part]:
    """All parts of a run. Raises UserError if the data of one cannot be loaded."""
    training, profiling, mesh = experiment.training, experiment.profiling, state.mesh
    yield from acting_parts(experiment, state)
    # Instruments come first: they measure the step, not what follows it.
    if profiling.enabled:
        yield ProfileWindow(profiling, folder.traces, mesh.device)
    if profiling.memory_step is not None:
        yield MemorySnapshot(profiling.memory_step, folder.traces, state)
    # Its numbers join the row that the phases after it see.
    if experiment.evaluation.enabled:
        yield _evaluation(experiment, state, layout)
    # After all that leaves garbage.
    if training.gc_every:
        yield GarbageCollection(training.gc_every)
    # The row that shows the divergence is written, the checkpoint is not.
    if training.stop_on_nonfinite:
        yield FiniteLoss()
    # It comes before parts of extensions, since others wait for it.
    yield Export(experiment, folder, state)
    for extension in asked_by(experiment):
        for path in extension.parts.values():
            yield from load(path)(experiment, state)
    # After all steps, with a note of the whole run.
    yield RooflineNote()
    # Your parts are the last of their phases, so they see the effects of the others.
    for label, config in training.parts.items():
        yield build_part(label, config)


def _evaluation(experiment: Experiment, state: TrainState, layout: ResolvedLayout) -> Evaluation:
    shard: dict[str, Any] = {"dp_rank": state.mesh.dp_rank, "dp_degree": state.mesh.dp_degree}
    shard["micro_batch_size"] = layout.micro_batch_size
    loader = ValidationLoader(experiment.data, experiment.training.seq_len, **shard)
    sets = {}
    for name, found in validation_sets(experiment).items():
        every = not experiment.evaluation.sets[name].holds_out
        sets[name] = ValidationLoader(found.data, found.training.seq_len, **shard, all_documents=every)
    return Evaluation(state, loader, partial(experiment.evaluation.due, experiment.training), sets)


def build_part(label: str, config: PartConfig) -> Part:
    """Build one of your parts. Raises UserError if its class cannot be imported, or is no `Part`."""
    key = f"training.parts.{label}"
    kind = import_callable(config.name, f"{key}.name", Call((), (), f"{key}.options", config.options))
    reason = remedy = ""
    if not (isinstance(kind, type) and issubclass(kind, Part)):
        reason, own = "this class does not extend Part", config.name.rpartition(".")[2]
        remedy = f"write class {own}(Part), and import Part from titan_exp.trainer.part"
    elif not kind.fatal and kind.phase is not Phase.REPORT:
        reason = "training can only go on after the error of a part of phase REPORT"
        remedy = "write phase = Phase.REPORT, or fatal = True"
    if reason:
        raise UserError("This run cannot start.", [Violation(f"{key}.name", config.name, reason, remedy)])
    part = kind(**revealed(config.options, f"{key}.options"))
    part.name, part.prefix = key, f"{label}/"  # built-in parts have no name like a key
    return part


class Diverged(Outcome):
    """Loss or gradients are no longer finite."""


class FiniteLoss(Part):
    """Ends the run as failed if the loss or the gradient norm of a logged step is not finite."""

    name = "finite_loss"
    phase = Phase.SAVE
    isolated = False  # it reads numbers

    def begin(self, run: Run) -> None:
        self._experiment, self._folder = run.experiment, run.folder

    def after(self, step: Step) -> None:
        for row in step.rows:
            loss, grad_norm = row.values["loss"], row.values["grad_norm"]
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                what = f"at step {step.step} the loss is {loss} and the gradient norm is {grad_norm}"
                raise Diverged("\n".join([what, *_after_divergence(self._experiment, self._folder)]))


def _after_divergence(experiment: Experiment, folder: RunFolder) -> Iterator[str]:
    """Lines about what is left of a diverged run, and what to try: the same command would diverge again."""
    training, schedule = experiment.training, experiment.lr_schedule
    yield f"  No checkpoint has these weights. To read the log, type titan-exp logs {folder.path}"
    yield "  The same run would diverge again. Try one of these:"
    if (rate := getattr(experiment.optimizer, "lr", None)) is not None:
        yield f"    optimizer.lr={rate / 3:.3g}, or less"
    longer = max(2 * schedule.warmup_steps, training.steps // 10)
    if schedule.warmup_steps < longer <= training.steps - schedule.decay_steps:
        yield f"    lr_schedule.warmup_steps={longer}"
    if training.max_grad_norm is None or training.max_grad_norm > 1:
        yield "    training.max_grad_norm=1.0"
    if experiment.grad_clip.mode != "adagc":
        yield "    grad_clip=adagc, which limits a spike of any one parameter"
    yield "    training.stop_on_nonfinite=false, to train on regardless"


class Export(Part):
    """Exports the weights in the Hugging Face format."""

    name = "export"
    phase = Phase.REPORT
    isolated = False  # it copies weights

    def __init__(self, experiment: Experiment, folder: RunFolder, state: TrainState) -> None:
        config = experiment.checkpoint
        self._exporter = ShardedHFExporter(config, experiment.model, experiment.data, folder.export, state.mesh)
        self._state = state

    def begin(self, run: Run) -> None:
        self._report = run.report

    def due(self, step: int, *, last: bool) -> bool:
        """True if an export follows this step; the last one waits for the last checkpoint."""
        return self._exporter.due(step) and not last

    def after(self, step: Step) -> None:
        if self._report.writes and self.due(step.step, last=step.last):
            self._exporter.write(step.step, self._state.model.parts)

    def finish(self, step: Step) -> None:
        if step.last and not self._exporter.write(step.step, self._state.model.parts):
            raise UserError(
                f"We could not export the weights after step {step.step} (the log says why). Free disk space and start "
                "the run again: it then exports them."
            )
