"""Diffusion transformer of double and single blocks (FLUX.1): config fields, spec and shape rules.

Double blocks have separate weights for text and image tokens, which meet in attention. Single blocks share weights
between both, and compute attention and feed-forward side by side. A conditioning vector per sequence (time, guidance,
pooled text) modulates every block.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from titan_exp.config.errors.user_error import Violation, divisors, listed, nearest_numbers
from titan_exp.config.groups.experiment import MAY_BE_MEANT, NO_CHANGE, ModelConfig
from titan_exp.config.groups.types import BlockCount, PositiveBlockCount, PositiveFloat, PositiveInt
from titan_exp.models.spec import model_spec
from titan_exp.models.spec import tp_plan as styles
from titan_exp.models.spec.mixers import AttentionSpec

if TYPE_CHECKING:
    from titan_exp.extensions.diffusion.samples import LatentBatch

FFN_RATIO = 4  # ratio of the feed-forward's width to the residual stream's
TIME_FEATURES = 256  # number of sines and cosines of a time or a guidance scale


@dataclass(frozen=True)
class DiffusionConfig(ModelConfig):
    """Fields of a diffusion transformer."""

    layers: PositiveBlockCount
    """Number of double and single blocks together. E.g. `model=flux_debug model.layers=6`."""
    dim: PositiveInt
    """Width of the residual stream. Feed-forwards are 4 times as wide.
    E.g. `model=flux_debug model.dim=96 model.rope_axes='[16,16,16]'`."""
    context: PositiveInt = field(metadata=MAY_BE_MEANT)
    """Longest sequence of text and image tokens. E.g. `model=flux_debug model.context=1024`."""
    double_layers: BlockCount
    """Number of first blocks that have weights of their own for text and image (double blocks).
    E.g. `model=flux_debug model.double_layers=1`."""
    heads: PositiveInt
    """Number of heads of queries, keys and values, each `dim / heads` wide.
    E.g. `model=flux_debug model.heads=4 model.rope_axes='[4,6,6]'`."""
    patch_dim: PositiveInt
    """Width of an image token: a patch of 2 x 2 pixels of a latent with 16 channels has 64 numbers.
    E.g. `model=flux_debug model.patch_dim=64`."""
    text_dim: PositiveInt
    """Width of the text encoder's states, one per text token. E.g. `model=flux_debug model.text_dim=64`."""
    text_tokens: PositiveInt
    """Number of text tokens of a sequence, padding included. They precede the image's.
    E.g. `model=flux_debug model.text_tokens=32`."""
    pooled_dim: PositiveInt
    """Width of the pooled text embedding, one per sequence. E.g. `model=flux_debug model.pooled_dim=48`."""
    guidance_embedding: bool
    """True if the model reads the guidance scale that it is distilled for, as FLUX.1 dev does.
    E.g. `model=flux_debug model.guidance_embedding=false`."""
    rope_axes: tuple[PositiveInt, ...]
    """Numbers of rotated features of a head by axis (index, row, column). Together they are the head's width.
    E.g. `model=flux_debug model.rope_axes='[4,14,14]'`."""
    rope_theta: PositiveFloat
    """Base of the frequencies of RoPE. E.g. `model=flux_debug model.rope_theta=1000`."""
    norm_eps: PositiveFloat
    """Epsilon of norms, which is added to the variance. E.g. `model=flux_debug model.norm_eps=1e-5`."""
    init_std: PositiveFloat = field(metadata=NO_CHANGE)
    """Standard deviation of the initial weights that embed time, guidance and pooled text. Others are Xavier's, and
    modulations and the output begin at zero. E.g. `model=flux_debug model.init_std=0.01`."""
    attention_backend: Literal["auto", "cudnn", "flash", "fa3", "fa4", "efficient", "math", "flex"] = field(
        metadata=NO_CHANGE
    )
    """Attention kernel, as for other families. E.g. `model=flux_debug model.attention_backend=math`."""


def diffusion_spec(config: DiffusionConfig) -> model_spec.ModelSpec:
    """Spec of a diffusion transformer."""
    single = config.layers - config.double_layers
    ends = tuple(tensor for linear in end_linears(config) for tensor in _tensors(linear))
    return model_spec.ModelSpec(
        (_double_layer(config),) * config.double_layers + (_single_layer(config),) * single,
        dim=config.dim,
        vocab_size=0,
        tied=False,
        norm_eps=config.norm_eps,
        embedding_std=config.init_std,
        attention_backend=config.attention_backend,
        ends=ends,
        stage_ends=model_spec.PipelinePlan(first=("inputs",), last=("output",), extra_tokens=1),
        per_sequence=True,
        inputs=LatentInputs(
            config.patch_dim, config.text_tokens, config.text_dim, config.pooled_dim, config.guidance_embedding
        ),
    )


