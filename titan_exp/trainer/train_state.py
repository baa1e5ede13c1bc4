"""Train state: mesh, parallel model, objective, optimizer. Trainer and planner share it, so predictions match runs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.optimizer import AdamWConfig, OptimizerConfig
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.data.train_loader import TrainLoader
from titan_exp.models.spec.lookup import has_experts, model_spec, mtp_depth
from titan_exp.optim.grad_clip import GradientClipper, NormClipper
from titan_exp.optim.optimizer import HasGradientPoint, UpdatesComputeWeights, build_optimizer
from titan_exp.optim.parameter_groups import named_parameters
from titan_exp.optim.weight_average import WeightAverage
from titan_exp.parallel.compute_weights import ComputeWeights
from titan_exp.parallel.context_parallel.load_balance import sequence_cuts
from titan_exp.parallel.fsdp import free_gathered, uses_fsdp
from titan_exp.parallel.mesh import Mesh, build_mesh
from titan_exp.parallel.meta_init import computes_loss
from titan_exp.parallel.tensor_parallel.styles import vocab_shard
from titan_exp.tracking.logging import get_logger
from titan_exp.trainer.build_model import BuiltModel
from titan_exp.trainer.cuda_graphs import CudaRecorder, GraphedModel, Recorder
from titan_exp.trainer.experts import ExpertLoad
from titan_exp.trainer.forward_backward import EagerModel, Model, PipelineModel
from titan_exp.trainer.objective import build_objective


@dataclass(frozen=True)
class TrainState:
    """Objects that `train_step` works on, on one rank."""

    mesh: Mesh
    """Device mesh."""
    built: BuiltModel
    """Parallel model, with figures of the whole model."""
    model: Model
    """Model and objective behind the interface that `train_step` uses."""
    optimizer: torch.optim.Optimizer
    """Optimizer of this rank's parameters."""
    clipper: GradientClipper | NormClipper
    """Clips gradients."""
    quantize_weights: Callable[[], None]
    """Recomputes the quantized copies of the weights that a recipe keeps."""
    average: WeightAverage | None = None
    """Average of the weights."""

    @cached_property
    def gradient_point(self) -> HasGradientPoint | None:
        """The optimizer, if it computes gradients at a point other than the weights that it leaves."""
        return self.optimizer if isinstance(self.optimizer, HasGradientPoint) else None

    @cached_property
    def updates_compute_weights(self) -> bool:
        """True if the optimizer writes the compute weights itself."""
        return isinstance(self.optimizer, UpdatesComputeWeights)

    def refresh(self) -> None:
        """Recompute the copies of the weights in other dtypes; call it after every change of the parameters."""
        self.model.weights.refresh()
        self.quantize_weights()

    def moved(self) -> None:
        """Forget the weights that FSDP has gathered, then refresh; call it after a change between steps."""
        free_gathered(self.model.parts)
        self.refresh()


def assemble(
    experiment: Experiment,
    layout: ResolvedLayout,
    device: torch.device,
    *,
    fake_mode: AbstractContextManager[Any] | None = None,
    recorder: Recorder | None = None,
) -> TrainState:
    """Build mesh, model, objective and optimizer. In a `fake_mode`, parameters get memory but no values. The `recorder`
    captures CUDA graphs; by default, a `CudaRecorder`.

    Raises:
        UserError: an import path cannot be imported, or a named module does not exist.
    """
    spec = model_spec(experiment.model)
    cuts = sequence_cuts(spec, layout.parallelism, layout.training.seq_len)
    causal = spec is None or spec.is_causal
    mesh = build_mesh(layout.parallelism, device, experts=has_experts(experiment.model), cuts=cuts, causal=causal)
    built = BuiltModel(experiment, layout, mesh, fake_mode=fake_mode)
    shard = vocab_shard(mesh, experiment.model.vocab_size) if experiment.parallelism.loss_parallel else None
    chunk = layout.loss_chunk_tokens if computes_loss(built.module, spec) else None
    objective = build_objective(experiment.training, experiment.compile, shard, chunk, spec)
    parts = [built.module] if built.pipeline is None else [stage.module for stage in built.pipeline.stages]
    with fake_mode or nullcontext():
        weights = _compute_weights(parts, mesh, layout, experiment)
    model: Model
    if built.pipeline is not None:
        model = PipelineModel(built.pipeline, objective, mesh, weights)
    elif experiment.compile.cuda_graphs:
        model = GraphedModel(built.module, objective, mesh, weights, recorder or CudaRecorder(mesh.device))
    else:
        model = EagerModel(built.module, objective, mesh, weights)
    model.load = ExpertLoad(built.module, model.parts, experiment.training.global_batch_size, mesh)
    optimizer = build_optimizer(model.parts, experiment.optimizer, built.scales)
    if isinstance(optimizer, UpdatesComputeWeights):
        optimizer.set_compute_weights(weights.copies)
    _log_update(experiment.optimizer, optimizer, weights)
    quantize_weights = _quantized_weights(model, mesh, experiment)
    with fake_mode or nullcontext():
        clipper = _clipper(optimizer, model, mesh, experiment)
    average = None
    if experiment.weight_average.enabled:
        average = WeightAverage(optimizer, experiment.weight_average, steps=experiment.training.steps)
    state = TrainState(mesh, built, model, optimizer, clipper, quantize_weights, average)
    if average is not None:
        average.after_move = state.moved
    return state


