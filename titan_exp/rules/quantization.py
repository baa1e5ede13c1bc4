"""Rules about numbers in few bits: what recipes and moments can be, and what no device or layout can do."""

import importlib.util
from collections.abc import Iterator
from fnmatch import fnmatchcase

from titan_exp.config.errors.did_you_mean import did_you_mean, listed, multiples_near
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.builtins import ARCHITECTURES
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.optimizer import MOMENT_BLOCK
from titan_exp.config.groups.quantization import BLOCK, NVFP4_TILE
from titan_exp.config.layout.linear_shapes import Projection, is_quantized, projections
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.devices import device_type
from titan_exp.rules.context_parallel import chunks_of_a_sequence
from titan_exp.rules.rule import rules

RECIPE = "quantization.recipe"


def engine_is_installed(experiment: Experiment) -> Iterator[Violation]:
    """torchao casts and multiplies."""
    recipe = experiment.quantization.recipe
    if recipe != "none" and importlib.util.find_spec("torchao") is None:
        yield Violation(RECIPE, recipe, "torchao is not installed", "pip install torchao, or quantization=none")


def filter_names_projections(experiment: Experiment) -> Iterator[Violation]:
    """A pattern that names nothing is a mistake."""
    if not _is_known(experiment):
        return
    names = [projection.name for projection in projections(experiment.model)]
    for pattern in experiment.quantization.filter:
        if not any(fnmatchcase(name, pattern) for name in names):
            offer = did_you_mean(pattern, names) or "patterns look like blocks.*.attention.* or *.down"
            yield Violation("quantization.filter", pattern, "the model has no such projection", offer)


def something_is_quantized(experiment: Experiment) -> Iterator[Violation]:
    """A recipe takes a projection."""
    config, layers = experiment.quantization, experiment.model.layers
    if not _is_known(experiment) or any(_taken(experiment)):
        return
    if config.high_precision_first + config.high_precision_last >= layers:
        field, value = "quantization.high_precision_first", config.high_precision_first
        reason = f"with quantization.high_precision_last={config.high_precision_last} that is all {layers} blocks"
        yield Violation(field, value, reason, f"together at most {layers - 1}, or quantization=none")
        return
    widest = max(min(it.inputs, it.outputs) for it in projections(experiment.model))
    if config.smallest_gemm is not None and config.smallest_gemm > widest:
        yield Violation(
            "quantization.smallest_gemm",
            config.smallest_gemm,
            f"no projection of {experiment.model.name} has so many inputs and outputs: the widest has {widest}, where "
            "casting may cost more than float8 gains",
            f"quantization.smallest_gemm={widest} takes it nevertheless, 0 takes all; or quantization=none",
        )
    else:
        yield Violation("quantization.filter", config.filter, "it leaves nothing to quantize", "quantization=none")


def dims_are_multiples(experiment: Experiment) -> Iterator[Violation]:
    """Every rank's part of a quantized weight has whole groups of numbers."""
    recipe, degree = experiment.quantization.recipe, experiment.parallelism.tp
    if not _is_known(experiment):
        return
    block, said = _multiple(experiment), set()
    for taken in _taken(experiment):
        if taken.name.endswith(".qkv") and experiment.model.kv_heads % degree:
            continue  # which is refused below
        for dim, size in (("inputs", taken.inputs), ("outputs", taken.outputs)):
            shared = degree if taken.divided == dim else 1
            kind = taken.name.split(".", 2)[2]
            if size % (block * shared) == 0 or size % shared or (kind, dim) in said:
                continue
            said.add((kind, dim))
            part = f", {size // shared} on each of parallelism.tp={degree} ranks" if shared > 1 else ""
            yield Violation(
                RECIPE,
                recipe,
                f"its dims are multiples of {block}, and {kind} has {size} {dim}{part}",
                f"quantization.filter=['*.{kind}'] leaves it in high precision; or another shape"
                + (" or parallelism.tp" if shared > 1 else "")
                + (
                    f"; or quantization.emulate=true, with multiples of {BLOCK[recipe]}"
                    if block > BLOCK[recipe]
                    else ""
                ),
            )


