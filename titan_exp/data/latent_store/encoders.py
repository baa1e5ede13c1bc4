"""Encoding of captioned images: order of the samples, and their latents and text states."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titan_exp.config.images.latent_format import LatentFormat
from titan_exp.config.paths.corpus_files import unit_hash
from titan_exp.config.paths.latent_store_manifest import SPLITS
from titan_exp.data.images.aspect_buckets import Bucket, fit, nearest_bucket
from titan_exp.data.images.captioned_images import CaptionedImages
from titan_exp.data.latent_store.image_codec import ImageCodec, image_codec
from titan_exp.data.latent_store.text_encoder import TextEncoder, text_encoder
from titan_exp.data.permutation import Permutation


@dataclass(frozen=True)
class Encoders:
    """Frozen encoders."""

    images: ImageCodec
    """Codec of images."""
    texts: TextEncoder
    """Encoder of captions."""

    @classmethod
    def build(cls, encoded: LatentFormat) -> "Encoders":
        """Load encoders.

        Raises:
            UserError: their packages or files are missing.
        """
        return cls(image_codec(encoded.latents), text_encoder(encoded))

    def encode(self, images: CaptionedImages, indices: Sequence[int], bucket: Bucket) -> tuple[np.ndarray, ...]:
        """Latents, text states and pooled embeddings of images of a bucket, and standard deviations of a posterior.

        Raises:
            UserError: an image is damaged.
        """
        pixels = np.stack([fit(images.image(index), bucket, self.images.token_size) for index in indices])
        states, pooled = zip(*(self.texts(images.caption(index)) for index in indices), strict=True)
        latents, *deviations = self.images.encode(pixels)
        return latents, np.stack(states), np.stack(pooled), *deviations


def order_samples(
    images: CaptionedImages, buckets: list[Bucket], validation_fraction: float, seed: int
) -> dict[str, list[tuple[Bucket, list[int]]]]:
    """Shuffled indices of the images of each split by bucket; captions decide which are held out."""
    order = Permutation(len(images), "images", seed)
    groups = {split: {bucket: list[int]() for bucket in buckets} for split in SPLITS}
    for index in (order[rank] for rank in range(len(images))):
        held_out = unit_hash(images.caption(index)) < validation_fraction
        bucket = nearest_bucket(*images.size(index), buckets) if len(buckets) > 1 else buckets[0]
        groups["validation" if held_out else "train"][bucket].append(index)
    return {split: list(by_bucket.items()) for split, by_bucket in groups.items()}
