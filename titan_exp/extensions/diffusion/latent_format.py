"""Latent format: encoders and sizes of samples, from options or from a store's manifest, without loading an encoder.

A shard consists of NAME.captions.json and arrays with one row per sample: NAME.latents.npy [samples, image tokens,
channels], NAME.text.npy [samples, text tokens, text_dim] and NAME.pooled.npy [samples, pooled_dim]. Latents of an
autoencoder are means, and NAME.deviations.npy has standard deviations. `empty.text.npy` and `empty.pooled.npy` are the
states of the empty text.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from titan_exp.config.data_files import Field, Shard, StoreManifest
from titan_exp.config.errors.user_error import UserError, Violation, listed
from titan_exp.config.foreign_file import NotedKeys, count, digests, items, named_errors, read_object, table, text
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.schema.typed_config import typed_options
from titan_exp.extensions.diffusion.config import ImageOptions, ImageSource

PIXELS, AUTOENCODER, HASHED_WORDS, T5_AND_CLIP = "pixels", "autoencoder_kl", "hashed_words", "t5_and_clip"
"""Names of encoders."""
COLOURS = 3  # red, green and blue
LATENT_PATCH = 2  # height and width of a token, in latent pixels of an autoencoder
TEXT_FOLDERS = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
"""Subfolders of a FLUX.1 pipeline, as diffusers saves it: CLIP, then T5."""


@dataclass(frozen=True, kw_only=True)
class LatentFormat:
    """Encoders of images and texts by name and arguments, and the sizes of a sample: a square image has `rows` by
    `columns` tokens of `channels` features, and its text `text_tokens` states of `text_dim` and one of `pooled_dim`."""

    latents: Mapping[str, Any]
    texts: Mapping[str, Any]
    rows: int
    columns: int
    channels: int
    text_tokens: int
    text_dim: int
    pooled_dim: int

    @property
    def tokens(self) -> int:
        """Text and image tokens of a sample."""
        return self.text_tokens + self.rows * self.columns

    def shard_fields(self, dtype: str, samples: int, rows: int, columns: int) -> list[Field]:
        """Fields of a shard; standard deviations exist if there is a posterior, and then the latents are its means."""
        latents = (samples, rows * columns, self.channels)
        shapes = {
            "latents": latents,
            "text": (samples, self.text_tokens, self.text_dim),
            "pooled": (samples, self.pooled_dim),
            **({"deviations": latents} if self.latents.get("posterior") else {}),
        }
        return [Field(f"{name}.npy", DTYPES.get(dtype, "<f4"), shape) for name, shape in shapes.items()]


def latent_format(options: ImageOptions) -> LatentFormat:
    """Format of samples with these options. Raises UserError if the folder of an encoder lacks files, or the size is
    not a multiple of a token's."""
    if options.latents == PIXELS:
        token_size, channels = options.patch, COLOURS * options.patch**2
        latents: Mapping[str, Any] = {"name": PIXELS, "patch": options.patch}
    else:
        config = autoencoder_config(options.latents)
        levels = len(items(config.get("block_out_channels", [64]), f"{options.latents}: block_out_channels"))
        token_size = LATENT_PATCH * 2 ** min(max(levels - 1, 0), 16)
        channels = count(config.get("latent_channels", 4), f"{options.latents}: latent_channels", 2**20)
        channels *= LATENT_PATCH**2
        latents = autoencoder_description(options.latents, config)
    if options.size % token_size:
        near = max(1, round(options.size / token_size)) * token_size
        reason = f"image tokens are {token_size} pixels wide"
        violation = Violation("size", options.size, reason, f"nearest: size={near}")
        raise UserError("We cannot encode this.", [violation])
    text_dim, pooled_dim = options.text_dim, options.pooled_dim
    texts: Mapping[str, Any] = {"name": HASHED_WORDS, "seed": options.seed}
    if options.texts != HASHED_WORDS:
        clip, _, t5, _ = text_folders(options.texts)
        texts = {"name": T5_AND_CLIP, "folder": absolute(options.texts)}
        text_dim = count(_config(t5, "texts", options.texts).get("d_model", 512), f"{t5}: d_model", 2**20)
        pooled_dim = count(_config(clip, "texts", options.texts).get("hidden_size", 512), f"{clip}: hidden_size", 2**20)
    side = options.size // token_size
    return LatentFormat(
        latents=latents,
        texts=texts,
        rows=side,
        columns=side,
        channels=channels,
        text_tokens=options.text_tokens,
        text_dim=text_dim,
        pooled_dim=pooled_dim,
    )


