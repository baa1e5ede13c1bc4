"""Latents of the data group: both splits, from a latent store or encoded while training."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from titan_exp.config.groups.data import DataConfig
from titan_exp.config.images.image_options import ImageOptions, ImageSource
from titan_exp.config.images.latent_format import LatentFormat, latent_format
from titan_exp.config.paths.latent_data import image_options, in_keys_of_data
from titan_exp.config.paths.latent_store_manifest import SPLITS, read_latent_manifest
from titan_exp.data.images.aspect_buckets import aspect_buckets
from titan_exp.data.images.open_images import open_images
from titan_exp.data.latent_store.encoded_images import EncodedImages
from titan_exp.data.latent_store.encoders import Encoders, order_samples
from titan_exp.data.latent_store.reader import LatentSplit
from titan_exp.data.latent_store.samples import LatentSamples


@dataclass(frozen=True)
class LatentData:
    """Samples of both splits."""

    format: LatentFormat
    """Encoders and sizes."""
    splits: Mapping[str, LatentSamples]
    """Samples by split."""
    identity: Mapping[str, Any]
    """Identity of the samples and their order, by config key."""


def open_latents(data: DataConfig) -> LatentData:
    """Open the samples of a source that holds latents; images and their encoders are loaded once in a process.

    Raises:
        UserError: the store, the images or their encoders cannot be used.
    """
    if data.source == "latents":
        return open_store(data.paths[0])
    assert data.images is not None, "checked by the rules"
    options, source = image_options(data), ImageSource(data.images, *data.paths)
    with in_keys_of_data():
        return _open_images(source, options, data.validation_fraction)


def open_store(folder: str) -> LatentData:
    """Open the samples of a store.

    Raises:
        UserError: it cannot be used.
    """
    store = read_latent_manifest(folder)
    splits = {split: LatentSplit(store, split) for split in SPLITS}
    return LatentData(store, splits, {"data.paths": [store.fingerprint]})


@lru_cache(maxsize=1)
def _open_images(source: ImageSource, options: ImageOptions, validation_fraction: float) -> LatentData:
    found, images = latent_format(options), open_images(source, options)
    encoders = Encoders.build(found)
    buckets = aspect_buckets(found.rows, options.max_aspect)
    splits = {
        split: EncodedImages(images, encoders, groups, keep=split == "validation")
        for split, groups in order_samples(images, buckets, validation_fraction, options.seed).items()
    }
    content = json.dumps([asdict(found), asdict(options), validation_fraction], sort_keys=True)
    digest = blake2b(content.encode(), digest_size=16).hexdigest()
    return LatentData(found, splits, {"data.images": images.name, "data.options": digest})