def build_train_loader(experiment: Experiment, layout: ResolvedLayout, state: TrainState) -> TrainLoader:
    """Build the loader of this rank's micro-batches. Raises UserError if the data cannot be loaded."""
    prepare, seed = getattr(state.model.objective, "prepare", None), experiment.experiment.seed
    return TrainLoader(
        experiment.data,
        experiment.training,
        seed,
        dp_rank=state.mesh.dp_rank,
        dp_degree=state.mesh.dp_degree,
        micro_batch_size=layout.micro_batch_size,
        pin_memory=state.mesh.device.type == "cuda",
        mtp_depth=mtp_depth(experiment.model),
        prepare=None if prepare is None else partial(prepare, seed=seed),
    )


def _clipper(
    optimizer: torch.optim.Optimizer, model: Model, mesh: Mesh, experiment: Experiment
) -> GradientClipper | NormClipper:
    groups = experiment.optimizer.groups
    if experiment.grad_clip.mode == "norm" and all(group.max_grad_norm is None for group in groups.values()):
        return NormClipper(optimizer, model.parameters(), experiment.training.max_grad_norm)
    return GradientClipper(
        optimizer,
        named_parameters(model.parts),
        model.unique_parameters(),
        experiment.grad_clip,
        groups,
        max_norm=experiment.training.max_grad_norm,
        pp_group=mesh.pp_group,
    )


def _log_update(config: OptimizerConfig, optimizer: torch.optim.Optimizer, weights: ComputeWeights) -> None:
    kernel = f" ({config.implementation})" if isinstance(config, AdamWConfig) and config.name == "adamw" else ""
    copies = ""
    if weights.copies:
        by = "its update" if isinstance(optimizer, UpdatesComputeWeights) else "a cast after its update"
        copies = f". With one data rank and no shards it keeps bf16 weights beside the fp32 ones, written by {by}"
    get_logger().info("optimizer: %s%s%s", config.name, kernel, copies)


def _compute_weights(
    parts: Sequence[nn.Module], mesh: Mesh, layout: ResolvedLayout, experiment: Experiment
) -> ComputeWeights:
    training, parallelism = layout.training, layout.parallelism
    if training.mixed_precision != "bf16" or uses_fsdp(mesh, cpu_offload=parallelism.cpu_offload):
        return ComputeWeights()
    return ComputeWeights(
        parts,
        torch.bfloat16,
        fp32_modules=training.fp32_modules,
        # Copies of tied weights on two stages are summed in fp32 too.
        accumulate=training.accumulation_precision == "fp32"
        and (layout.gradient_accumulation > 1 or parallelism.pp > 1),
        fixed=experiment.compile.cuda_graphs,
        unread=_float8_modules(parts, experiment),
    )


def _float8_modules(parts: Sequence[nn.Module], experiment: Experiment) -> list[nn.Module]:
    if not experiment.quantization.recipe.startswith("float8"):
        return []
    from titan_exp.quantization.quantize import modules_with_float8_weights

    return modules_with_float8_weights(parts)


def _quantized_weights(model: Model, mesh: Mesh, experiment: Experiment) -> Callable[[], None]:
    """Return a function that recomputes kept float8 weights and precomputed scales; all ranks call it."""
    if experiment.quantization.recipe == "none":
        return lambda: None
    from titan_exp.quantization.quantize import Float8Weights, WeightScales

    dtype = torch.bfloat16 if experiment.training.mixed_precision == "bf16" else torch.float32
    scales, weights = WeightScales(model.parts, mesh.shard_groups, dtype), Float8Weights(model.parts, dtype)

    def refresh() -> None:
        scales.refresh()
        weights.refresh()

    return refresh