def end_linears(config: DiffusionConfig) -> tuple[model_spec.LinearSpec, ...]:
    """Linear layers before and after the blocks."""
    dim, std = config.dim, config.init_std
    text, image = _spans(config)
    widths = {"time": TIME_FEATURES, "guidance": TIME_FEATURES, "pooled": config.pooled_dim}
    if not config.guidance_embedding:
        del widths["guidance"]
    embedders = [
        model_spec.LinearSpec(
            f"inputs.{name}.{part}", inputs, dim, std, styles.SEQUENCE_PARALLEL, bias=True, tokens=model_spec.ONCE
        )
        for name, width in widths.items()
        for part, inputs in (("hidden", width), ("out", dim))
    ]
    return (
        _linear("inputs.image", config.patch_dim, dim, image),
        _linear("inputs.text", config.text_dim, dim, text),
        *embedders,
        _linear("output.modulation", dim, 2 * dim, model_spec.ONCE, zero=True, tp=modulation_style(config)),
        _linear("output.linear", dim, config.patch_dim, image, zero=True),
    )


def diffusion_violations(config: DiffusionConfig) -> Iterator[Violation]:
    """Violations by numbers of blocks, heads and rotated features that the model cannot compute."""
    if config.vocab_size:
        reason = "a diffusion transformer reads states of text encoders instead of tokens"
        yield Violation("model.vocab_size", config.vocab_size, reason, "use model.vocab_size=0")
    if config.double_layers > config.layers:
        reason = f"the model has model.layers={config.layers} blocks, the single ones included"
        remedy = f"use model.double_layers={config.layers} or less"
        yield Violation("model.double_layers", config.double_layers, reason, remedy)
    if config.dim % config.heads:
        reason = f"it must divide model.dim={config.dim}"
        near = listed(nearest_numbers(config.heads, divisors(config.dim)))
        yield Violation("model.heads", config.heads, reason, f"nearest: model.heads={near}")
    elif sum(config.rope_axes) != config.dim // config.heads or any(width % 2 for width in config.rope_axes):
        reason = f"the axes rotate pairs of features, and all {config.dim // config.heads} features of a head"
        remedy = f"use even widths that sum to {config.dim // config.heads}, such as [16,56,56] for 128"
        yield Violation("model.rope_axes", config.rope_axes, reason, remedy)
    elif len(config.rope_axes) != 3:
        reason = "positions have three axes: index, row and column"
        yield Violation("model.rope_axes", config.rope_axes, reason, "use three widths, such as [16,56,56] for 128")


def _double_layer(config: DiffusionConfig) -> model_spec.LayerSpec:
    dim, rows, channels = config.dim, styles.FusedRows("attention", _projections(config)), FFN_RATIO * config.dim
    up = styles.Colwise(channels, described=f"{channels} feed-forward channels ({FFN_RATIO} by model.dim)")
    modulations, linears, vectors = modulation_style(config), [], []
    for name, tokens in zip(("text", "image"), _spans(config), strict=True):
        linears += [
            _linear(f"{name}.modulation", dim, 6 * dim, model_spec.ONCE, zero=True, tp=modulations),
            _linear(f"{name}.qkv", dim, 3 * dim, tokens, rows=rows, tp=_by_heads(config)),
            _linear(f"{name}.out", dim, dim, tokens, writes_residual=True, tp=styles.Rowwise()),
            _linear(f"{name}.up", dim, channels, tokens, tp=up),
            _linear(f"{name}.down", channels, dim, tokens, writes_residual=True, tp=styles.Rowwise()),
        ]
        vectors += _head_norms(config, name)
    return model_spec.LayerSpec(_attention(config), tuple(linears), tuple(vectors))