def tokens_are_multiples(experiment: Experiment) -> Iterator[Violation]:
    """Gradients of weights add up over a micro-batch's tokens, which are quantized in whole groups too."""
    recipe, training = experiment.quantization.recipe, experiment.training
    if recipe in ("none", "float8_rowwise_gw_hp"):
        return
    block, parts = _multiple(experiment), experiment.parallelism.cp
    tokens = ResolvedLayout.of(experiment).micro_batch_size * training.seq_len
    run, rest = divmod(training.seq_len, chunks_of_a_sequence(experiment))
    if recipe == "nvfp4" and rest == 0 and run % BLOCK[recipe]:
        among = f", of which a rank of parallelism.cp={parts} has runs of {run}" if parts > 1 else ""
        works = multiples_near(training.seq_len, BLOCK[recipe] * chunks_of_a_sequence(experiment))
        yield Violation(
            "training.seq_len",
            training.seq_len,
            f"nvfp4 transforms {BLOCK[recipe]} consecutive tokens of a sequence together{among}",
            f"nearest: training.seq_len={listed(works)}",
        )
        return
    if tokens and tokens % parts == 0 and tokens // parts % block:
        among = f" on each of parallelism.cp={parts} ranks" if parts > 1 else ""
        yield Violation(
            "training.seq_len",
            training.seq_len,
            f"{recipe} takes tokens in groups of {block}, and a micro-batch has {tokens // parts}{among}",
            f"nearest: training.seq_len={listed(multiples_near(training.seq_len, block * parts))}",
        )


def keys_are_whole(experiment: Experiment) -> Iterator[Violation]:
    """Where ranks share a key's head each has a part of its gradient, which would be rounded before parts are added."""
    model, degree = experiment.model, experiment.parallelism.tp
    if not _is_known(experiment) or model.kv_heads % degree == 0:
        return
    if any(taken.name.endswith(".qkv") for taken in _taken(experiment)):
        yield Violation(
            "parallelism.tp",
            degree,
            f"the {model.kv_heads} key and value heads serve several ranks each, and {experiment.quantization.recipe} "
            "would round every rank's part of their gradients by itself, which one device does not",
            f"a parallelism.tp that divides {model.kv_heads}, or quantization.filter=['*.qkv']",
        )


def options_are_of_the_recipe(experiment: Experiment) -> Iterator[Violation]:
    """What only one recipe can do is asked of that one."""
    config = experiment.quantization
    if config.recipe == "none":
        return
    if config.recipe == "mxfp8" and not config.power_of_two_scales:
        field = "quantization.power_of_two_scales"
        yield Violation(field, False, "a scale of the MX format is a power of two", f"{field}=true")
    if config.stochastic_rounding and config.recipe != "nvfp4":
        field = "quantization.stochastic_rounding"
        yield Violation(field, True, f"{config.recipe} rounds to the nearest", f"{field}=false, or quantization=nvfp4")
    if config.precomputed_scales and not config.whole_weight_scales:
        field = "quantization.precomputed_scales"
        reason = f"{config.recipe} has no scale for a whole weight"
        yield Violation(field, True, reason, f"{field}=false, or quantization=float8_tensorwise")
    if not config.float8_all_gather:
        return
    field, reason, remedy = "quantization.float8_all_gather", "", "quantization.float8_all_gather=false"
    if config.recipe != "float8_tensorwise":
        whole = "blocks of 16 by 16" if config.recipe == "nvfp4" else "rows or columns"
        reason = f"{config.recipe} needs a weight's {whole} whole to quantize it"
        remedy += ", or quantization=float8_tensorwise"
    elif not config.precomputed_scales:
        reason = "a shard alone does not know the scale of the whole weight"
        remedy = f"quantization.precomputed_scales=true, or {remedy}"
    elif experiment.parallelism.cpu_offload:
        reason = "offloaded weights are quantized after they have come to the GPU (parallelism.cpu_offload=true)"
    if reason:
        yield Violation(field, True, reason, remedy)


