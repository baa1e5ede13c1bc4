"""Source `images`: captioned images encoded while training, with the samples, order and splits of a latent store."""

from titan_exp.config.schema.builtins import SourceDescription
from titan_exp.data.sources.latents import WithoutText, build_sampler, open_files, validation_batches

DESCRIPTION = SourceDescription(reads=("paths",), holds="latents")

__all__ = ["WithoutText", "build_sampler", "open_files", "validation_batches"]
