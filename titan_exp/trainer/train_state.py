"""Train state: mesh, parallel model, objective, optimizer. Trainer and planner share it, so predictions match runs."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.optimizer import AdamWConfig, OptimizerConfig
from titan_exp.config.layout.pipeline_schedules import timeline
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.data.train_loader import TrainLoader
from titan_exp.models.build import build_model, choose_attention_backend, flops_per_token, init_specs, parameter_count
from titan_exp.models.parametrization.standard import scales_of
from titan_exp.models.spec.lookup import block_count, has_experts, model_spec, mtp_depth
from titan_exp.optim.grad_clip import GradientClipper, NormClipper
from titan_exp.optim.optimizer import HasGradientPoint, UpdatesComputeWeights, build_optimizer
from titan_exp.optim.parameter_groups import NamedParameter, freeze, hyperparameters, named_parameters
from titan_exp.optim.weight_average import WeightAverage
from titan_exp.parallel import meta_init
from titan_exp.parallel.apply import parallelize
from titan_exp.parallel.compute_weights import ComputeWeights
from titan_exp.parallel.context_parallel.load_balance import sequence_cuts
from titan_exp.parallel.fsdp import free_gathered, set_all_gather_format, uses_fsdp
from titan_exp.parallel.mesh import Mesh, build_mesh
from titan_exp.parallel.pipeline_runtime import Pipeline, build_pipeline, build_schedule
from titan_exp.parallel.tensor_parallel.styles import vocab_shard
from titan_exp.quantization import quantize
from titan_exp.tracking.display import format_count
from titan_exp.tracking.logging import get_logger
from titan_exp.trainer.experts import ExpertLoad
from titan_exp.trainer.forward_backward import CudaRecorder, EagerModel, GraphedModel, Model, PipelineModel, Recorder
from titan_exp.trainer.objective import build_objective


def has_groups(parameters: Sequence[NamedParameter], config: OptimizerConfig) -> bool:
    """True if parameters differ in more than the weight decay of vectors."""
    given = config.groups or config.lr_scales or config.weight_decays
    return bool(given) or any(named.scale != parameters[0].scale for named in parameters)


def parameter_table(parameters: Sequence[NamedParameter], config: OptimizerConfig) -> str:
    """Table of learning rate, weight decay and other settings, a row per group of parameters, also frozen ones."""
    rows: dict[tuple[str, ...], list[NamedParameter]] = defaultdict(list)
    for named in parameters:
        rows[_row(named, config)].append(named)
    table: list[tuple[str, ...]] = [("parameters", "role", "group", "lr", "weight decay", "also", "for example")]
    for row, found in rows.items():
        count = format_count(sum(named.parameter.numel() for named in found))
        table.append((count, *row, found[0].name))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table)
    return "\n".join(f"  {line.rstrip()}" for line in lines)


def _row(named: NamedParameter, config: OptimizerConfig) -> tuple[str, ...]:
    group = next((name for name, group in config.groups.items() if group.has(named.name, named.role)), "-")
    if not named.parameter.requires_grad:
        return named.role, group, "frozen", "-", ""
    options = hyperparameters(named, config)
    lr = config.lr * options.pop("lr_scale", 1.0)
    decay = options.pop("weight_decay")
    also = " ".join(
        f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}" for key, value in options.items()
    )
    if named.scale.init != 1:
        also = f"{also} initial weights x{named.scale.init:.3g}".strip()
    return named.role, group, f"{lr:.3g}", f"{decay:.3g}", also


class BuiltModel:
    """The parallel model on this rank, with the whole model's parameter count and FLOPs. Parameters have memory but no
    values until `init_weights` or a checkpoint fills them. Raises UserError as `assemble` does."""

    def __init__(
        self,
        experiment: Experiment,
        layout: ResolvedLayout,
        mesh: Mesh,
        *,
        fake_mode: AbstractContextManager[Any] | None = None,
    ) -> None:
        training, parallelism = experiment.training, experiment.parallelism
        backend = choose_attention_backend(
            experiment.model,
            mesh.device,
            bf16=training.mixed_precision == "bf16",
            seq_len=training.seq_len,
            documents=experiment.data.document_mask,
            parts=parallelism.cp > 1 and parallelism.cp_method != "ulysses",
            deterministic=training.deterministic,
        )
        self._experiment, self._layout, self._mesh, self._fake_mode = experiment, layout, mesh, fake_mode
        self._build = build = partial(
            build_model, experiment.model, seq_len=training.seq_len, attention_backend=backend
        )
        with torch.device("meta"):
            model = build()
        self.scales = scales_of(experiment.parametrization, experiment.model)
        """Scales that the parametrization gives to parameters, by full name."""
        self.parameters = parameter_count(model)
        self.flops_per_token = flops_per_token(model, experiment.training.seq_len)
        meta_init.require_modules(model, experiment.training.fp32_modules)
        freeze(model, experiment.optimizer)
        parameters = named_parameters([model], self.scales, frozen=True)
        recipe = quantize.describe(
            model, experiment.quantization, layers=block_count(experiment.model), device=mesh.device
        )
        self.module: nn.Module = model
        """The whole model; on the meta device under pipeline parallelism."""
        self.pipeline: Pipeline | None = None
        """This rank's stages under pipeline parallelism."""
        self._init: list[Callable[[Callable[[str], bool]], None]] = []
        facts = (experiment.model.name, f"{self.parameters:,}", backend, mesh.device.type)
        get_logger().info("%s: %s parameters, attention by %s on %s", *facts)
        if experiment.compile.compiles("blocks") and mesh.device.type == "cuda":
            get_logger().info("matmuls of compiled blocks: %s", _gemm_selection(experiment, layout.world_size))
        if has_groups(parameters, experiment.optimizer):
            get_logger().info("parameter groups:\n%s", parameter_table(parameters, experiment.optimizer))
        if recipe is not None:
            get_logger().info("quantization: %s", recipe)
        if mesh.pp_group is None:
            self._parallelize(model)
        else:
            self.pipeline = build_pipeline(model, build, self._parallelize, layout, mesh)
            _log_pipeline(layout)

    def init_weights(self, selected: Callable[[str], bool] = meta_init.every_weight) -> None:
        """Initialize this rank's weights whose full names are selected, since a load replaces others."""
        for init in self._init:
            init(selected)

    def _set_float8_weights(self, module: nn.Module) -> None:
        """Keep float8 weights where this rank holds them whole; elsewhere gather them in float8."""
        if self._mesh.sharding["fsdp"].size() > 1:
            if self._experiment.quantization.float8_all_gather:
                set_all_gather_format(module, quantize.float8_all_gather_format)
        elif not self._layout.parallelism.cpu_offload:
            quantize.allocate_float8_weights(module)

    def _parallelize(self, module: nn.Module) -> None:
        """Parallelize the whole model or a pipeline stage, and allocate its parameters."""
        experiment, layout, mesh = self._experiment, self._layout, self._mesh
        freeze(module, experiment.optimizer)
        specs, places = init_specs(module, self.scales), meta_init.buffer_places(module)
        if hasattr(module, "positions_restart"):
            module.positions_restart = experiment.data.reset_positions  # type: ignore[assignment]  # a plain attribute
        quantize.quantize(module, experiment.quantization, layers=block_count(experiment.model), device=mesh.device)
        parallelize(module, mesh, layout, experiment.activation_checkpoint, experiment.compile)
        with self._fake_mode or nullcontext():
            unfilled = meta_init.materialize_parameters(module, mesh.device, cpu_offload=layout.parallelism.cpu_offload)
            if experiment.quantization.recipe.startswith("float8"):
                self._set_float8_weights(module)
        if self._fake_mode is not None:
            return
        seed = experiment.experiment.seed
        meta_init.init_buffers(places, unfilled, self._build, seed)
        if specs is not None:
            self._init.append(partial(meta_init.init_weights, module, specs, seed))
        else:
            self._init.append(partial(meta_init.copy_initial_weights, module, self._build, seed))


