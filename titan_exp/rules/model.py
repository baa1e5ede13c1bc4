"""Model rules: shape, and attention kernel by device, package, precision, mask and head size (as of torch 2.13)."""

from collections.abc import Iterator

from titan_exp.config.errors.user_error import Violation, listed
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.torch_features import (
    ATTENTION_BACKEND,
    FLASH_PACKAGES,
    FLASH_WITH_LSE,
    HEAD_SIZES,
    LINEAR_ATTENTION_BACKEND,
    ON_CPU,
    efficient_multiple,
)
from titan_exp.models.spec.lookup import family_violations, token_mixing
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.rope import exceeds_context
from titan_exp.models.spec.transformer import MTP_DEPTH
from titan_exp.rules.rule import Refuse, check_multiple, rules


def family_supports_the_shape(model: ModelConfig) -> Iterator[Violation]:
    """The model family's own rules hold."""
    yield from family_violations(model)


def sequence_fits_context(spec: ModelSpec | None, model: ModelConfig, training: TrainingConfig) -> Iterator[Violation]:
    """Sequences are no longer than the model's context, or than its scaling reaches."""
    # A plain class has no spec and no such bound.
    if spec is not None:
        yield from exceeds_context(model, training.seq_len)


def kernel_is_installed(spec: ModelSpec) -> Iterator[Violation]:
    """The package of FlashAttention 3 or 4 is installed."""
    package = FLASH_PACKAGES.get(spec.attention_backend)
    if package is not None and not package.is_installed():
        reason = f"{package.title} is not installed (Python finds no module {package.module})"
        yield Violation(
            ATTENTION_BACKEND,
            spec.attention_backend,
            reason,
            f"{package.install}, or use {ATTENTION_BACKEND}=auto, cudnn or flash",
        )


def kernel_supports_head_size(spec: ModelSpec, training: TrainingConfig) -> Iterator[Violation]:
    """The CUDA kernel supports the head size."""
    multiple = efficient_multiple(bf16=training.mixed_precision == "bf16")
    table = HEAD_SIZES | ({"flash": FLASH_WITH_LSE} if spec.has_sinks else {})
    backend, sizes = spec.attention_backend, table.get(spec.attention_backend)
    for key, head_dim in spec.head_dims:
        if backend == "efficient":
            reason = f"on CUDA {ATTENTION_BACKEND}=efficient needs multiples of {multiple}"
            yield from check_multiple(key, head_dim, multiple, reason, f", or use {ATTENTION_BACKEND}=auto")
        if sizes is None or sizes.takes(head_dim):
            continue
        multiples = f"head sizes that are multiples of {sizes.multiple}, " if sizes.multiple > 1 else "head sizes "
        works = [name for name in ("fa3", "flash") if name != backend and table[name].takes(head_dim)]
        where = "on CUDA with attention sinks" if sizes is FLASH_WITH_LSE else "on CUDA"
        reason = f"{where} this kernel takes {multiples}up to {sizes.largest}, and {key} is {head_dim}"
        works += ["efficient"] if head_dim % multiple == 0 else []
        remedy = f"use {ATTENTION_BACKEND}={listed(['auto', *works, 'flex'])}"
        yield Violation(ATTENTION_BACKEND, backend, reason, remedy)


def tokens_are_mixed_by_attention(
    spec: ModelSpec, model: ModelConfig, data: DataConfig, parallelism: ParallelismConfig
) -> Iterator[Violation]:
    """No module beside attention mixes tokens, where it would see a part of them, or those of other documents."""
    in_parts, cp = parallelism.tp > 1 and parallelism.sequence_parallel, parallelism.cp
    found = token_mixing(model) if in_parts or cp > 1 or data.document_mask else None
    if found is None:
        return
    if in_parts:
        reason = f"{found}, which would see only the tokens of its own rank"
        yield Violation("parallelism.sequence_parallel", True, reason, "use parallelism.sequence_parallel=false")
    if cp > 1:
        reason = f"{found}, which would see only the tokens of its own rank"
        yield Violation("parallelism.cp", cp, reason, f"use parallelism.cp=1 parallelism.dp_shard={cp}")
    if data.document_mask:
        reason = f"{found}, which lets the documents of a row see each other"
        yield Violation("data.document_mask", True, reason, "use data.document_mask=false")


MODEL_RULES = (
    *rules(
        family_supports_the_shape,
        sequence_fits_context,
        tokens_are_mixed_by_attention,
        Refuse(
            MTP_DEPTH,
            lambda spec, training: spec.mtp_layers and len(spec.mtp_layers) >= training.seq_len,
            "with training.seq_len={training.seq_len} the last of these modules has no token left to predict",
            f"use {MTP_DEPTH}=1, as in DeepSeek V3, or longer sequences",
        ),
    ),
    *rules(
        Refuse(
            ATTENTION_BACKEND,
            lambda spec: spec.attention_backend == "flex",
            "FlexAttention has no backward pass on a CPU",
            f"use {ATTENTION_BACKEND}=auto, flash or math",
        ),
        Refuse(
            ATTENTION_BACKEND,
            lambda spec: spec.attention_backend not in ("flex", *ON_CPU),
            "this kernel runs on GPUs only, and this run trains on the CPU",
            f"use {ATTENTION_BACKEND}=auto, flash or math",
        ),
        Refuse(
            LINEAR_ATTENTION_BACKEND,
            lambda model: getattr(model, "linear_attention_backend", "") == "fla",
            "these kernels run on GPUs only, and this run trains on the CPU",
            f"use {LINEAR_ATTENTION_BACKEND}=auto or torch",
        ),
        when=lambda device: device == "cpu",
    ),
    *rules(
        kernel_is_installed,
        Refuse(
            ATTENTION_BACKEND,
            lambda spec, training: spec.attention_backend in HEAD_SIZES and training.mixed_precision == "fp32",
            "this kernel computes in bf16 only, and training.mixed_precision is fp32",
            f"use training.mixed_precision=bf16, or {ATTENTION_BACKEND}=auto",
        ),
        Refuse(
            ATTENTION_BACKEND,
            lambda spec, data: spec.attention_backend in ("flash", *FLASH_PACKAGES) and data.document_mask,
            "on CUDA this kernel takes no mask, and data.document_mask is true",
            f"use {ATTENTION_BACKEND}=auto, cudnn or flex, or data.document_mask=false",
        ),
        Refuse(
            ATTENTION_BACKEND,
            lambda spec, training: (
                spec.attention_backend in ("flash", *FLASH_PACKAGES) and spec.is_masked(training.seq_len)
            ),
            (
                "on CUDA this kernel takes no mask, and a layer of {model.name} has a window or chunks below "
                "training.seq_len"
            ),
            f"use {ATTENTION_BACKEND}=auto, efficient or flex",
        ),
        Refuse(
            ATTENTION_BACKEND,
            lambda spec: spec.attention_backend in ("cudnn", *FLASH_PACKAGES) and spec.has_sinks,
            "attention sinks need the log-sum-exp, and this kernel does not return it",
            f"use {ATTENTION_BACKEND}=auto, efficient or flex",
        ),
        Refuse(
            ATTENTION_BACKEND,
            lambda spec, training: spec.attention_backend == "cudnn" and training.deterministic,
            (
                "the backward pass of this kernel differs from run to run, so torch refuses it with "
                "training.deterministic=true"
            ),
            (
                f"use {ATTENTION_BACKEND}=auto, which takes flash, or efficient for masks, or use "
                "training.deterministic=false"
            ),
        ),
        kernel_supports_head_size,
        when=lambda device: device == "cuda",
    ),
)
