"""FLUX.1 (Black Forest Labs 2024): a diffusion transformer of double and single blocks, for rectified flow.

State-dict maps know the names and fused weights of diffusers and Black Forest Labs. Our weights hold queries, keys and
values by head, with features in the order in which RoPE rotates halves; theirs rotate neighbours. The output of our
single block reads a head's attention and feed-forward side by side; theirs reads the attention of all heads first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.extensions.diffusion.spec import DiffusionConfig, diffusion_spec, diffusion_violations
from titan_exp.models.convert.hf_config import Diffusers
from titan_exp.models.convert.state_dict_map import RowRange, StateDictMap, half_split_rows
from titan_exp.models.spec.model_spec import LayerSpec, ModelSpec
from titan_exp.models.spec.tp_plan import FusedRows

if TYPE_CHECKING:
    from torch import nn

    from titan_exp.extensions.diffusion.transformer import DiffusionTransformer
    from titan_exp.ops.attention.sdpa import AttentionBackend


@dataclass(frozen=True)
class Config(DiffusionConfig):
    """Shape of a FLUX.1."""


spec, violations = diffusion_spec, diffusion_violations


def block(config: Config, layer: int, backend: "AttentionBackend") -> "nn.Module":
    """Build a double or a single block."""
    from titan_exp.extensions.diffusion.transformer import DoubleBlock, SingleBlock

    kind = DoubleBlock if layer < config.double_layers else SingleBlock
    return kind(spec(config).layers[layer], config.norm_eps, backend)


def model(config: Config, *, seq_len: int, backend: "AttentionBackend") -> "DiffusionTransformer":
    """Build the model: blocks between embedded inputs and the modulated output."""
    from titan_exp.extensions.diffusion.transformer import DiffusionTransformer

    blocks = {layer: block(config, layer, backend) for layer in range(config.layers)}
    return DiffusionTransformer(config, blocks, seq_len=seq_len)


@dataclass(frozen=True)
class DiffusionNames:
    """Names in another tool, without `.weight` and `.bias`; one of our fused weights may be several of theirs."""

    double: str  # prefix of double blocks, `{}` for the number
    single: str  # prefix of single blocks, counted from 0
    norm: str  # name of a norm's weight inside the norm
    swaps_output: bool  # True if the last modulation is (scale, shift)
    parts: Mapping[str, str | tuple[str, ...]]
    """Their name by ours; double blocks are under `double.`, single blocks under `single.`."""


DIFFUSERS = DiffusionNames(
    double="transformer_blocks.{}",
    single="single_transformer_blocks.{}",
    norm="weight",
    swaps_output=True,
    parts={
        "inputs.image": "x_embedder",
        "inputs.text": "context_embedder",
        "inputs.time.hidden": "time_text_embed.timestep_embedder.linear_1",
        "inputs.time.out": "time_text_embed.timestep_embedder.linear_2",
        "inputs.guidance.hidden": "time_text_embed.guidance_embedder.linear_1",
        "inputs.guidance.out": "time_text_embed.guidance_embedder.linear_2",
        "inputs.pooled.hidden": "time_text_embed.text_embedder.linear_1",
        "inputs.pooled.out": "time_text_embed.text_embedder.linear_2",
        "output.modulation": "norm_out.linear",
        "output.linear": "proj_out",
        "double.image.modulation": "norm1.linear",
        "double.image.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "double.image.q_norm": "attn.norm_q",
        "double.image.k_norm": "attn.norm_k",
        "double.image.out": "attn.to_out.0",
        "double.image.up": "ff.net.0.proj",
        "double.image.down": "ff.net.2",
        "double.text.modulation": "norm1_context.linear",
        "double.text.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
        "double.text.q_norm": "attn.norm_added_q",
        "double.text.k_norm": "attn.norm_added_k",
        "double.text.out": "attn.to_add_out",
        "double.text.up": "ff_context.net.0.proj",
        "double.text.down": "ff_context.net.2",
        "single.modulation": "norm.linear",
        "single.qkv_up": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
        "single.q_norm": "attn.norm_q",
        "single.k_norm": "attn.norm_k",
        "single.out": "proj_out",
    },
)
"""Names of `FluxTransformer2DModel` in diffusers."""

BFL = DiffusionNames(
    double="double_blocks.{}",
    single="single_blocks.{}",
    norm="scale",
    swaps_output=False,
    parts={
        "inputs.image": "img_in",
        "inputs.text": "txt_in",
        "inputs.time.hidden": "time_in.in_layer",
        "inputs.time.out": "time_in.out_layer",
        "inputs.guidance.hidden": "guidance_in.in_layer",
        "inputs.guidance.out": "guidance_in.out_layer",
        "inputs.pooled.hidden": "vector_in.in_layer",
        "inputs.pooled.out": "vector_in.out_layer",
        "output.modulation": "final_layer.adaLN_modulation.1",
        "output.linear": "final_layer.linear",
        **{
            f"double.{ours}.{part}": f"{theirs}_{name}"
            for ours, theirs in (("image", "img"), ("text", "txt"))
            for part, name in (
                ("modulation", "mod.lin"),
                ("qkv", "attn.qkv"),
                ("q_norm", "attn.norm.query_norm"),
                ("k_norm", "attn.norm.key_norm"),
                ("out", "attn.proj"),
                ("up", "mlp.0"),
                ("down", "mlp.2"),
            )
        },
        "single.modulation": "modulation.lin",
        "single.qkv_up": "linear1",
        "single.q_norm": "norm.query_norm",
        "single.k_norm": "norm.key_norm",
        "single.out": "linear2",
    },
)
"""Names of Black Forest Labs' own files (`flux1-dev.safetensors`)."""
STATE_DICTS = {"diffusers": DIFFUSERS, "bfl": BFL}  # parameter names by checkpoint format