def _gemm_selection(experiment: Experiment, ranks: int) -> str:
    compilation = experiment.compile
    if experiment.training.deterministic:
        return "cuBLAS, by its heuristics, since timings differ between runs (training.deterministic=true)"
    if compilation.backend != "inductor" or not compilation.autotunes_gemms(ranks):
        return f"cuBLAS, by its heuristics (compile.autotune_gemms={compilation.autotune_gemms}, {ranks} ranks)"
    return "the fastest of cuBLAS and Triton, timed once and cached beside the runs (compile.autotune_gemms)"


def _log_pipeline(layout: ResolvedLayout) -> None:
    counts, pp = layout.layer_counts, layout.parallelism
    schedules = [build_schedule(pp.pp_schedule, pp.pp, len(counts), size) for size in layout.pass_sizes]
    layers = ", ".join(map(str, counts if len(set(counts)) > 1 else counts[:1]))
    passes = ", then ".join(map(str, layout.pass_sizes))
    bubbles = ", then ".join(f"{100 * timeline(schedule).bubble:.0f}" for schedule in schedules)
    text = "pipeline: %s, %d stages of %s layers, %s micro-batches of %d sequences, bubble %s %%"
    get_logger().info(text, pp.pp_schedule, len(counts), layers, passes, layout.micro_batch_size, bubbles)


