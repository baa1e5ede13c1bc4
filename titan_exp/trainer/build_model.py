"""Build the parallel model of this rank: meta device, stage split, quantization, parallelism, initial weights."""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.optimizer import OptimizerConfig
from titan_exp.config.layout.pipeline_schedules import timeline
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.build import build_model, choose_attention_backend, flops_per_token, init_specs, parameter_count
from titan_exp.models.parametrization.parameter_scale import scales_of
from titan_exp.models.spec.lookup import block_count
from titan_exp.optim.parameter_groups import NamedParameter, freeze, hyperparameters, named_parameters
from titan_exp.parallel.apply import parallelize
from titan_exp.parallel.fsdp import set_all_gather_format
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.meta_init import (
    buffer_places,
    copy_initial_weights,
    every_weight,
    init_buffers,
    init_weights,
    materialize_parameters,
    require_modules,
)
from titan_exp.parallel.pipeline_runtime import ActivationSpec, P2PTransport, Pipeline, build_schedule
from titan_exp.parallel.pipeline_stage import Stage, keep_compiled_buffers, prune_to_stage, shared_parameters
from titan_exp.quantization.quantize import describe, quantize
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.number_format import format_count


def has_groups(parameters: Sequence[NamedParameter], config: OptimizerConfig) -> bool:
    """True if parameters differ in more than the weight decay of vectors."""
    given = config.groups or config.lr_scales or config.weight_decays
    return bool(given) or any(named.scale != parameters[0].scale for named in parameters)


def parameter_table(parameters: Sequence[NamedParameter], config: OptimizerConfig) -> str:
    """Table of learning rate, weight decay and other settings, one row per group of a model's parameters, frozen ones
    included."""
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
    also = " ".join(f"{key}={_shown(value)}" for key, value in options.items())
    if named.scale.init != 1:
        also = f"{also} initial weights x{named.scale.init:.3g}".strip()
    return named.role, group, f"{lr:.3g}", f"{decay:.3g}", also


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


class BuiltModel:
    """The parallel model on this rank, with the whole model's parameter count and FLOPs. `fake_mode` as in `assemble`.

    Parameters have memory but no values until `init_weights` or a checkpoint fills them.

    Raises:
        UserError: an import path cannot be imported, or a named module does not exist.
    """

    def __init__(
        self,
        experiment: Experiment,
        layout: ResolvedLayout,
        mesh: Mesh,
        *,
        fake_mode: AbstractContextManager[Any] | None = None,
    ) -> None:
        backend = choose_attention_backend(
            experiment.model,
            mesh.device,
            bf16=experiment.training.mixed_precision == "bf16",
            seq_len=experiment.training.seq_len,
            documents=experiment.data.document_mask,
            parts=experiment.parallelism.cp > 1 and experiment.parallelism.cp_method != "ulysses",
            deterministic=experiment.training.deterministic,
        )
        self._experiment, self._layout, self._mesh, self._fake_mode = experiment, layout, mesh, fake_mode
        self._build = build = functools.partial(
            build_model, experiment.model, seq_len=experiment.training.seq_len, attention_backend=backend
        )
        with torch.device("meta"):
            model = build()
        self.scales = scales_of(experiment.parametrization, experiment.model)
        """Scales that the parametrization gives to parameters, by full name."""
        self.parameters = parameter_count(model)
        """Number of parameters of the whole model."""
        self.flops_per_token = flops_per_token(model, experiment.training.seq_len)
        """FLOPs of a training step per token."""
        require_modules(model, experiment.training.fp32_modules)
        freeze(model, experiment.optimizer)
        parameters = named_parameters([model], self.scales, frozen=True)
        recipe = describe(model, experiment.quantization, layers=block_count(experiment.model), device=mesh.device)
        self.module: nn.Module = model
        """The whole model; on the meta device under pipeline parallelism."""
        self.pipeline: Pipeline | None = None
        """This rank's stages under pipeline parallelism."""
        self._init: list[Callable[[Callable[[str], bool]], None]] = []
        get_logger().info(
            "%s: %s parameters, attention by %s on %s",
            experiment.model.name,
            f"{self.parameters:,}",
            backend,
            mesh.device.type,
        )
        if experiment.compile.compiles("blocks") and mesh.device.type == "cuda":
            get_logger().info("matmuls of compiled blocks: %s", _gemm_selection(experiment, layout.world_size))
        if has_groups(parameters, experiment.optimizer):
            get_logger().info("parameter groups:\n%s", parameter_table(parameters, experiment.optimizer))
        if recipe is not None:
            get_logger().info("quantization: %s", recipe)
        if mesh.pp_group is None:
            self._parallelize(model)
        else:
            self.pipeline = _build_pipeline(model, build, self._parallelize, layout, mesh)

    def init_weights(self, selected: Callable[[str], bool] = every_weight) -> None:
        """Initialize this rank's weights whose full names are selected. Weights that a load will replace need not be
        drawn."""
        for init in self._init:
            init(selected)

    def _set_float8_weights(self, module: nn.Module) -> None:
        """Keep float8 weights of a materialized model where this rank holds them whole; elsewhere gather them in
        float8."""
        if self._mesh.sharding["fsdp"].size() > 1:
            if self._experiment.quantization.float8_all_gather:
                from titan_exp.quantization.quantize import float8_all_gather_format

                set_all_gather_format(module, float8_all_gather_format)
        elif not self._layout.parallelism.cpu_offload:
            from titan_exp.quantization.quantize import allocate_float8_weights

            allocate_float8_weights(module)

    def _parallelize(self, module: nn.Module) -> None:
        """Parallelize the whole model or a pipeline stage, and allocate its parameters."""
        experiment, layout, mesh = self._experiment, self._layout, self._mesh
        freeze(module, experiment.optimizer)
        specs, places = init_specs(module, self.scales), buffer_places(module)
        if hasattr(module, "positions_restart"):
            module.positions_restart = experiment.data.reset_positions  # type: ignore[assignment]  # a plain attribute
        quantize(module, experiment.quantization, layers=block_count(experiment.model), device=mesh.device)
        parallelize(module, mesh, layout, experiment.activation_checkpoint, experiment.compile)
        with self._fake_mode or nullcontext():
            unfilled = materialize_parameters(module, mesh.device, cpu_offload=layout.parallelism.cpu_offload)
            if experiment.quantization.recipe.startswith("float8"):
                self._set_float8_weights(module)
        if self._fake_mode is not None:
            return
        seed = experiment.experiment.seed
        init_buffers(places, unfilled, self._build, seed)
        if specs is not None:
            self._init.append(functools.partial(init_weights, module, specs, seed))
        else:
            self._init.append(functools.partial(copy_initial_weights, module, self._build, seed))


