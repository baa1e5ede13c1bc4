"""Encode captioned images into a latent store, for training a diffusion model."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titan_exp.config.command_line.options import HELP, options_help, parse_options
from titan_exp.config.command_line.verb_options import EncodeOptions
from titan_exp.config.errors.user_error import UserError, Violation

if TYPE_CHECKING:
    from titan_exp.data.images.captioned_images import CaptionedImages
    from titan_exp.data.latent_store.writer import Encoders, StoreOptions

USAGE = """\
titan-exp encode images=KIND out=STORE [paths=...] [size=...]
  for example: titan-exp encode images=emoji out=stores/emoji
               titan-exp encode images=folder paths=photos out=stores/photos size=48 max_aspect=2
               titan-exp encode images=webdataset paths='shards/*.tar' out=stores/web latents=flux/vae texts=flux"""


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    if set(argv) & set(HELP):
        print(options_help(USAGE, EncodeOptions), end="")
        return 0
    options = parse_options(EncodeOptions, argv, positional=[])
    if not options.out:
        raise UserError(
            "This cannot be encoded.", [Violation("out", "", "no folder is given", f"out=stores/{options.images}")]
        )
    from rich.console import Console
    from rich.progress import Progress

    from titan_exp.data.latent_store.writer import write_latent_store

    encoders = _encoders(options)
    token_size = encoders.images.token_size
    if options.size % token_size:
        near = max(1, round(options.size / token_size)) * token_size
        violation = Violation(
            "size", options.size, f"image tokens are {token_size} pixels wide", f"nearest: size={near}"
        )
        raise UserError("This cannot be encoded.", [violation])
    images = _images(options)
    out, console = Path(options.out).expanduser(), Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("images", total=len(images))
        manifest = write_latent_store(
            out, images, encoders, _store_options(options), lambda done, _: bar.update(task, completed=done)
        )
    samples = manifest.samples
    print(
        f"{options.out}: {images.name}; {samples['train']:,} samples to train on and {samples['validation']:,} held "
        f"out, each of {manifest.text_tokens} text and {manifest.rows * manifest.columns} image tokens"
    )
    print(f"To train from it: titan-exp train +experiment=flux_laptop data.paths='[{options.out}]'")
    return 0


def _images(options: EncodeOptions) -> "CaptionedImages":
    match options.images:
        case "emoji":
            from titan_exp.data.images.emoji import EmojiImages

            return EmojiImages(options.size)
        case "glyphs":
            from titan_exp.data.images.glyphs import GlyphImages

            return GlyphImages(options.size)
        case "folder":
            from titan_exp.data.images.folder import FolderImages

            return FolderImages(options.paths, options.caption_key)
        case "webdataset":
            from titan_exp.data.images.webdataset import WebDatasetImages

            return WebDatasetImages(options.paths, options.caption_key)
        case "huggingface":
            from titan_exp.data.images.huggingface import HuggingFaceImages

            return HuggingFaceImages(options.paths, options.split, options.image_key, options.caption_key)


def _encoders(options: EncodeOptions) -> "Encoders":
    from titan_exp.data.latent_store.autoencoder import Autoencoder
    from titan_exp.data.latent_store.hashed_words import HashedWords
    from titan_exp.data.latent_store.pixels import Pixels
    from titan_exp.data.latent_store.t5_and_clip import T5AndCLIP
    from titan_exp.data.latent_store.writer import Encoders

    hashed, tokens = options.texts == "hashed_words", options.text_tokens
    return Encoders(
        Pixels(options.patch) if options.latents == "pixels" else Autoencoder(options.latents),
        HashedWords(tokens, options.text_dim, options.pooled_dim, options.seed)
        if hashed
        else T5AndCLIP(options.texts, tokens),
    )


def _store_options(options: EncodeOptions) -> "StoreOptions":
    from titan_exp.data.latent_store.writer import StoreOptions

    return StoreOptions(
        size=options.size,
        max_aspect=options.max_aspect,
        validation_fraction=options.validation_fraction,
        shard_samples=options.shard_samples,
        dtype=options.dtype,
        seed=options.seed,
    )