def state_dict_map(config: Config, form: str) -> StateDictMap:
    """State-dict map from another tool's tensors to our parameters."""
    return diffusion_map(spec(config), config.double_layers, STATE_DICTS[form])


def diffusion_map(spec: ModelSpec, double_layers: int, names: DiffusionNames) -> StateDictMap:
    """State-dict map of a diffusion transformer from another tool's tensors, in the order of our parameters."""
    runs: dict[str, tuple[RowRange, ...]] = {}
    their_shapes: dict[str, tuple[int, ...]] = {}
    for ours, shape in spec.shapes.items():
        module, _, kind = ours.rpartition(".")
        prefix, part, rows = "", module, None
        if module.startswith("blocks."):
            _, layer, inner = module.split(".", 2)
            number, single = int(layer), int(layer) - double_layers
            prefix = names.double.format(number) if single < 0 else names.single.format(single)
            prefix, part = f"{prefix}.", f"{'double' if single < 0 else 'single'}.{inner}"
            if not inner.endswith("_norm"):
                rows = spec.layers[number].linear(inner).rows
        theirs = names.parts[part]
        is_norm = part.endswith("_norm")
        full = [
            f"{prefix}{name}.{names.norm if is_norm else kind}"
            for name in ([theirs] if isinstance(theirs, str) else theirs)
        ]
        if is_norm:
            ranges = half_split_rows(0, shape[0], full[0], 0)
        elif rows is not None:
            ranges = _fused_ranges(rows, shape[0], full)
        elif part == "output.modulation" and names.swaps_output:
            half = shape[0] // 2
            ranges = (RowRange(0, half, full[0], half), RowRange(half, half, full[0], 0))
        else:
            ranges = (RowRange(0, shape[0], full[0], 0),)
        runs[ours] = tuple(ranges)
        for name in full:
            their_shapes[name] = (sum(run.rows for run in runs[ours] if run.name == name), *shape[1:])
    columns = {
        f"blocks.{number}.out.weight": tuple(_by_head(layer))
        for number, layer in enumerate(spec.layers)
        if number >= double_layers
    }
    return StateDictMap(runs, spec.shapes, their_shapes, {}, columns=columns)


def _by_head(layer: LayerSpec) -> Iterator[int]:
    """Column order of a single block's output, whose inputs are by head: their column for each of ours."""
    assert layer.attention is not None, "the layer has attention"
    heads, width = layer.attention.heads, layer.attention.v_dim
    channels = layer.linear("out").inputs // heads - width
    for head in range(heads):
        yield from range(head * width, (head + 1) * width)
        yield from range(heads * width + head * channels, heads * width + (head + 1) * channels)