def autoencoder_config(folder: str) -> Mapping[str, Any]:
    """Configuration of the AutoencoderKL in a folder. Raises UserError if there is none."""
    path = Path(folder).expanduser()
    remedy = "give the folder vae of a FLUX.1 pipeline, or use latents=pixels"
    if (path / "config.json").is_file():
        config = _config(path, "latents", folder)
        if (kind := config.get("_class_name", "AutoencoderKL")) == "AutoencoderKL":
            return config
        reason = f"it is a {kind}, not an AutoencoderKL"
    elif (path / "vae" / "config.json").is_file():
        reason, remedy = "it is a whole pipeline", f"use latents={folder}/vae"
    else:
        reason = "it has no config.json" if path.is_dir() else "there is no such folder"
    raise UserError("We cannot encode or decode images.", [Violation("latents", folder, reason, remedy)])


def autoencoder_description(folder: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Entry `latents` of a manifest, with the shift and scale of the configuration."""
    noted = NotedKeys(config)
    with named_errors(noted, f"{folder}/config.json", "an AutoencoderKL's"):
        shift, scale = float(noted.get("shift_factor") or 0), float(noted.get("scaling_factor", 0.18215))
    return {"name": AUTOENCODER, "folder": absolute(folder), "shift": shift, "scale": scale, "posterior": True}


def absolute(folder: str) -> str:
    """Absolute path of an encoder's folder, so that every working directory finds it."""
    return str(Path(folder).expanduser().absolute())


def text_folders(folder: str) -> list[Path]:
    """Subfolders of a FLUX.1 pipeline: CLIP, its tokenizer, T5, and its tokenizer. Raises UserError if one is
    missing."""
    found = [Path(folder).expanduser() / name for name in TEXT_FOLDERS]
    if missing := [path.name for path in found if not path.is_dir()]:
        reason = f"it lacks {', '.join(missing)}" if found[0].parent.is_dir() else "there is no such folder"
        remedy = f"give the folder of a FLUX.1 pipeline of diffusers, with {listed(TEXT_FOLDERS, 'and')}, or use "
        remedy += "texts=hashed_words"
        raise UserError("We cannot encode the texts.", [Violation("texts", folder, reason, remedy)])
    return found


def _config(path: Path, field: str, folder: str) -> Mapping[str, Any]:
    try:
        return read_object(path / "config.json")
    except UserError as error:
        reason, remedy = str(error), "give the folder as diffusers saves it"
        raise UserError("We cannot use this frozen network.", [Violation(field, folder, reason, remedy)]) from error


SIZES = ("rows", "columns", "channels", "text_tokens", "text_dim", "pooled_dim")  # sizes in a latent format
DTYPES = {"fp16": "<f2", "fp32": "<f4"}  # types of arrays by option


@dataclass(frozen=True, kw_only=True)
class LatentManifest(LatentFormat, StoreManifest):
    """Manifest of a complete latent store; a shard has `samples` samples of `rows` by `columns` image tokens."""

    store = "latent store"
    verb = "encode"
    example = "write one: titan-exp encode images=emoji out={folder} (or images=glyphs, which needs no font)"
    numbers = ("samples", "rows", "columns")
    repair = "titan-exp encode check={folder} checks the whole store. Then copy or encode it again"
    images: str  # source of the images, and their size in pixels
    options: Mapping[str, Any]  # options of shapes, of the split, of the shards and of the order of samples

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **{key: count(values.get(key), key, 2**31) for key in SIZES},
            **{key: table(values.get(key), key) for key in ("latents", "texts", "options")},
            "images": text(values.get("images"), "images"),
            "files": digests(values.get("files", {}), "files"),
        }

    @cached_property
    def samples(self) -> dict[str, int]:
        return self.total("samples")

    def fields(self, shard: Shard) -> list[Field]:
        return self.shard_fields(str(self.options.get("dtype")), **shard.numbers)


read_latent_manifest = LatentManifest.read


_KEYS = {field.name: f"data.{field.name}" for field in fields(ImageSource)}
_KEYS |= {field.name: f"data.options.{field.name}" for field in fields(ImageOptions)}


def format_of(data: DataConfig) -> LatentFormat:
    """Format of the samples of a source that holds latents. Raises UserError if the store cannot be used, or the
    options do not fit."""
    if data.source == "latents":
        return read_latent_manifest(data.paths[0])
    options = image_options(data)
    with in_keys_of_data():
        return latent_format(options)


def image_options(data: DataConfig) -> ImageOptions:
    """Typed `data.options` of images. Raises UserError if a name or a value does not fit."""
    return typed_options(ImageOptions, data.options, "data.options")


@contextmanager
def in_keys_of_data() -> Iterator[None]:
    """Replace option names of `titan-exp encode` in errors by their keys in the data group."""

    def named(option: re.Match[str]) -> str:
        return _KEYS.get(option[0], option[0])

    try:
        yield
    except UserError as error:
        found = [
            replace(each, field=_KEYS.get(each.field, each.field), remedy=re.sub(r"\w+(?==)", named, each.remedy))
            for each in error.violations
        ]
        raise UserError("We cannot use these images.", found) from error