def _single_layer(config: DiffusionConfig) -> model_spec.LayerSpec:
    dim, ratio = config.dim, FFN_RATIO
    up = styles.RowPiece("up", ratio * dim // config.heads)
    rows = styles.FusedRows("attention", (*_projections(config), up))
    linears = (
        _linear("modulation", dim, 3 * dim, model_spec.ONCE, zero=True, tp=modulation_style(config)),
        _linear("qkv_up", dim, (3 + ratio) * dim, rows=rows, tp=_by_heads(config)),
        _linear("out", (1 + ratio) * dim, dim, writes_residual=True, tp=styles.Rowwise()),
    )
    return model_spec.LayerSpec(_attention(config), linears, tuple(_head_norms(config)))


def _attention(config: DiffusionConfig) -> AttentionSpec:
    width = config.dim // config.heads
    return AttentionSpec(
        config.heads, config.heads, qk_dim=width, v_dim=width, qk_dim_key="model.dim / model.heads", causal=False
    )


def modulation_style(config: DiffusionConfig) -> styles.Colwise:
    """Tensor-parallel sharding of a modulation; modulations hold a quarter of FLUX.1's parameters."""
    return replace(_by_heads(config), vector=True)


def _by_heads(config: DiffusionConfig) -> styles.Colwise:
    return styles.Colwise(config.heads, described=f"{config.heads} heads (model.heads)", key="model.heads")


def _projections(config: DiffusionConfig) -> tuple[styles.RowPiece, ...]:
    return tuple(styles.RowPiece(name, config.dim // config.heads) for name in ("query", "key", "value"))


def _head_norms(config: DiffusionConfig, name: str = "") -> list[model_spec.VectorSpec]:
    prefix = f"{name}." if name else ""
    width = config.dim // config.heads
    return [model_spec.VectorSpec(f"{prefix}{norm}", width, styles.HeadParallel()) for norm in ("q_norm", "k_norm")]


def _spans(config: DiffusionConfig) -> tuple[model_spec.TokenSpan, model_spec.TokenSpan]:
    """Spans of text tokens, then of image tokens."""
    return model_spec.TokenSpan(stop=config.text_tokens), model_spec.TokenSpan(start=config.text_tokens)


def _linear(
    name: str,
    inputs: int,
    outputs: int,
    tokens: model_spec.TokenSpan = model_spec.EVERY_TOKEN,
    *,
    zero: bool = False,
    rows: styles.FusedRows | None = None,
    writes_residual: bool = False,
    tp: styles.Colwise | styles.Rowwise | styles.SequenceParallel = styles.SEQUENCE_PARALLEL,
) -> model_spec.LinearSpec:
    """Linear layer with a bias, and weights with Xavier's standard deviation (Glorot and Bengio 2010) or zero."""
    std = 0.0 if zero else (2 / (inputs + outputs)) ** 0.5
    return model_spec.LinearSpec(
        name, inputs, outputs, std, tp, rows=rows, bias=True, writes_residual=writes_residual, tokens=tokens
    )


def _tensors(linear: model_spec.LinearSpec) -> tuple[model_spec.TensorSpec, model_spec.TensorSpec]:
    weight = model_spec.TensorSpec(
        f"{linear.name}.weight", (linear.outputs, linear.inputs), in_matmul=True, tokens=linear.tokens
    )
    return weight, model_spec.TensorSpec(f"{linear.name}.bias", (linear.outputs,))


@dataclass(frozen=True)
class LatentInputs(model_spec.ModelInputs):
    """Inputs of a model of latents: noisy image tokens and the states of their texts. Sizes go by the key of the
    model's configuration."""

    positional: ClassVar[tuple[str, ...]] = ("image", "text")
    named: ClassVar[tuple[str, ...]] = ("pooled", "times", "positions", "guidance")
    trained_by: ClassVar[str] = "training.objective=rectified_flow data=latents data.paths='[STORE]'"
    makes: ClassVar[str] = "images"

    patch_dim: int  # elements per image token
    text_tokens: int  # text tokens per sample; the rest of a sequence is image tokens
    text_dim: int  # width of their states
    pooled_dim: int  # width of a text's pooled embedding
    guidance: bool  # True if the model reads a guidance scale

    def streams(self, seq_len: int) -> tuple[int, ...]:
        text = min(self.text_tokens, seq_len)
        return text, seq_len - text

    def example(self, rows: int, seq_len: int) -> "LatentBatch":
        import torch

        from titan_exp.extensions.diffusion.samples import LatentBatch

        text, image = self.streams(seq_len)
        states, pooled = torch.zeros(rows, text, self.text_dim), torch.zeros(rows, self.pooled_dim)
        latents, number = torch.zeros(rows, image, self.patch_dim), torch.zeros(rows)
        positions = torch.zeros(rows, seq_len, 3, dtype=torch.int64)
        samples, guidance = torch.zeros(rows, dtype=torch.int64), number.clone() if self.guidance else None
        drawn = {"noise": latents.clone(), "times": number.clone(), "guidance": guidance}
        return LatentBatch(latents, states, pooled, states[:1], pooled[:1], positions, samples, number, **drawn)


def latent_inputs(spec: model_spec.ModelSpec | None) -> LatentInputs | None:
    """Inputs of a model of latents; None for other models."""
    return spec.inputs if spec is not None and isinstance(spec.inputs, LatentInputs) else None
