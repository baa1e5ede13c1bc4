"""Source `images`: captioned images encoded during training, with the samples, order and splits of a latent store."""

from collections.abc import Iterator

from titan_exp.config.errors.user_error import listed
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.schema.foreign_code import SourceDescription
from titan_exp.extensions.diffusion.config import ImageOptions, images_of
from titan_exp.extensions.diffusion.latent_format import HASHED_WORDS, PIXELS
from titan_exp.extensions.diffusion.latents import build_sampler, further_metrics, validation_batches

DESCRIPTION = SourceDescription(reads=("paths", "images"), holds="latents")

Options = ImageOptions

__all__ = ["Options", "build_sampler", "further_metrics", "slower_options", "validation_batches"]


def slower_options(data: DataConfig) -> Iterator[str]:
    """Encoders that training runs again in every epoch."""
    built_in = {"latents": PIXELS, "texts": HASHED_WORDS}
    given = [key for key, name in built_in.items() if data.options.get(key, name) != name]
    if given:
        yield (
            f"{listed([f'data.options.{key}={data.options[key]}' for key in given], 'and')} encodes each sample in "
            "every epoch, on every rank that has it, and in memory that titan-exp plan does not count. To encode once, "
            f"use titan-exp encode images={images_of(data)} out=STORE, then data=latents data.paths='[STORE]'"
        )
