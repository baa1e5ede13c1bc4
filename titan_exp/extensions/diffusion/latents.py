"""Source `latents`: a latent store written by `titan-exp encode`, in shards of encoded images and captions.

The journal has the manifest entry of each complete shard, so the same command resumes after it.

The source `images` shares the sampler and the validation. The order is a function of seed and row number, and the
sampler's state is a number of rows, from which any dp degree resumes without reading. Validation uses every held-out
sample at fixed times, with its own noise that never changes. Loss at fixed times correlates with image quality (Esser
et al. 2024), and is the same number in every layout.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titan_exp.config.data_files import SPLITS
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.foreign_file import read_object
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.schema.foreign_code import SourceDescription
from titan_exp.data import sample_store
from titan_exp.data.batch import Permutation, RowSampler, SamplerState
from titan_exp.extensions.diffusion import latent_format as formats
from titan_exp.extensions.diffusion.config import EncodeOptions, ImageOptions, ImageSource, images_of
from titan_exp.extensions.diffusion.encoders import Encoders, order_samples
from titan_exp.extensions.diffusion.images import (
    CaptionedImages,
    FolderImages,
    HuggingFaceImages,
    WebDatasetImages,
    aspect_buckets,
)
from titan_exp.extensions.diffusion.rendered_images import EmojiImages, GlyphImages
from titan_exp.extensions.diffusion.samples import EncodedImages, LatentBatch, LatentSamples, Sample, noise_of

ENCODED_TOGETHER = 16  # number of images per call of the codec


STORED = ("size", "max_aspect", "validation_fraction", "shard_samples", "dtype", "seed")
"""Options that determine a store's content, besides those of its encoders."""