def _fused_ranges(rows: FusedRows, outputs: int, names: Sequence[str]) -> Iterator[RowRange]:
    """Row ranges of projections by head, from one of their tensors per projection, or from a single one."""
    heads, start = outputs // rows.unit, 0
    for head in range(heads):
        before = 0
        for number, piece in enumerate(rows.pieces):
            name, first = (names[0], before) if len(names) == 1 else (names[number], 0)
            first += head * piece.width
            if piece.name in ("query", "key"):
                yield from half_split_rows(start, piece.width, name, first)
            else:
                yield RowRange(start, piece.width, name, first)
            start += piece.width
            before += heads * piece.width


def _to_config_json(config: Config) -> dict[str, Any]:
    return {
        "patch_size": 1,
        "in_channels": config.patch_dim,
        "out_channels": None,
        "num_layers": config.double_layers,
        "num_single_layers": config.layers - config.double_layers,
        "attention_head_dim": config.dim // config.heads,
        "num_attention_heads": config.heads,
        "joint_attention_dim": config.text_dim,
        "pooled_projection_dim": config.pooled_dim,
        "guidance_embeds": config.guidance_embedding,
        "axes_dims_rope": list(config.rope_axes),
    }


def _from_config_json(values: Mapping[str, Any], name: str) -> Config:
    guidance, double = bool(values.get("guidance_embeds", False)), int(values.get("num_layers", 19))
    heads, width = int(values.get("num_attention_heads", 24)), int(values.get("attention_head_dim", 128))
    text_tokens = 512 if guidance else 256  # as in the published pipelines; the file does not say
    return Config(
        name=name,
        architecture="flux",
        layers=double + int(values.get("num_single_layers", 38)),
        dim=heads * width,
        vocab_size=0,
        context=text_tokens + 4096,
        double_layers=double,
        heads=heads,
        patch_dim=int(values.get("in_channels", 64)),
        text_dim=int(values.get("joint_attention_dim", 4096)),
        text_tokens=text_tokens,
        pooled_dim=int(values.get("pooled_projection_dim", 768)),
        guidance_embedding=guidance,
        rope_axes=tuple(map(int, values.get("axes_dims_rope", (16, 56, 56)))),
        rope_theta=10_000.0,
        norm_eps=1e-6,
        init_std=0.02,
        attention_backend="auto",
    )


def _inexpressible(config: Config) -> Iterator[Violation]:
    for key, only in (("rope_theta", 10_000.0), ("norm_eps", 1e-6)):
        if (value := getattr(config, key)) != only:
            yield Violation(f"model.{key}", value, f"diffusers only has {only:g}", f"use model.{key}={only:g}")


diffusers = Diffusers(
    class_name="FluxTransformer2DModel",
    fixed={"patch_size": 1, "out_channels": None},
    to_config=_to_config_json,
    from_config=_from_config_json,
    violations=_inexpressible,
)
"""`config.json` of diffusers' Flux."""


def from_bfl_shapes(shapes: Mapping[str, tuple[int, ...]], name: str) -> Config:
    """Config from the shapes of Black Forest Labs' tensors. Raises UserError if they are not those of a FLUX.1."""

    def blocks(prefix: str) -> int:
        return len({key.split(".")[1] for key in shapes if key.startswith(prefix)})

    try:
        (dim, patch_dim), (_, text_dim) = shapes["img_in.weight"], shapes["txt_in.weight"]
        (_, pooled_dim), (width,) = shapes["vector_in.in_layer.weight"], shapes["single_blocks.0.norm.key_norm.scale"]
    except (KeyError, ValueError) as error:
        raise UserError(
            f"{name} does not hold the tensors of a FLUX.1 by Black Forest Labs: {error}. For files of Hugging Face, "
            "give their folder, which has a config.json."
        ) from error
    values = {
        "in_channels": patch_dim,
        "num_layers": blocks("double_blocks."),
        "num_single_layers": blocks("single_blocks."),
        "attention_head_dim": width,
        "num_attention_heads": dim // width,
        "joint_attention_dim": text_dim,
        "pooled_projection_dim": pooled_dim,
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
    }
    return _from_config_json(values, name)
