"""Order of parallelisms, the same for every model. Tensor, expert and context parallelism come first, so that later
ones see local shapes; compilation before activation checkpointing, unless checkpointing selects operators; FSDP last,
so that it gathers whatever parameters exist."""

from torch import nn

from titan_exp.config.groups.parallelism import ActivationCheckpointConfig, CompileConfig
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.parallel import activation_checkpoint
from titan_exp.parallel.context_parallel.apply import apply_context_parallel
from titan_exp.parallel.expert_parallel import apply_expert_parallel
from titan_exp.parallel.fsdp import FSDPOptions, apply_fsdp
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.tensor_parallel.styles import apply_tensor_parallel, enable_async_tp


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    layout: ResolvedLayout,
    checkpointing: ActivationCheckpointConfig,
    compilation: CompileConfig,
) -> None:
    """Parallelize a model on the meta device, or a pipeline stage of it, in place."""
    parallelism, training = layout.parallelism, layout.training
    apply_tensor_parallel(
        model, mesh, sequence_parallel=parallelism.sequence_parallel, loss_parallel=parallelism.loss_parallel
    )
    apply_expert_parallel(
        model,
        mesh,
        sequence_parallel=parallelism.sequence_parallel,
        symmetric_memory=parallelism.token_exchange == "symmetric_memory",
    )
    if parallelism.async_tp:
        enable_async_tp(mesh)
    apply_context_parallel(model, mesh, parallelism.cp_method)
    # Restoring RNG state synchronizes with the host; a captured pass draws no random numbers.
    random = not compilation.cuda_graphs
    partitioned = compilation.compiles("blocks") and compilation.backend != "eager"
    in_graphs = activation_checkpoint.needs_compiler(checkpointing, model, compiled=partitioned)
    if in_graphs:
        activation_checkpoint.apply_activation_checkpointing(model, checkpointing, random=random, compiled=partitioned)
    if compilation.compiles("blocks"):
        options = activation_checkpoint.inductor_options(compilation, mesh, deterministic=training.deterministic)
        activation_checkpoint.compile_blocks(model, compilation.backend, options)
    if not in_graphs:
        activation_checkpoint.apply_activation_checkpointing(model, checkpointing, random=random)
    sharding = FSDPOptions(
        bf16=training.mixed_precision == "bf16",
        bf16_sums=training.accumulation_precision == "bf16",
        reshard_after_forward=layout.reshard_policy,
        cpu_offload=parallelism.cpu_offload,
        prefetch_blocks=parallelism.prefetch_blocks,
        fp32_modules=training.fp32_modules,
    )
    apply_fsdp(model, mesh, sharding)
