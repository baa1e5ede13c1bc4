"""FLUX.1 (Black Forest Labs 2024): a diffusion transformer of double and single blocks, for rectified flow."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.extensions.diffusion.spec import DiffusionConfig, diffusion_spec, diffusion_violations
from titan_exp.extensions.diffusion.state_dict import BFL, DIFFUSERS, diffusion_map
from titan_exp.models.convert.hf_config import Diffusers
from titan_exp.models.convert.state_dict_map import StateDictMap

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


STATE_DICTS = {"diffusers": DIFFUSERS, "bfl": BFL}  # parameter names by checkpoint format


def state_dict_map(config: Config, form: str) -> StateDictMap:
    """State-dict map from another tool's tensors to our parameters."""
    return diffusion_map(spec(config), config.double_layers, STATE_DICTS[form])


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
