"""Latent format: encoders and sizes of samples, from a store's manifest or from options, without loading an encoder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.images.image_options import ImageOptions
from titan_exp.config.paths.foreign_json import count, items, read_object
from titan_exp.config.paths.noted_keys import NotedKeys, named_errors

PIXELS, AUTOENCODER, HASHED_WORDS, T5_AND_CLIP = "pixels", "autoencoder_kl", "hashed_words", "t5_and_clip"
"""Names of encoders."""
COLOURS = 3
"""Red, green and blue."""
LATENT_PATCH = 2
"""Height and width of a token in latent pixels of an autoencoder."""
TEXT_FOLDERS = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
"""Subfolders of a FLUX.1 pipeline, as diffusers saves it: CLIP, then T5."""


@dataclass(frozen=True, kw_only=True)
class LatentFormat:
    """Encoders of images and texts, and the sizes of a sample."""

    latents: Mapping[str, Any]
    """Encoder of images: its name and arguments."""
    texts: Mapping[str, Any]
    """Encoder of texts: its name and arguments."""
    rows: int
    """Rows of image tokens of a square image."""
    columns: int
    """Columns of image tokens of a square image."""
    channels: int
    """Features of an image token."""
    text_tokens: int
    """Text tokens of a sample."""
    text_dim: int
    """Width of their states."""
    pooled_dim: int
    """Width of a pooled embedding."""

    @property
    def tokens(self) -> int:
        """Text and image tokens of a sample."""
        return self.text_tokens + self.rows * self.columns


def latent_format(options: ImageOptions) -> LatentFormat:
    """Format of samples of these options.

    Raises:
        UserError: the folder of an encoder lacks files, or the size is no multiple of a token's.
    """
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
        raise UserError("This cannot be encoded.", [violation])
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
    """Configuration of the AutoencoderKL in a folder.

    Raises:
        UserError: there is none.
    """
    path = Path(folder).expanduser()
    remedy = "the folder vae of a FLUX.1 pipeline, or latents=pixels"
    if (path / "config.json").is_file():
        config = _config(path, "latents", folder)
        if (kind := config.get("_class_name", "AutoencoderKL")) == "AutoencoderKL":
            return config
        reason = f"it is a {kind}, not an AutoencoderKL"
    elif (path / "vae" / "config.json").is_file():
        reason, remedy = "it is a whole pipeline", f"latents={folder}/vae"
    else:
        reason = "it has no config.json" if path.is_dir() else "no such folder"
    raise UserError("The images cannot be coded.", [Violation("latents", folder, reason, remedy)])


def autoencoder_description(folder: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Entry `latents` of a manifest, with the shift and scale of the configuration."""
    noted = NotedKeys(config)
    with named_errors(noted, f"{folder}/config.json", "an AutoencoderKL's"):
        shift, scale = float(noted.get("shift_factor") or 0), float(noted.get("scaling_factor", 0.18215))
    return {"name": AUTOENCODER, "folder": absolute(folder), "shift": shift, "scale": scale, "posterior": True}


def absolute(folder: str) -> str:
    """Absolute path of an encoder's folder, by which every working directory finds it."""
    return str(Path(folder).expanduser().absolute())


def text_folders(folder: str) -> list[Path]:
    """Subfolders of a FLUX.1 pipeline: CLIP, its tokenizer, T5, and its tokenizer.

    Raises:
        UserError: one is missing.
    """
    found = [Path(folder).expanduser() / name for name in TEXT_FOLDERS]
    if missing := [path.name for path in found if not path.is_dir()]:
        reason = f"it lacks {', '.join(missing)}" if found[0].parent.is_dir() else "no such folder"
        remedy = f"the folder of a FLUX.1 pipeline of diffusers, with {', '.join(TEXT_FOLDERS)}; or texts=hashed_words"
        raise UserError("The texts cannot be encoded.", [Violation("texts", folder, reason, remedy)])
    return found


def _config(path: Path, field: str, folder: str) -> Mapping[str, Any]:
    try:
        return read_object(path / "config.json")
    except UserError as error:
        reason, remedy = str(error), "the folder as diffusers saves it"
        raise UserError("A frozen network cannot be used.", [Violation(field, folder, reason, remedy)]) from error
