"""CUDA graphs: options under which a forward and backward pass can be captured and replayed."""

from collections.abc import Iterator

from titan_exp.config.errors.did_you_mean import listed
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.activation_checkpoint import CompileConfig
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.config.groups.quantization import QuantizationConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.layout.axes import DEGREES
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.spec.lookup import attention_backend, model_spec
from titan_exp.rules.rule import rules

BACKENDS = ("inductor", "aot_eager", "eager")
"""Backends of torch.compile that capture no graphs themselves."""
KERNELS = ("auto", "cudnn", "flash", "efficient", "math")
"""Attention kernels of torch itself, mask included."""
RECIPES = ("none", "float8_tensorwise", "float8_rowwise", "float8_rowwise_gw_hp")
"""Recipes whose casts are torch's or ours."""

_FIELD = "compile.cuda_graphs"
_WITHOUT = f"{_FIELD}=false"


def device_is_a_gpu(device: str) -> Iterator[Violation]:
    """A GPU executes the pass."""
    if device == "cpu":
        yield _refused("a CUDA graph records GPU work, and this run is on a CPU")


def weights_stay_in_place(parallelism: ParallelismConfig, training: TrainingConfig) -> Iterator[Violation]:
    """No weight is copied to another address in each pass."""
    if parallelism.cpu_offload:
        yield _refused(
            "parallelism.cpu_offload copies weights from CPU memory to another address in every pass",
            "parallelism.cpu_offload=false",
        )
    if training.fp32_modules:
        yield _refused(
            "training.fp32_modules keeps modules in fp32 by FSDP, which gathers weights to another address in every "
            "pass",
            "training.fp32_modules=[]",
        )


def compiler_captures_no_graphs(compile: CompileConfig) -> Iterator[Violation]:
    """The compile backend captures no graphs of its own."""
    if compile.enabled and compile.backend not in BACKENDS:
        yield _refused(
            f"compile.backend={compile.backend} may capture graphs of its own", f"compile.backend={listed(BACKENDS)}"
        )


def host_computes_nothing(model: ModelConfig, quantization: QuantizationConfig) -> Iterator[Violation]:
    """Model, attention kernel and casts read nothing on the host, and treat all tokens alike."""
    if model_spec(model) is None:
        yield _refused(
            f"a capture is valid if a pass does the same for all tokens, which is unknown of {model.architecture}",
            "model.architecture=llama",
        )
    kernel = attention_backend(model)
    if kernel not in KERNELS:
        reason = f"the host work of model.attention_backend={kernel} in each pass is unknown"
        yield _refused(reason, f"model.attention_backend={listed(KERNELS)}")
    if quantization.recipe not in RECIPES:
        reason = f"the host work of the casts of quantization.recipe={quantization.recipe} is unknown"
        yield _refused(reason, f"quantization={listed(RECIPES)}")


def one_rank_captures(parallelism: ParallelismConfig, layout: ResolvedLayout) -> Iterator[Violation]:
    """One rank, so that a pass has no collectives and no gathered weights."""
    if layout.world_size > 1:
        degrees = {key: getattr(parallelism, key) for key in DEGREES}
        used = ", ".join(f"{key}={degree}" for key, degree in degrees.items() if degree > 1)
        yield _refused(
            f"there are {layout.world_size} ranks (parallelism: {used}); sharded weights are gathered to another "
            "address in every pass, and captured collectives are untested",
            "one rank: parallelism.dp_shard=1 and every other degree 1",
        )


def _refused(reason: str, remedy: str = "") -> Violation:
    return Violation(_FIELD, True, reason, f"{_WITHOUT}, or {remedy}" if remedy else _WITHOUT)


def _are_on(compile: CompileConfig) -> bool:
    return compile.cuda_graphs


RULES = rules(device_is_a_gpu, weights_stay_in_place, compiler_captures_no_graphs, host_computes_nothing, when=_are_on)
LAYOUT_RULES = rules(one_rank_captures, when=_are_on)
