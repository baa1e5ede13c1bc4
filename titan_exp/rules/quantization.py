"""Quantization rules for recipes and optimizer moments: options, divisibility, devices; Triton kernels."""

import importlib.util
from collections.abc import Iterator
from fnmatch import fnmatchcase

from titan_exp.config.devices import has_triton
from titan_exp.config.errors.user_error import Violation, did_you_mean
from titan_exp.config.groups import parallelism as groups
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.groups.optimizer import MOMENT_BLOCK, AdamWConfig, OptimizerConfig
from titan_exp.config.groups.parallelism import BLOCK, BLOCK_SCALED, ParallelismConfig, QuantizationConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.torch_features import torchao_violations
from titan_exp.models.spec.model_spec import LinearSpec, ModelSpec
from titan_exp.models.spec.tp_plan import Colwise
from titan_exp.rules.rule import Refuse, check_multiple, rules

RECIPE = "quantization.recipe"


def filter_matches(spec: ModelSpec, quantization: QuantizationConfig) -> Iterator[Violation]:
    """Every filter pattern matches a linear layer."""
    names = [name for name, _ in spec.linears()]
    for pattern in quantization.filter:
        if not any(fnmatchcase(name, pattern) for name in names):
            offer = did_you_mean(pattern, names) or "use patterns such as blocks.*.attention.* or *.down"
            yield Violation("quantization.filter", pattern, "no linear layer of the model matches this", offer)


def some_linear_is_quantized(
    spec: ModelSpec, model: ModelConfig, quantization: QuantizationConfig
) -> Iterator[Violation]:
    """The recipe quantizes at least one linear layer."""
    config, layers = quantization, len(spec.blocks)
    if any(quantized_linears(spec, config)):
        return
    widest = max((min(linear.inputs, linear.outputs) for _, linear in spec.linears()), default=0)
    if config.high_precision_first + config.high_precision_last >= layers:
        field, value = "quantization.high_precision_first", config.high_precision_first
        together = f"together with quantization.high_precision_last={config.high_precision_last}"
        reason = f"{together} this keeps all {layers} blocks in high precision"
        remedy = f"choose two numbers that add up to at most {layers - 1}, or use quantization=none"
    elif config.smallest_gemm is not None and config.smallest_gemm > widest:
        field, value = "quantization.smallest_gemm", config.smallest_gemm
        reason = (
            f"no linear layer of {model.name} has that many inputs and outputs. The widest has {widest}, where casting "
            "may cost more than float8 gains"
        )
        anyway = f"use quantization.smallest_gemm={widest} to quantize it anyway"
        remedy = f"{anyway}, quantization.smallest_gemm=0 to quantize all, or quantization=none"
    else:
        field, value = "quantization.filter", config.filter
        reason, remedy = "this filter leaves nothing to quantize", "use quantization=none"
    yield Violation(field, value, reason, remedy)


def dims_divide(
    spec: ModelSpec, quantization: QuantizationConfig, parallelism: ParallelismConfig, device: str
) -> Iterator[Violation]:
    """Every rank's shard of a quantized weight has whole scaling blocks."""
    recipe, block = quantization.recipe, scaling_block(quantization, device)
    for linear in dict.fromkeys(linear for _, linear in quantized_linears(spec, quantization)):
        key, degree = _channel_shards(linear, parallelism)
        if _shares_kv_heads(linear, degree):
            continue  # reported by kv_heads_are_whole
        for dim, size in (("inputs", linear.inputs), ("outputs", linear.outputs)):
            shards = degree if linear.divided == dim else 1
            if size % (block * shards) == 0 or size % shards:
                continue
            part = f", which is {size // shards} on each rank of {key}={degree}" if shards > 1 else ""
            remedy = f"use quantization.filter=['*.{linear.name}'] to leave it in high precision"
            remedy += ", or choose another shape" + (f" or {key}" if shards > 1 else "")
            if block > BLOCK[recipe]:
                remedy += f", or use quantization.emulate=true, for which multiples of {BLOCK[recipe]} will do"
            reason = f"it needs dims that are multiples of {block}, and {linear.name} has {size} {dim}{part}"
            yield Violation(RECIPE, recipe, reason, remedy)