def write_latent_store(
    out: Path,
    images: CaptionedImages,
    encoders: Encoders,
    options: EncodeOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> formats.LatentManifest:
    """Write or resume a store, or return a complete store with these arguments. `progress` is called with the number of
    encoded samples and the number of all samples. Raises UserError if the folder holds something else, or a store of
    other arguments; it cannot be written, or another process writes it; an image is damaged."""
    codec, texts = encoders.images, encoders.texts
    side = options.size // codec.token_size
    encoded = formats.LatentFormat(
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
    store = sample_store.StoreWriter(formats.LatentManifest, out, str(out), plan, "plan.json")
    with sample_store.explain_disk_errors(out):
        if store.is_finished():
            return formats.read_latent_manifest(out)
        with store.lock():
            empty = dict[str, str]()
            for kind, array in zip(("text", "pooled"), texts(""), strict=True):
                name = f"empty.{kind}.npy"
                np.save(out / name, array.astype(formats.DTYPES[options.dtype]))
                empty[name] = sample_store.file_checksum(out / name)
            splits = _write_shards(store, encoded, images, encoders, options=options, progress=progress)
            store.finish(splits, [plan, splits, empty], files=empty)
    return formats.read_latent_manifest(out)


def _write_shards(
    store: sample_store.StoreWriter,
    encoded: formats.LatentFormat,
    images: CaptionedImages,
    encoders: Encoders,
    *,
    options: EncodeOptions,
    progress: Callable[[int, int], None],
) -> dict[str, list[dict[str, Any]]]:
    """Write the missing shards; returns the manifest entries of all shards, by split."""
    splits, done = {split: list[dict[str, Any]]() for split in SPLITS}, 0
    buckets = aspect_buckets(encoded.rows, options.max_aspect)
    groups = order_samples(images, buckets, options.validation_fraction, options.seed)
    shards = [
        (split, f"{split}-{number:05d}", bucket, indices)
        for split, by_bucket in groups.items()
        for number, (bucket, indices) in enumerate(
            (bucket, chunk) for bucket, group in by_bucket for chunk in _chunks(group, options.shard_samples)
        )
    ]
    for split, name, bucket, indices in shards:
        record = store.journal / f"{name}.json"
        if not record.is_file():
            fields = encoded.shard_fields(options.dtype, len(indices), *bucket)
            with closing(sample_store.ShardWriter(store.folder, name, fields)) as shard:
                for chunk in _chunks(indices, ENCODED_TOGETHER):
                    for field, array in zip(fields, encoders.encode(images, chunk, bucket), strict=True):
                        shard.add(field.name, array)
                    progress(done + shard.lengths[fields[0].name], len(images))
                captions = [images.caption(index) for index in indices]
                written = sample_store.write_json(store.folder / f"{name}.captions.json", captions)
                numbers = {"samples": len(indices), **bucket._asdict()}
                sample_store.write_json(record, shard.commit(numbers, {"captions.json": written}))
        splits[split].append(read_object(record))
        done += len(indices)
    return splits


def _chunks(indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for first in range(0, len(indices), size):
        yield indices[first : first + size]


class LatentSplit(sample_store.StoreSplit, LatentSamples):
    """Samples of one split of a store."""

    def __init__(self, manifest: formats.LatentManifest, split: str) -> None:
        sample_store.StoreSplit.__init__(self, manifest, split)
        text, pooled = (
            sample_store.map_field(manifest, "empty", each) for each in manifest.shard_fields("", 1, 1, 1)[1:3]
        )
        LatentSamples.__init__(self, (text, pooled))

    def read(self, indices: Sequence[int]) -> list[Sample]:
        places = [(number := self.shard_of(index), index - self.offsets[number]) for index in indices]
        return [Sample(*(array[row].astype(np.float32) for array in self.map(number))) for number, row in places]

    def captions(self) -> list[str]:
        files = (self.manifest.path / f"{shard.name}.captions.json" for shard in self.shards)
        return [caption for file in files for caption in json.loads(file.read_text(encoding="utf-8"))]

    def shape(self, index: int) -> tuple[int, int]:
        numbers = self.shards[self.shard_of(index)].numbers
        return numbers["rows"], numbers["columns"]


TIMES = tuple((index + 0.5) / 8 for index in range(8))  # times at which evaluation measures the loss
_SEED = 0


@dataclass(frozen=True)
class FixedTimeBatches:
    """Batches of one data rank at one time. Every rank has equally many, and each sample is on exactly one rank."""

    split: LatentSamples
    samples: int
    time: float
    dp_rank: int
    dp_degree: int
    micro_batch_size: int

    def __len__(self) -> int:
        return math.ceil(self.samples / (self.micro_batch_size * self.dp_degree))

    def __iter__(self) -> Iterator[LatentBatch]:
        for number in range(len(self)):
            first = number * self.micro_batch_size
            rows = [self.dp_rank + row * self.dp_degree for row in range(first, first + self.micro_batch_size)]
            batch = self.split.batch(
                [row % self.samples for row in rows], rows, [float(r < self.samples) for r in rows]
            )
            yield replace(
                batch, noise=noise_of(batch, _SEED, "validation noise"), times=torch.full((len(rows),), self.time)
            )


@dataclass(frozen=True)
class WithoutText:
    """The same batches with the empty text."""

    batches: FixedTimeBatches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[LatentBatch]:
        for batch in self.batches:
            yield replace(
                batch,
                text=batch.empty_text.expand_as(batch.text).contiguous(),
                pooled=batch.empty_pooled.expand_as(batch.pooled).contiguous(),
            )


def further_metrics(
    sources: Mapping[str, FixedTimeBatches],
    row: Mapping[str, float | int],
    evaluate: Callable[[Mapping[str, WithoutText]], Mapping[str, float | int]],
) -> dict[str, float | int]:
    """Loss with the empty text, and the reduction that the texts bring."""
    without = evaluate({name: WithoutText(batches) for name, batches in sources.items()})["validation_loss"]
    return {"validation_loss_without_text": without, "validation_text_gain": without - row["validation_loss"]}


def validation_batches(
    data: DataConfig, *, dp_rank: int, dp_degree: int, micro_batch_size: int, all_documents: bool
) -> dict[str, FixedTimeBatches]:
    """Validation batches by time. With `all_documents`, the samples are the training split's. Raises UserError if there
    are no validation samples."""
    split = open_latents(data).splits["train" if all_documents else "validation"]
    samples = min(len(split), data.validation_documents or len(split))
    if not samples:
        if data.source == "images":
            reason, remedy = "it holds out no image", "use a larger one, or evaluation.every=0"
            violation = Violation("data.validation_fraction", data.validation_fraction, reason, remedy)
        else:
            reason, remedy = "this store has no validation samples", "use evaluation.every=0, or another store"
            violation = Violation("data.paths", data.paths[0], reason, remedy)
        raise UserError("There is nothing to evaluate on.", [violation])
    return {
        f"t={time:g}": FixedTimeBatches(split, samples, time, dp_rank, dp_degree, micro_batch_size) for time in TIMES
    }


@dataclass(frozen=True)
class LatentData:
    """Samples of both splits, and their identity and order by config key."""

    format: formats.LatentFormat
    splits: Mapping[str, LatentSamples]
    identity: Mapping[str, Any]


def open_latents(data: DataConfig) -> LatentData:
    """Open the samples of a source that holds latents; images and their encoders are loaded once in a process. Raises
    UserError if the store, the images or their encoders cannot be used."""
    if data.source == "latents":
        return open_store(data.paths[0])
    images = images_of(data)
    assert images is not None, "checked by the rules"
    options, source = formats.image_options(data), ImageSource(images, *data.paths)
    with formats.in_keys_of_data():
        return _open_images(source, options, data.validation_fraction)


def open_store(folder: str) -> LatentData:
    """Open the samples of a store. Raises UserError if it cannot be used."""
    store = formats.read_latent_manifest(folder)
    splits = {split: LatentSplit(store, split) for split in SPLITS}
    return LatentData(store, splits, {"data.paths": [store.fingerprint]})


def open_images(source: ImageSource, options: ImageOptions) -> CaptionedImages:
    """Open images. Raises UserError if there are none, or they cannot be read."""
    match source.images:
        case "emoji":
            return EmojiImages(options.size)
        case "glyphs":
            return GlyphImages(options.size)
        case "folder":
            return FolderImages(source.paths, options.caption_key)
        case "webdataset":
            return WebDatasetImages(source.paths, options.caption_key)
        case "huggingface":
            return HuggingFaceImages(source.paths, options.split, options.image_key, options.caption_key)


@lru_cache(maxsize=1)
def _open_images(source: ImageSource, options: ImageOptions, validation_fraction: float) -> LatentData:
    found, images = formats.latent_format(options), open_images(source, options)
    encoders = Encoders.build(found)
    buckets = aspect_buckets(found.rows, options.max_aspect)
    splits = {
        split: EncodedImages(images, encoders, groups, keep=split == "validation")
        for split, groups in order_samples(images, buckets, validation_fraction, options.seed).items()
    }
    content = json.dumps([asdict(found), asdict(options), validation_fraction], sort_keys=True)
    digest = blake2b(content.encode(), digest_size=16).hexdigest()
    return LatentData(found, splits, {"data.images": images.name, "data.options": digest})


class LatentSampler(RowSampler):
    """`Sampler` over the training samples of the data group, with a new permutation in every epoch. Raises UserError if
    the store or the images cannot be used, or there is nothing to train on."""

    state_name = "latents"
    store = formats.LatentManifest.store

    def __init__(self, data: DataConfig, seq_len: int, seed: int, *, dp_rank: int, dp_degree: int) -> None:
        found = open_latents(data)
        super().__init__({**found.identity, "experiment.seed": seed}, dp_rank, dp_degree)
        self._split = found.splits["train"]
        if not len(self._split):
            raise UserError(
                "There is nothing to train on, because the data hold out every image. Use a smaller "
                "validation_fraction."
            )
        self._order = lru_cache(maxsize=4)(lambda epoch: Permutation(len(self._split), "latents", seed, epoch))

    def rows(self, count: int) -> "LatentRows":
        return LatentRows(self._split, count)

    def read(self, row: int, target: Callable[[int, int], None]) -> list[int]:
        epoch, rank = divmod(row, len(self._split))
        target(self._order(epoch)[rank], row)
        return []

    def epochs(self, state: SamplerState) -> dict[str, float]:
        return {"": state[self.state_name]["rows"] / len(self._split)}


class LatentRows:
    """Rows of a micro-batch: iterates over functions that fill a row from an index in the split and a number."""

    def __init__(self, split: LatentSamples, count: int) -> None:
        self._split, self._count = split, count
        self._indices, self._samples = list[int](), list[int]()

    def __iter__(self) -> Iterator[Callable[[int, int], None]]:
        for _ in range(self._count):
            yield self._fill

    def collate(self, starts: Sequence[Sequence[int]]) -> LatentBatch:
        """Batch of the filled rows."""
        return self._split.batch(self._indices, self._samples, [1.0] * self._count)

    def _fill(self, index: int, sample: int) -> None:
        self._indices.append(index)
        self._samples.append(sample)


DESCRIPTION = SourceDescription(reads=("paths",), holds="latents", is_store=True)

build_sampler = LatentSampler
