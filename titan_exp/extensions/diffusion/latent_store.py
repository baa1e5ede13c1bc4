"""Latent store: shards of encoded images and captions, and its reader.

The journal has the manifest entry of each complete shard, so the same command resumes after it.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from titan_exp.config.data_files import SPLITS
from titan_exp.config.foreign_file import read_object
from titan_exp.data.sample_store import (
    ShardWriter,
    StoreSplit,
    StoreWriter,
    explain_disk_errors,
    file_checksum,
    map_field,
    write_json,
)
from titan_exp.extensions.diffusion.config import EncodeOptions
from titan_exp.extensions.diffusion.encoders import Encoders, order_samples
from titan_exp.extensions.diffusion.images import Bucket, CaptionedImages, aspect_buckets
from titan_exp.extensions.diffusion.latent_format import DTYPES, LatentFormat, LatentManifest, read_latent_manifest
from titan_exp.extensions.diffusion.samples import LatentSamples, Sample

ENCODED_TOGETHER = 16
"""Number of images per call of the codec."""


STORED = ("size", "max_aspect", "validation_fraction", "shard_samples", "dtype", "seed")
"""Options that determine a store's content, besides those of its encoders."""


def write_latent_store(
    out: Path,
    images: CaptionedImages,
    encoders: Encoders,
    options: EncodeOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LatentManifest:
    """Write or resume a store, or return a complete store with these arguments.

    `progress` is called with the number of encoded samples and the number of all samples.

    Raises:
        UserError: the folder holds something else, or a store of other arguments; it cannot be written, or another
            process writes it; an image is damaged.
    """
    codec, texts = encoders.images, encoders.texts
    side = options.size // codec.token_size
    encoded = LatentFormat(
        latents=codec.description,
        texts=texts.description,
        rows=side,
        columns=side,
        channels=codec.channels,
        text_tokens=texts.tokens,
        text_dim=texts.dim,
        pooled_dim=texts.pooled_dim,
    )
    plan = {"images": images.name, **vars(encoded), "options": {key: getattr(options, key) for key in STORED}}
    store = StoreWriter(LatentManifest, out, str(out), plan, "plan.json")
    with explain_disk_errors(out):
        if store.is_finished():
            return read_latent_manifest(out)
        with store.lock():
            empty = dict[str, str]()
            for kind, array in zip(("text", "pooled"), texts(""), strict=True):
                name = f"empty.{kind}.npy"
                np.save(out / name, array.astype(DTYPES[options.dtype]))
                empty[name] = file_checksum(out / name)
            splits = _write_shards(store, encoded, images, encoders, options=options, progress=progress)
            store.finish(splits, [plan, splits, empty], files=empty)
    return read_latent_manifest(out)


def _write_shards(
    store: StoreWriter,
    encoded: LatentFormat,
    images: CaptionedImages,
    encoders: Encoders,
    *,
    options: EncodeOptions,
    progress: Callable[[int, int], None],
) -> dict[str, list[dict[str, Any]]]:
    """Write the missing shards; returns the manifest entries of all shards, by split."""
    splits, done = {split: list[dict[str, Any]]() for split in SPLITS}, 0
    for split, name, bucket, indices in _shards(images, aspect_buckets(encoded.rows, options.max_aspect), options):
        record = store.journal / f"{name}.json"
        if not record.is_file():
            fields = encoded.shard_fields(options.dtype, len(indices), *bucket)
            with closing(ShardWriter(store.folder, name, fields)) as shard:
                for chunk in _chunks(indices, ENCODED_TOGETHER):
                    for field, array in zip(fields, encoders.encode(images, chunk, bucket), strict=True):
                        shard.add(field.name, array)
                    progress(done + shard.lengths[fields[0].name], len(images))
                captions = [images.caption(index) for index in indices]
                written = write_json(store.folder / f"{name}.captions.json", captions)
                numbers = {"samples": len(indices), **bucket._asdict()}
                write_json(record, shard.commit(numbers, {"captions.json": written}))
        splits[split].append(read_object(record))
        done += len(indices)
    return splits


def _shards(
    images: CaptionedImages, buckets: list[Bucket], options: EncodeOptions
) -> Iterator[tuple[str, str, Bucket, Sequence[int]]]:
    """Split, name, bucket and image indices of each shard."""
    for split, groups in order_samples(images, buckets, options.validation_fraction, options.seed).items():
        chunks = ((bucket, chunk) for bucket, group in groups for chunk in _chunks(group, options.shard_samples))
        for number, (bucket, chunk) in enumerate(chunks):
            yield split, f"{split}-{number:05d}", bucket, chunk


def _chunks(indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for first in range(0, len(indices), size):
        yield indices[first : first + size]


class LatentSplit(StoreSplit, LatentSamples):
    """Samples of one split of a store."""

    def __init__(self, manifest: LatentManifest, split: str) -> None:
        StoreSplit.__init__(self, manifest, split)
        text, pooled = (map_field(manifest, "empty", each) for each in manifest.shard_fields("", 1, 1, 1)[1:3])
        LatentSamples.__init__(self, (text, pooled))

    def read(self, indices: Sequence[int]) -> list[Sample]:
        """Samples by index."""
        places = [(number := self.shard_of(index), index - self.offsets[number]) for index in indices]
        return [Sample(*(array[row].astype(np.float32) for array in self.map(number))) for number, row in places]

    def captions(self) -> list[str]:
        """Texts of all samples."""
        files = (self.manifest.path / f"{shard.name}.captions.json" for shard in self.shards)
        return [caption for file in files for caption in json.loads(file.read_text(encoding="utf-8"))]

    def shape(self, index: int) -> tuple[int, int]:
        """Rows and columns of a sample's image tokens."""
        numbers = self.shards[self.shard_of(index)].numbers
        return numbers["rows"], numbers["columns"]
