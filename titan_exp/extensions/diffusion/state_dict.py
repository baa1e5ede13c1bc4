"""State-dict maps of a diffusion transformer for the names and fused weights of diffusers and Black Forest Labs.

Our weights hold queries, keys and values by head, with features in the order in which RoPE rotates halves; theirs
rotate neighbours. The output of our single block reads a head's attention and feed-forward side by side; theirs reads
the attention of all heads first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from titan_exp.models.convert.state_dict_map import RowRange, StateDictMap, half_split_rows
from titan_exp.models.spec.model_spec import LayerSpec, ModelSpec
from titan_exp.models.spec.tp_plan import FusedRows


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