@dataclass(frozen=True)
class TrainState:
    """Objects that `train_step` works on, on one rank."""

    mesh: Mesh
    built: BuiltModel  # parallel model, with figures of the whole model
    model: Model
    optimizer: torch.optim.Optimizer
    clipper: GradientClipper | NormClipper
    quantize_weights: Callable[[], None]  # recomputes the quantized copies of the weights that a recipe keeps
    average: WeightAverage | None = None

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
    captures CUDA graphs. Raises UserError if an import path or a named module does not exist."""
    spec = model_spec(experiment.model)
    cuts = sequence_cuts(spec, layout.parallelism, layout.training.seq_len)
    causal = spec is None or spec.is_causal
    mesh = build_mesh(layout.parallelism, device, experts=has_experts(experiment.model), cuts=cuts, causal=causal)
    built = BuiltModel(experiment, layout, mesh, fake_mode=fake_mode)
    shard = vocab_shard(mesh, experiment.model.vocab_size) if experiment.parallelism.loss_parallel else None
    chunk = layout.loss_chunk_tokens if meta_init.computes_loss(built.module, spec) else None
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
    _log_optimizer(experiment.optimizer, weights, by_update=isinstance(optimizer, UpdatesComputeWeights))
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


def _log_optimizer(config: OptimizerConfig, weights: ComputeWeights, *, by_update: bool) -> None:
    kernel = f" ({config.implementation})" if isinstance(config, AdamWConfig) and config.name == "adamw" else ""
    by = "its update" if by_update else "a cast after its update"
    copies = f". With one data rank and no shards it keeps bf16 weights beside the fp32 ones, written by {by}"
    get_logger().info("optimizer: %s%s%s", config.name, kernel, copies if weights.copies else "")


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
    return quantize.modules_with_float8_weights(parts) if experiment.quantization.recipe.startswith("float8") else []


def _quantized_weights(model: Model, mesh: Mesh, experiment: Experiment) -> Callable[[], None]:
    """Return a function that recomputes kept float8 weights and precomputed scales; all ranks call it."""
    if experiment.quantization.recipe == "none":
        return lambda: None
    dtype = torch.bfloat16 if experiment.training.mixed_precision == "bf16" else torch.float32
    scales = quantize.WeightScales(model.parts, mesh.shard_groups, dtype)
    weights = quantize.Float8Weights(model.parts, dtype)

    def refresh() -> None:
        scales.refresh()
        weights.refresh()

    return refresh