def _gemm_selection(experiment: Experiment, ranks: int) -> str:
    compilation = experiment.compile
    if experiment.training.deterministic:
        return "cuBLAS, by its heuristics, since timings differ between runs (training.deterministic=true)"
    if compilation.backend != "inductor" or not compilation.autotunes_gemms(ranks):
        return f"cuBLAS, by its heuristics (compile.autotune_gemms={compilation.autotune_gemms}, {ranks} ranks)"
    return "the fastest of cuBLAS and Triton, timed once and cached beside the runs (compile.autotune_gemms)"


def _build_pipeline(
    whole: nn.Module,
    build: Callable[[], nn.Module],
    parallelize_stage: Callable[[nn.Module], None],
    layout: ResolvedLayout,
    mesh: Mesh,
) -> Pipeline:
    parallelism = layout.parallelism
    layers, placement = layout.stage_layers, layout.stage_placement
    last = len(layers) - 1
    assert mesh.pp_group is not None
    if layout.splits_backward:
        keep_compiled_buffers()
    stages, shared, extra_tokens = [], shared_parameters(whole), whole.pp_plan().extra_tokens  # type: ignore[operator]
    for number, rank in enumerate(placement):
        if rank != mesh.pp_group.rank():
            continue
        with torch.device("meta"):
            module = build()
        # Modules of multi-token prediction follow the head's input.
        behind = range(layout.layers, len(module.get_submodule("blocks"))) if number == last else ()  # type: ignore[arg-type]
        prune_to_stage(module, [*layers[number], *behind], first=number == 0, last=number == last)
        parallelize_stage(module)
        stages.append(
            Stage(
                number,
                number == last,
                module,
                shared=shared if number == 0 else (),
                copied=shared if number == last else (),
            )
        )
    counts = layout.layer_counts
    schedules = [
        build_schedule(parallelism.pp_schedule, parallelism.pp, len(layers), size) for size in layout.pass_sizes
    ]
    get_logger().info(
        "pipeline: %s, %d stages of %s layers, %s micro-batches of %d sequences, bubble %s %%",
        parallelism.pp_schedule,
        len(layers),
        ", ".join(map(str, counts if len(set(counts)) > 1 else counts[:1])),
        ", then ".join(map(str, layout.pass_sizes)),
        layout.micro_batch_size,
        ", then ".join(f"{100 * timeline(schedule).bubble:.0f}" for schedule in schedules),
    )
    return Pipeline(
        stages,
        schedules,
        placement,
        P2PTransport(mesh.pp_group, ActivationSpec.of(layout, mesh.device, extra_tokens)),
        keep_gathered=layout.reshard_policy == "never",
    )