def tokens_divide(
    spec: ModelSpec,
    quantization: QuantizationConfig,
    parallelism: ParallelismConfig,
    layout: ResolvedLayout,
    device: str,
) -> Iterator[Violation]:
    """A micro-batch's tokens, the reduction dim of weight gradients, form whole scaling blocks."""
    training = layout.training
    recipe, cp, chunks = quantization.recipe, parallelism.cp, parallelism.sequence_chunks
    if recipe == "float8_rowwise_gw_hp":
        return
    block, tokens = scaling_block(quantization, device), layout.micro_batch_size * training.seq_len
    run, rest = divmod(training.seq_len, chunks)
    if spec.inputs is not None:
        return  # whose streams have a rule of theirs
    if recipe == "nvfp4" and rest == 0 and run % BLOCK[recipe]:
        among = f", and a rank of parallelism.cp={cp} holds runs of {run}" if cp > 1 else ""
        reason = f"nvfp4 transforms each {BLOCK[recipe]} consecutive tokens of a sequence together{among}"
        yield from check_multiple("training.seq_len", training.seq_len, BLOCK[recipe] * chunks, reason)
    elif tokens and tokens % cp == 0 and tokens // cp % block:
        among = f" on each rank of parallelism.cp={cp}" if cp > 1 else ""
        reason = f"{recipe} quantizes blocks of {block} tokens, and a micro-batch has {tokens // cp}{among}"
        yield from check_multiple("training.seq_len", training.seq_len, block * cp, reason)


def kv_heads_are_whole(
    spec: ModelSpec, quantization: QuantizationConfig, parallelism: ParallelismConfig
) -> Iterator[Violation]:
    """No rank has a partial gradient of a key or value head, which would be rounded before the reduction."""
    degree = parallelism.tp
    for _, linear in quantized_linears(spec, quantization):
        if isinstance(linear.tp, Colwise) and _shares_kv_heads(linear, degree):
            heads, name = linear.tp.units, linear.name.rpartition(".")[2]
            reason = f"several ranks share each of the {heads} key and value heads, and {quantization.recipe} would "
            reason += "round each rank's part of a gradient before they add up, which one device does not do"
            remedy = f"use a parallelism.tp that divides {heads}, or quantization.filter=['*.{name}']"
            yield Violation("parallelism.tp", degree, reason, remedy)
            return


def all_gather_in_float8(quantization: QuantizationConfig, parallelism: ParallelismConfig) -> Iterator[Violation]:
    """FSDP can all-gather weights in float8."""
    recipe, field = quantization.recipe, "quantization.float8_all_gather"
    if not quantization.float8_all_gather:
        return
    if recipe != "float8_tensorwise":
        scaled = "blocks of 16 by 16" if recipe == "nvfp4" else "rows or columns"
        reason = f"{recipe} scales whole {scaled} of a weight, which a shard does not hold"
        yield Violation(field, True, reason, f"use {field}=false, or quantization=float8_tensorwise")
    elif not quantization.precomputed_scales:
        reason = "a shard alone does not know the scale of the whole weight"
        yield Violation(field, True, reason, f"use quantization.precomputed_scales=true, or {field}=false")
    elif parallelism.cpu_offload:
        reason = "with parallelism.cpu_offload=true the GPU quantizes weights only after their copy"
        yield Violation(field, True, reason, f"use {field}=false")


def fp32_modules_are_not_quantized(
    spec: ModelSpec, quantization: QuantizationConfig, training: TrainingConfig
) -> Iterator[Violation]:
    """No fp32 module is quantized."""
    for pattern in training.fp32_modules:
        paths = [name.split(".") for name, _ in quantized_linears(spec, quantization)]
        # Modules and their parents, except the list of blocks.
        modules = (".".join(path[:end]) for path in paths for end in range(2, len(path) + 1))
        inside = next((module for module in modules if fnmatchcase(module, pattern)), None)
        if inside is not None:
            reason = f"{quantization.recipe} quantizes linear layers in {inside}"
            keys = "quantization.filter or quantization.high_precision_first"
            remedy = f"leave it out, or keep these layers in high precision with {keys}"
            yield Violation("training.fp32_modules", pattern, reason, remedy)


