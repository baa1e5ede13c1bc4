"""A store's manifest and an autoencoder's configuration, damaged at random: they are read or refused."""

from pathlib import Path

import pytest

from tests.checkpoint.test_foreign_files import Reader, assert_read_or_refused
from titan_exp.extensions.diffusion.latent_format import (
    autoencoder_config,
    autoencoder_description,
    read_latent_manifest,
)

LATENTS = {
    "format": "titan_exp latent store",
    "version": 1,
    "images": "emoji",
    "options": {"a": 1},
    "fingerprint": "0",
    "latents": {"name": "pixels"},
    "texts": {"name": "hashed_words"},
    **dict.fromkeys(("rows", "columns", "channels", "text_tokens", "text_dim", "pooled_dim"), 8),
    "splits": {
        split: [{"name": "s-0", "samples": 3, "rows": 8, "columns": 8, "checksums": {"latents.npy": "0"}}]
        for split in ("train", "validation")
    },
}
AUTOENCODER = {"_class_name": "AutoencoderKL", "block_out_channels": [64], "scaling_factor": 0.3, "shift_factor": 0.1}


def autoencoder(path: Path) -> None:
    autoencoder_description("vae", autoencoder_config(str(path.parent)))


READERS = {
    "latent store": Reader(LATENTS, lambda path: read_latent_manifest(path.parent).samples, "manifest.json"),
    "autoencoder": Reader(AUTOENCODER, autoencoder, "config.json"),
}


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, name: str):
    assert_read_or_refused(READERS[name], tmp_path, seed=len(name))