def emulation_is_possible(experiment: Experiment) -> Iterator[Violation]:
    """What is known before a device is looked at; GPUs are asked for their instructions when the run starts."""
    config, device = experiment.quantization, device_type(experiment.cluster)
    if config.recipe == "none":
        return
    if config.emulate is False and device == "cpu":
        reason = f"a CPU has no instructions for {config.recipe}"
        yield Violation("quantization.emulate", False, reason, "quantization.emulate=auto")
    precision = experiment.training.mixed_precision
    if config.recipe in ("mxfp8", "nvfp4") and config.emulate is not True and device == "cuda" and precision != "bf16":
        yield Violation(
            "training.mixed_precision",
            precision,
            f"the matmuls of {config.recipe} have results in bf16",
            "training.mixed_precision=bf16, or quantization.emulate=true",
        )


def one_precision_for_a_module(experiment: Experiment) -> Iterator[Violation]:
    """A module that computes in fp32 is not quantized too."""
    for pattern in experiment.training.fp32_modules:
        if not _is_known(experiment):
            return
        parts = (_modules_around(taken.name) for taken in _taken(experiment))
        inside = next((name for names in parts for name in names if fnmatchcase(name, pattern)), None)
        if inside is not None:
            yield Violation(
                "training.fp32_modules",
                pattern,
                f"{experiment.quantization.recipe} quantizes projections in {inside}",
                "leave it out, or keep them in high precision with quantization.filter or high_precision_first",
            )


def moments_are_adamws(experiment: Experiment) -> Iterator[Violation]:
    """Only of the built-in optimizer is it known which moments it has."""
    optimizer, field = experiment.optimizer, "optimizer.state_precision"
    precision = optimizer.state_precision
    if precision == "fp32":
        return
    if optimizer.name != "adamw":
        reason = f"it is about AdamW's moments, and optimizer.name is {optimizer.name}"
        yield Violation(field, precision, reason, f"{field}=fp32, or optimizer.name=adamw")
    elif precision != "bf16" and importlib.util.find_spec("torchao") is None:
        yield Violation(field, precision, "torchao is not installed", f"pip install torchao, or {field}=bf16")
    degree = experiment.parallelism.tp
    if precision == "bf16" or experiment.model.architecture not in ARCHITECTURES:
        return
    for each in projections(experiment.model):
        inputs = each.inputs
        blocks, rest = divmod(inputs, MOMENT_BLOCK)
        if each.divided == "inputs" and rest == 0 == inputs % degree and blocks % degree:
            kind = each.name.split(".", 2)[2]
            yield Violation(
                field,
                precision,
                f"moments are kept in blocks of {MOMENT_BLOCK} numbers of a row, and of the {inputs} inputs of {kind} "
                f"each of parallelism.tp={degree} ranks has {inputs // degree}",
                f"{field}=bf16, or a smaller parallelism.tp",
            )
            return


RULES = rules(
    engine_is_installed,
    filter_names_projections,
    something_is_quantized,
    dims_are_multiples,
    keys_are_whole,
    options_are_of_the_recipe,
    emulation_is_possible,
    one_precision_for_a_module,
    moments_are_adamws,
)
LAYOUT_RULES = rules(
    tokens_are_multiples,
)
"""Asked where there is a layout."""


def _is_known(experiment: Experiment) -> bool:
    """Whether there is a recipe, and a model whose projections are known; of others the ranks speak."""
    return experiment.quantization.recipe != "none" and experiment.model.architecture in ARCHITECTURES


def _taken(experiment: Experiment) -> Iterator[Projection]:
    config, layers = experiment.quantization, experiment.model.layers
    for each in projections(experiment.model):
        if is_quantized(config, layers, each.name, each.inputs, each.outputs):
            yield each


def _multiple(experiment: Experiment) -> int:
    """What dims and tokens are multiples of; of a GPU it is not known yet whether it has the instructions."""
    config = experiment.quantization
    instructed = config.emulate is not True and device_type(experiment.cluster) == "cuda"
    return NVFP4_TILE if config.recipe == "nvfp4" and instructed else BLOCK[config.recipe]


def _modules_around(name: str) -> Iterator[str]:
    """A module's name and those of what it is in, less the list of blocks."""
    parts = name.split(".")
    for end in range(2, len(parts) + 1):
        yield ".".join(parts[:end])
