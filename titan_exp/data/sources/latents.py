"""Source `latents`: a latent store written by `titan-exp encode`."""

from titan_exp.config.groups.data import DataConfig
from titan_exp.config.schema.builtins import SourceDescription
from titan_exp.data.latent_store.sampler import LatentSampler
from titan_exp.data.latent_store.validation import WithoutText, validation_batches

DESCRIPTION = SourceDescription(reads=("paths",), holds="latents", is_store=True)

__all__ = ["WithoutText", "build_sampler", "open_files", "validation_batches"]

build_sampler = LatentSampler


def open_files(config: DataConfig) -> None:
    """None: the store's own checksum identifies its files."""
