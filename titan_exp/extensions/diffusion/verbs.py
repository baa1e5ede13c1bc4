"""Verb `encode`, which imports torch when it runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titan_exp.config.command_line.options import HELP, options_help, parse_options, require_alone
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.extensions.diffusion.config import EncodeOptions

if TYPE_CHECKING:
    from titan_exp.extensions.diffusion.latent_format import LatentFormat, LatentManifest

EXPERIMENT = "flux_laptop"  # name of the experiment that trains from a store
USAGE = """\
titan-exp encode images=KIND out=STORE [paths=...] [size=...]
  for example: titan-exp encode images=emoji out=stores/emoji
               titan-exp encode images=folder paths=photos out=stores/photos size=48 max_aspect=2
               titan-exp encode images=webdataset paths='shards/*.tar' out=stores/web latents=flux/vae texts=flux
               titan-exp encode check=stores/emoji"""


def encode(argv: Sequence[str]) -> int:
    """Encode captioned images into a latent store, for training a diffusion model."""
    if set(argv) & set(HELP):
        print(options_help(USAGE, EncodeOptions), end="")
        return 0
    options = parse_options(EncodeOptions, argv, positional=[])
    if options.check:
        require_alone("check", options.check, argv)
        return _check(options.check)
    if not options.out:
        raise UserError(
            "We cannot encode this.",
            [Violation("out", "", "you named no folder for the store", f"use out=stores/{options.images}")],
        )
    from rich.progress import Progress

    from titan_exp.config.command_line.terminal import Terminal
    from titan_exp.extensions.diffusion.encoders import Encoders
    from titan_exp.extensions.diffusion.latent_format import latent_format
    from titan_exp.extensions.diffusion.latents import open_images, write_latent_store

    encoders = Encoders.build(latent_format(options))
    images = open_images(options, options)
    out, console = Path(options.out).expanduser(), Terminal(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("images", total=len(images))
        manifest = write_latent_store(out, images, encoders, options, lambda done, _: bar.update(task, completed=done))
    print(f"{options.out}: {images.name}, {_summary(manifest)}")
    sizes = "".join(f" {key}={value}" for key, value in _sizes_unlike(EXPERIMENT, manifest).items())
    print(f"To train from it: titan-exp train +experiment={EXPERIMENT} data.paths='[{options.out}]'{sizes}")
    return 0


def _check(folder: str) -> int:
    """Verify a store's checksums, print the result, and return the exit code."""
    from titan_exp.data.sample_store import require_intact
    from titan_exp.extensions.diffusion.latent_format import read_latent_manifest

    manifest = read_latent_manifest(folder)
    require_intact(manifest, folder)
    print(f"{folder}: all checksums match. {_summary(manifest)}")
    return 0


def _summary(manifest: "LatentManifest") -> str:
    samples = manifest.samples
    return (
        f"{samples['train']:,} samples to train on and {samples['validation']:,} held out, each of "
        f"{manifest.text_tokens} text and {manifest.rows * manifest.columns} image tokens"
    )


def _sizes_unlike(name: str, encoded: "LatentFormat") -> dict[str, int]:
    """Keys of an experiment whose values differ from what the samples need."""
    from omegaconf import OmegaConf

    from titan_exp.config.hydra.compose import compose

    sizes = {
        "model.patch_dim": encoded.channels,
        "model.text_tokens": encoded.text_tokens,
        "model.text_dim": encoded.text_dim,
        "model.pooled_dim": encoded.pooled_dim,
        "training.seq_len": encoded.tokens,
    }
    config = compose([f"+experiment={name}"])
    return {key: value for key, value in sizes.items() if OmegaConf.select(config, key) != value}
