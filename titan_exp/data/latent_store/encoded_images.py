"""Images encoded on demand: the samples of a latent store of them, in its order, without a store.

Held-out samples, which are evaluated at several times, are kept once they are encoded, up to a number of bytes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from titan_exp.config.paths.latent_data import in_keys_of_data
from titan_exp.data.images.aspect_buckets import Bucket
from titan_exp.data.images.captioned_images import CaptionedImages
from titan_exp.data.latent_store.encoders import Encoders
from titan_exp.data.latent_store.samples import LatentSamples, Sample

KEPT_BYTES = 2**28
"""Most bytes of samples that a split keeps."""


class EncodedImages(LatentSamples):
    """Samples of a split; `groups` has the indices of its images by bucket, and `keep` holds on to encoded samples."""

    def __init__(
        self,
        images: CaptionedImages,
        encoders: Encoders,
        groups: Sequence[tuple[Bucket, Sequence[int]]],
        *,
        keep: bool = False,
    ) -> None:
        super().__init__(encoders.texts(""))
        self._images, self._encoders = images, encoders
        self._places = [(bucket, index) for bucket, indices in groups for index in indices]
        self._kept, self._room = dict[int, Sample](), KEPT_BYTES if keep else 0

    def __len__(self) -> int:
        return len(self._places)

    def read(self, indices: Sequence[int]) -> list[Sample]:
        """Samples by index; those of one bucket are encoded together."""
        found = {index: self._kept[index] for index in indices if index in self._kept}
        missing = [index for index in dict.fromkeys(indices) if index not in found]
        for bucket in dict.fromkeys(self._places[index][0] for index in missing):
            group = [index for index in missing if self._places[index][0] == bucket]
            with in_keys_of_data():
                arrays = self._encoders.encode(self._images, [self._places[index][1] for index in group], bucket)
            found |= {index: Sample(*rows) for index, rows in zip(group, zip(*arrays, strict=True), strict=True)}
        for index in missing:
            self._keep(index, found[index])
        return [found[index] for index in indices]

    def captions(self) -> list[str]:
        """Texts of all samples."""
        return [self._images.caption(index) for _, index in self._places]

    def shape(self, index: int) -> tuple[int, int]:
        """Rows and columns of a sample's image tokens."""
        bucket, _ = self._places[index]
        return bucket.rows, bucket.columns

    def _keep(self, index: int, sample: Sample) -> None:
        size = sum(array.nbytes for array in sample if array is not None)
        if size <= self._room:
            arrays: list[Any] = [None if array is None else np.array(array) for array in sample]
            self._kept[index] = Sample(*arrays)
            self._room -= size
