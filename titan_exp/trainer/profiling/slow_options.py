"""Options in use that cost speed, as far as the configuration tells: what a run's log says of itself."""

from collections.abc import Iterator

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.optimizer import AdamWConfig
from titan_exp.config.layout.resolved_layout import SMALLEST_GEMM
from titan_exp.config.machine.attention_backends import HEAD_SIZES
from titan_exp.config.machine.devices import device_type, node_size
from titan_exp.models.spec.lookup import attention_backend, model_spec

WITHOUT_CODE = ("aot_eager", "eager")
"""Backends of torch.compile that generate none."""


def slower_options(experiment: Experiment) -> Iterator[str]:
    """Each option that is slower than leaving it off, why, and what is faster; its layout is resolved.

    Only what is known without a measurement: by how much is not said.
    """
    for found in (_optimizer, _quantization, _attention, _elsewhere):
        yield from found(experiment)


def _optimizer(experiment: Experiment) -> Iterator[str]:
    optimizer = experiment.optimizer
    if not isinstance(optimizer, AdamWConfig) or optimizer.name != "adamw" or optimizer.implementation == "triton":
        return
    if optimizer.state_precision != "fp32":
        faster = "optimizer.state_precision=fp32 takes a fused kernel"
        if optimizer.state_precision == "bf16" and device_type(experiment.cluster) == "cuda":
            faster += ", optimizer.implementation=triton one with these moments"
        yield (
            f"optimizer.state_precision={optimizer.state_precision} updates one parameter after the other, in several "
            f"passes over memory; {faster}"
        )
    elif optimizer.implementation != "fused":
        yield (
            f"optimizer.implementation={optimizer.implementation} takes several passes over memory; "
            "optimizer.implementation=fused takes one"
        )


def _quantization(experiment: Experiment) -> Iterator[str]:
    config, spec = experiment.quantization, model_spec(experiment.model)
    if config.recipe == "none":
        return
    if config.emulate is True or device_type(experiment.cluster) == "cpu":
        yield (
            f"quantization.recipe={config.recipe} is emulated: numbers are rounded, and multiplied in fp32; "
            "quantization=none"
        )
        return
    small = [
        name
        for name, linear in (() if spec is None else spec.linears())
        if config.quantizes(name, linear.inputs, linear.outputs, layers=experiment.model.layers)
        and min(linear.inputs, linear.outputs) < SMALLEST_GEMM
    ]
    if small:
        yield (
            f"quantization.smallest_gemm={config.smallest_gemm} takes {len(small)} projections with fewer than "
            f"{SMALLEST_GEMM} inputs or outputs, where casts have been seen to cost more than float8 gains; "
            f"quantization.smallest_gemm={SMALLEST_GEMM}"
        )


def _attention(experiment: Experiment) -> Iterator[str]:
    backend, field = attention_backend(experiment.model), "model.attention_backend"
    if backend == "math":
        yield f"{field}=math holds the scores of all pairs of tokens in memory; {field}=auto"
    plain = experiment.training.mixed_precision == "bf16" and not experiment.data.document_mask
    spec = model_spec(experiment.model)
    attention = None if spec is None else spec.attention
    fits = attention is not None and HEAD_SIZES["flash"].takes(attention.qk_dim)
    if backend == "efficient" and plain and fits and device_type(experiment.cluster) == "cuda":
        yield f"{field}=efficient is for fp32 and for masks, of which there are none here; {field}=auto"


def _elsewhere(experiment: Experiment) -> Iterator[str]:
    compile_, parallelism = experiment.compile, experiment.parallelism
    if compile_.enabled and compile_.backend in WITHOUT_CODE:
        yield f"compile.backend={compile_.backend} generates no code; compile=none, or compile.backend=inductor"
    if compile_.cuda_graphs:
        yield (
            "compile.cuda_graphs=true, unless launching kernels takes longer than running them: gradients are zeroed "
            "and added to, one pass over memory more in each step; compile.cuda_graphs=false"
        )
    if experiment.training.deterministic:
        yield "training.deterministic=true leaves out quicker kernels; training.deterministic=false"
    size = node_size(experiment.cluster, parallelism.tp)
    if parallelism.tp > size:
        yield (
            f"parallelism.tp={parallelism.tp} exchanges activations between nodes of {size}, several times in each "
            f"block; parallelism.tp={size} or fewer stays within one"
        )