def moment_blocks_divide(
    spec: ModelSpec, optimizer: AdamWConfig, parallelism: ParallelismConfig
) -> Iterator[Violation]:
    """Every rank's part of a row has whole blocks of 8-bit moments."""
    field, precision = "optimizer.state_precision", optimizer.state_precision
    for _, linear in spec.linears() if precision != "bf16" else ():
        key, degree = _channel_shards(linear, parallelism)
        blocks, rest = divmod(linear.inputs, MOMENT_BLOCK)
        if linear.divided == "inputs" and rest == 0 == linear.inputs % degree and blocks % degree:
            part = f"{linear.inputs // degree} of the {linear.inputs} inputs of {linear.name}"
            reason = f"8-bit moments come in blocks of {MOMENT_BLOCK} numbers of a row"
            reason += f", and each rank of {key}={degree} has only {part}"
            yield Violation(field, precision, reason, f"use {field}=bf16, or a smaller {key}")
            return


def quantized_linears(spec: ModelSpec, config: QuantizationConfig) -> Iterator[tuple[str, LinearSpec]]:
    """Linears that the recipe quantizes, by module path."""
    for name, linear in spec.linears():
        shape = linear.inputs, linear.outputs
        if linear.quantizable and config.quantizes(name, *shape, layers=len(spec.blocks)):
            yield name, linear


def _channel_shards(linear: LinearSpec, parallelism: ParallelismConfig) -> tuple[str, int]:
    """Key and number of the ranks that share a linear's channels."""
    key = "etp" if linear.experts > 1 else "tp"
    return f"parallelism.{key}", getattr(parallelism, key)


def _shares_kv_heads(linear: LinearSpec, degree: int) -> bool:
    """True if several tensor-parallel ranks compute the same outputs."""
    return linear.tp is not None and linear.tp.repeats_outputs(degree)


def scaling_block(config: QuantizationConfig, device: str) -> int:
    """Required divisor of dims and tokens; GPUs are assumed to have the recipe's instructions."""
    native = config.emulate is not True and device == "cuda"
    return groups.NVFP4_TILE if config.recipe == "nvfp4" and native else BLOCK[config.recipe]


def fused_adamw_is_supported(
    optimizer: OptimizerConfig, parallelism: ParallelismConfig, device: str
) -> Iterator[Violation]:
    """The fused clip and AdamW kernel supports the device, options and precision."""
    field = "optimizer.implementation"
    if not isinstance(optimizer, AdamWConfig) or optimizer.implementation != "triton":
        return
    if optimizer.name != "adamw":
        reason = f"this is a kernel for AdamW, and optimizer.name is {optimizer.name}"
        remedy = ", or optimizer.name=adamw"
    elif (missing := _missing_triton(device)) is not None:
        reason, remedy = missing
    elif parallelism.cpu_offload:
        reason = "this kernel updates weights on the GPU, and parallelism.cpu_offload keeps them in CPU memory"
        remedy = ", or parallelism.cpu_offload=false"
    elif (precision := optimizer.state_precision) not in ("fp32", "bf16"):
        reason = f"this kernel keeps moments in fp32 or bf16, and optimizer.state_precision is {precision}"
        remedy = ", or optimizer.state_precision=bf16"
    else:
        return
    yield Violation(field, "triton", reason, f"use {field}=fused{remedy}")


