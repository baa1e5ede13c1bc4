"""Options of a configuration that cost speed, each with a faster alternative, for the log."""

from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING

from titan_exp.config.devices import device_type, node_size
from titan_exp.config.errors.user_error import listed, multiples_near
from titan_exp.config.groups.experiment import Experiment, ModelConfig
from titan_exp.config.groups.optimizer import AdamWConfig, OptimizerConfig
from titan_exp.config.groups.parallelism import QuantizationConfig
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.layout.resolved_layout import SMALLEST_GEMM, ResolvedLayout, why_eager
from titan_exp.config.schema.data_sets import source_member
from titan_exp.config.schema.foreign_code import sources
from titan_exp.config.torch_features import ATTENTION_BACKEND, HEAD_SIZES
from titan_exp.models.spec.lookup import attention_backend, block_count, model_spec
from titan_exp.models.spec.tp_plan import Colwise
from titan_exp.tracking.display import GIB
from titan_exp.tracking.logging import get_logger

if TYPE_CHECKING:
    import torch

NO_CODEGEN_BACKENDS = ("aot_eager", "eager")


def slower_options(experiment: Experiment) -> Iterator[str]:
    """Options that are slower than leaving them off, each with the reason and the faster value. Lists only options
    known to be slower without a measurement. The layout must be resolved."""
    cuda = device_type(experiment.cluster) == "cuda"
    yield from _replicated_weights(experiment)
    yield from repeated_reading(experiment.data, ResolvedLayout.of(experiment))
    if (slower := source_member(experiment.data.source, "slower_options")) is not None:
        yield from slower(experiment.data)
    yield from _optimizer(experiment.optimizer, cuda=cuda)
    yield from _quantization(experiment.quantization, experiment.model, cuda=cuda)
    unmasked_bf16 = experiment.training.mixed_precision == "bf16" and not experiment.data.document_mask
    yield from _attention(experiment.model, flash=cuda and unmasked_bf16)
    compile_, parallelism = experiment.compile, experiment.parallelism
    if not compile_.enabled and why_eager(experiment) is None:
        yield (
            "compile.enabled=false computes blocks operator by operator, for debugging. Use compile=blocks to fuse them"
        )
    if compile_.enabled and compile_.backend in NO_CODEGEN_BACKENDS:
        yield f"compile.backend={compile_.backend} generates no code. Use compile=none, or compile.backend=inductor"
    if compile_.cuda_graphs:
        yield (
            "compile.cuda_graphs=true zeroes and accumulates gradients, which is one more pass over memory in a "
            "step. Use compile.cuda_graphs=false, unless kernels take longer to launch than to run"
        )
    if experiment.training.deterministic:
        yield "training.deterministic=true excludes faster kernels. Use training.deterministic=false"
    size = node_size(experiment.cluster, parallelism.tp)
    if parallelism.tp > size:
        yield (
            f"parallelism.tp={parallelism.tp} exchanges activations between nodes of {size}, several times per block. "
            f"Use parallelism.tp={size} or less to stay within a node"
        )


def repeated_reading(data: DataConfig, layout: ResolvedLayout) -> Iterator[str]:
    """Virtual shards of streamed text that several data-parallel ranks read, and counts with one reader each."""
    shards, ranks = data.virtual_shards, layout.dp_degree
    readers = ranks // gcd(shards, ranks)
    if readers > 1 and (data.streaming or data.source not in sources()):
        yield (
            f"data.virtual_shards={shards} is not a multiple of the {ranks} data-parallel ranks, so {readers} ranks "
            f"read and tokenize each document. Use data.virtual_shards={listed(multiples_near(shards, ranks))} to "
            "read it once, in another order"
        )


def _replicated_weights(experiment: Experiment) -> Iterator[str]:
    spec, tp = model_spec(experiment.model), experiment.parallelism.tp
    styles = () if spec is None else (linear.tp for _, linear in spec.linears())
    for style in dict.fromkeys(style for style in styles if isinstance(style, Colwise) and style.key):
        if style.is_replicated(tp):
            widths = listed(multiples_near(style.units * style.width, style.width * tp))
            yield (
                f"parallelism.tp={tp} cuts through groups of {style.width} of the {style.described}: each rank "
                f"computes its share of them, but keeps the whole weight of gate and up. Use {style.key}={widths} to "
                "divide it too"
            )