def dual_cast_is_supported(quantization: QuantizationConfig, device: str) -> Iterator[Violation]:
    """The dual-cast kernel (a matrix and its transpose) supports the device and recipe."""
    field = "quantization.fused_casts"
    if quantization.fused_casts is not True or quantization.recipe == "none":
        return
    if not quantization.has_dual_casts:
        reason = f"this kernel casts a matrix and its transpose, and {quantization.recipe} does not use both in float8"
        remedy = f", or quantization={' or '.join(groups.DUAL_CAST_RECIPES)}"
    elif (missing := _missing_triton(device)) is not None:
        reason, remedy = missing
    elif quantization.emulate is True:
        reason = "with quantization.emulate=true torch does the casts, and this kernel does none"
        remedy = ", or quantization.emulate=auto"
    else:
        return
    yield Violation(field, True, reason, f"use {field}=false{remedy}")


def _missing_triton(device: str) -> tuple[str, str] | None:
    """Reason why Triton kernels cannot run, and what a remedy adds; None if they can."""
    if device != "cuda":
        return "Triton kernels run on GPUs, and this run trains on the CPU", ""
    if not has_triton():
        return "Triton is not installed (torch for CUDA brings it)", ", or pip install triton"
    return None


def _torchao_is_missing() -> bool:
    return importlib.util.find_spec("torchao") is None


RULES = (
    *rules(
        Refuse(
            RECIPE,
            _torchao_is_missing,
            "torchao is not installed",
            "type pip install torchao, or use quantization=none",
        ),
        lambda quantization, device: (
            torchao_violations(quantization.recipe) if device == "cuda" and quantization.emulate is not True else ()
        ),
        filter_matches,
        some_linear_is_quantized,
        dims_divide,
        kv_heads_are_whole,
        Refuse(
            "quantization.power_of_two_scales",
            lambda quantization: quantization.recipe == "mxfp8" and not quantization.power_of_two_scales,
            "in the MX format every scale is a power of two",
            "use quantization.power_of_two_scales=true",
        ),
        Refuse(
            "quantization.stochastic_rounding",
            lambda quantization: quantization.stochastic_rounding and quantization.recipe != "nvfp4",
            "{quantization.recipe} always rounds to the nearest",
            "use quantization.stochastic_rounding=false, or quantization=nvfp4",
        ),
        Refuse(
            "quantization.precomputed_scales",
            lambda quantization: quantization.precomputed_scales and not quantization.whole_weight_scales,
            "{quantization.recipe} has no scale of a whole weight to compute ahead",
            "use quantization.precomputed_scales=false, or quantization=float8_tensorwise",
        ),
        all_gather_in_float8,
        # Ranks check that the GPU has the recipe's instructions.
        Refuse(
            "quantization.emulate",
            lambda quantization, device: quantization.emulate is False and device == "cpu",
            "a CPU has no instructions for {quantization.recipe}",
            "use quantization.emulate=auto",
        ),
        Refuse(
            "training.mixed_precision",
            lambda quantization, training, device: (
                quantization.recipe in BLOCK_SCALED
                and quantization.emulate is not True
                and device == "cuda"
                and training.mixed_precision != "bf16"
            ),
            "the matmuls of {quantization.recipe} return bf16, and training.mixed_precision is "
            "{training.mixed_precision}",
            "use training.mixed_precision=bf16, or quantization.emulate=true",
        ),
        fp32_modules_are_not_quantized,
        when=lambda quantization: quantization.recipe != "none",
    ),
    *rules(
        Refuse(
            "optimizer.state_precision",
            lambda optimizer: optimizer.name != "adamw",
            "this is the precision of AdamW's moments, and optimizer.name is {optimizer.name}",
            "use optimizer.state_precision=fp32, or optimizer.name=adamw",
        ),
        Refuse(
            "optimizer.state_precision",
            lambda optimizer: (
                optimizer.name == "adamw" and optimizer.state_precision != "bf16" and _torchao_is_missing()
            ),
            "torchao is not installed",
            "type pip install torchao, or use optimizer.state_precision=bf16",
        ),
        moment_blocks_divide,
        when=lambda optimizer: isinstance(optimizer, AdamWConfig) and optimizer.state_precision != "fp32",
    ),
    *rules(fused_adamw_is_supported, dual_cast_is_supported),
)
LAYOUT_RULES = rules(tokens_divide, when=lambda quantization: quantization.recipe != "none")