def _optimizer(optimizer: OptimizerConfig, *, cuda: bool) -> Iterator[str]:
    if not isinstance(optimizer, AdamWConfig) or optimizer.name != "adamw" or optimizer.implementation == "triton":
        return
    if optimizer.state_precision != "fp32":
        faster = "Use optimizer.state_precision=fp32, which has a fused kernel"
        if optimizer.state_precision == "bf16" and cuda:
            faster += ", or optimizer.implementation=auto, which has one for bf16 moments"
        yield (
            f"optimizer.state_precision={optimizer.state_precision} updates parameters one by one, in several passes "
            f"over memory. {faster}"
        )
    elif optimizer.implementation != "fused":
        yield (
            f"optimizer.implementation={optimizer.implementation} takes several passes over memory. "
            "Use optimizer.implementation=auto, which takes one"
        )


def _quantization(config: QuantizationConfig, model: ModelConfig, *, cuda: bool) -> Iterator[str]:
    if config.recipe == "none":
        return
    if config.emulate is True or not cuda:
        yield (
            f"quantization.recipe={config.recipe} runs in emulation here: it rounds numbers and multiplies them in "
            "fp32. Use quantization=none"
        )
        return
    spec, layers = model_spec(model), block_count(model)
    linears = {} if spec is None else {name: linear for name, linear in spec.linears() if linear.quantizable}
    sizes = [(name, linear.inputs, linear.outputs) for name, linear in linears.items()]
    small = [size for size in sizes if config.quantizes(*size, layers=layers) and min(size[1:]) < SMALLEST_GEMM]
    if small:
        yield (
            f"quantization.smallest_gemm={config.smallest_gemm} quantizes {len(small)} linears with fewer than "
            f"{SMALLEST_GEMM} inputs or outputs, where casts have cost more than float8 gained. "
            f"Use quantization.smallest_gemm={SMALLEST_GEMM}"
        )


def _attention(model: ModelConfig, *, flash: bool) -> Iterator[str]:
    backend, field = attention_backend(model), ATTENTION_BACKEND
    if backend == "math":
        yield f"{field}=math holds the scores of all pairs of tokens in memory. Use {field}=auto"
    spec = model_spec(model)
    attention = None if spec is None else spec.attention
    fits = attention is not None and HEAD_SIZES["flash"].takes(attention.qk_dim)
    if backend == "efficient" and flash and fits:
        yield f"{field}=efficient is for fp32 and masks, and this run has neither. Use {field}=auto"


SPARE_SHARE = 0.5  # share of the device's memory that must be free before the log names options that save memory


def log_slow_options(experiment: Experiment) -> None:
    """Log each option of a run that costs speed."""
    for option in slower_options(experiment):
        get_logger().info("slower than necessary: %s", option)


class SpareMemory:
    """Logs once that options which trade time for memory may not be needed; on CUDA only."""

    def __init__(self, options: str, device: "torch.device") -> None:
        import torch

        self._options = options
        self._total = torch.cuda.get_device_properties(device).total_memory / GIB if device.type == "cuda" else None

    def check(self, reserved: float | None) -> None:
        """Check the peak of reserved memory since the last row, in GiB."""
        if self._total is None or reserved is None or not self._options:
            return
        if reserved < (1 - SPARE_SHARE) * self._total:
            text = "slower than necessary, perhaps: %s, and the run used at most %.1f of %.0f GiB"
            get_logger().info(text, self._options, reserved, self._total)
        self._options = ""


def saving_options(experiment: Experiment) -> str:
    """Options in use that trade time for memory, each with its cost; empty if none."""
    mode = experiment.activation_checkpoint.mode
    recomputes = f"activation_checkpoint.mode={mode} recomputes activations (activation_checkpoint=none)"
    copies = "parallelism.cpu_offload=true copies weights and gradients to and from the CPU "
    copies += "(parallelism.cpu_offload=false)"
    used = {recomputes: mode != "none", copies: experiment.parallelism.cpu_offload}
    return ", ".join(option for option, is_used in used.items() if is_used)
