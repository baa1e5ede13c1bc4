"""Latent store: shards of encoded images and captions, each written whole, and the manifest at the end; and its
reader, through memory maps.

A complete shard has its checksums in a separate file, so that the same command resumes after it.
"""

import json
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np

from titan_exp.config.errors.user_error import UserError, Violation, listed
from titan_exp.config.paths.data_files import UNFINISHED
from titan_exp.config.paths.foreign_file import read_object
from titan_exp.data.store_folder import explain_disk_errors, new_array, refusal, remove_temporary_files, store_lock
from titan_exp.data.token_store.writer import file_checksum, write_json
from titan_exp.extensions.diffusion.encoders import Encoders, order_samples
from titan_exp.extensions.diffusion.images import Bucket, CaptionedImages, aspect_buckets
from titan_exp.extensions.diffusion.latent_format import (
    FORMAT,
    MANIFEST,
    VERSION,
    LatentManifest,
    read_latent_manifest,
)
from titan_exp.extensions.diffusion.samples import LatentSamples, Sample

ENCODED_TOGETHER = 16
"""Images in a call of the codec."""
DTYPES: dict[str, type] = {"fp16": np.float16, "fp32": np.float32}
"""Types of arrays by option."""


@dataclass(frozen=True)
class StoreOptions:
    """Options of the content of a store."""

    size: int
    """Height and width of a square image in pixels."""
    max_aspect: float = 1.0
    """Largest ratio of the sides of a bucket; 1 crops every image to a square."""
    validation_fraction: float = 0.05
    """Share of the images held out, chosen by caption."""
    shard_samples: int = 4096
    """Most samples of a shard."""
    dtype: Literal["fp16", "fp32"] = "fp32"
    """Type of the arrays."""
    seed: int = 0
    """Seed of the order of samples."""


def write_latent_store(
    out: Path,
    images: CaptionedImages,
    encoders: Encoders,
    options: StoreOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LatentManifest:
    """Write or resume a store, or return a complete one of these arguments.

    `progress` is called with the number of samples encoded, and of all.

    Raises:
        UserError: the folder holds something else, or an unfinished store of other arguments; it cannot be written, or
            another process writes it; an image is damaged.
    """
    codec, texts = encoders.images, encoders.texts
    side = options.size // codec.token_size
    plan: dict[str, Any] = {
        "images": images.name,
        "latents": codec.description,
        "texts": texts.description,
        "rows": side,
        "columns": side,
        "channels": codec.channels,
        "text_tokens": texts.tokens,
        "text_dim": texts.dim,
        "pooled_dim": texts.pooled_dim,
        "options": asdict(options),
    }
    if (out / MANIFEST).is_file():
        done = read_latent_manifest(out)
        if differing := _differing(vars(done), plan):
            reason = f"it holds a finished store, which differs in {differing}"
            raise refusal(str(out), reason, "another folder, or remove this one")
        shutil.rmtree(out / UNFINISHED, ignore_errors=True)
        return done
    with explain_disk_errors(out):
        _begin(out, plan)
        with store_lock(out / UNFINISHED / "lock", str(out), "encode"):
            remove_temporary_files(out, out / UNFINISHED)
            empty = dict[str, str]()
            for kind, array in zip(("text", "pooled"), texts(""), strict=True):
                name = f"empty.{kind}.npy"
                np.save(out / name, array.astype(DTYPES[options.dtype]))
                empty[name] = file_checksum(out / name)
            splits = _write_splits(out, images, encoders, options, progress)
            content = json.dumps([plan, splits, empty], sort_keys=True).encode()
            own = {"fingerprint": blake2b(content, digest_size=16).hexdigest(), "splits": splits}
            write_json(out / MANIFEST, {"format": FORMAT, "version": VERSION, **plan, **own})
        shutil.rmtree(out / UNFINISHED)
    return read_latent_manifest(out)


def _write_splits(
    out: Path,
    images: CaptionedImages,
    encoders: Encoders,
    options: StoreOptions,
    progress: Callable[[int, int], None],
) -> dict[str, list[dict[str, Any]]]:
    """Write the shards that are missing; returns the entries of all in the manifest, by split."""
    buckets = aspect_buckets(options.size // encoders.images.token_size, options.max_aspect)
    encoded, splits = 0, dict[str, list[dict[str, Any]]]()
    for split, groups in order_samples(images, buckets, options.validation_fraction, options.seed).items():
        chunks = [(bucket, chunk) for bucket, group in groups for chunk in _chunks(group, options.shard_samples)]
        splits[split] = []
        for number, (bucket, chunk) in enumerate(chunks):
            shard = _Shard(out, f"{split}-{number:05d}", bucket, DTYPES[options.dtype])
            advanced = partial(_advanced, progress, encoded, len(images))
            splits[split].append(shard.write(images, encoders, chunk, advanced))
            encoded += len(chunk)
    return splits


def _advanced(progress: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    progress(before + done, total)


def _differing(found: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    """Names of what a store has otherwise than the plan, options by their own names."""
    names = [key for key, value in plan.items() if key != "options" and found.get(key) != value]
    options = found.get("options", {})
    return listed([*names, *(key for key, value in plan["options"].items() if options.get(key) != value)], "and")


def _begin(out: Path, journal: dict[str, Any]) -> None:
    """Make the folder and its journal, or find that of an interrupted run."""
    path = out / UNFINISHED / "plan.json"
    if path.is_file():
        begun = read_object(path)
        if begun != journal:
            reason = f"this store was begun with other options, and differs in {_differing(begun, journal)}"
            raise refusal(str(out), reason, "those options, or another folder")
        return
    if out.exists() and any(entry.name != UNFINISHED for entry in out.iterdir()):
        raise refusal(str(out), "the folder holds other files", "a new folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, journal)


def _chunks(indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for first in range(0, len(indices), size):
        yield indices[first : first + size]


@dataclass(frozen=True)
class _Shard:
    """Files of a shard, whose record in the journal says that it is complete."""

    out: Path
    name: str
    bucket: Bucket
    dtype: type

    def write(
        self,
        images: CaptionedImages,
        encoders: Encoders,
        indices: Sequence[int],
        progress: Callable[[int], None],
    ) -> dict[str, Any]:
        """Write the shard unless it is complete; returns its entry of the manifest."""
        record = self.out / UNFINISHED / f"{self.name}.json"
        if record.is_file():
            return read_object(record)
        texts, codec = encoders.texts, encoders.images
        tokens = self.bucket.rows * self.bucket.columns
        kinds = (*ARRAYS, DEVIATIONS) if codec.description.get("posterior") else ARRAYS
        latents = (tokens, codec.channels)
        shapes = (latents, (texts.tokens, texts.dim), (texts.pooled_dim,), latents)
        arrays = [
            new_array(self.out / f"{self.name}.{kind}.npy", self.dtype, (len(indices), *shape))
            for kind, shape in zip(kinds, shapes, strict=False)
        ]
        for first, chunk in zip(count(0, ENCODED_TOGETHER), _chunks(indices, ENCODED_TOGETHER), strict=False):
            for array, found in zip(arrays, encoders.encode(images, chunk, self.bucket), strict=True):
                array[first : first + len(chunk)] = found
            progress(first + len(chunk))
        for array in arrays:
            array.flush()
        del arrays
        write_json(self.out / f"{self.name}.captions.json", [images.caption(index) for index in indices])
        files = ["captions.json", *(f"{kind}.npy" for kind in kinds)]
        found = {
            "name": self.name,
            "samples": len(indices),
            **self.bucket._asdict(),
            "checksums": {file: file_checksum(self.out / f"{self.name}.{file}") for file in files},
        }
        write_json(record, found)
        return found


ARRAYS = ("latents", "text", "pooled")
"""Arrays of every shard."""
DEVIATIONS = "deviations"
"""Array of shards of an encoder with a posterior: its standard deviations; `latents` are its means."""
_MAX_MAPPED_SHARDS = 256


class LatentSplit(LatentSamples):
    """Samples of a split of a store."""

    def __init__(self, manifest: LatentManifest, split: str) -> None:
        super().__init__((_load(manifest, "empty.text"), _load(manifest, "empty.pooled")))
        self.manifest = manifest
        self._shards = manifest.splits[split]
        self._kinds = (*ARRAYS, DEVIATIONS) if manifest.latents.get("posterior") else ARRAYS
        self._offsets: list[int] = np.cumsum([0, *(shard.samples for shard in self._shards)]).tolist()
        self._map = lru_cache(maxsize=_MAX_MAPPED_SHARDS)(self._open)

    def __len__(self) -> int:
        return self._offsets[-1]

    def read(self, indices: Sequence[int]) -> list[Sample]:
        """Samples by index."""
        places = [(number := self._shard_of(index), index - self._offsets[number]) for index in indices]
        return [Sample(*(array[row].astype(np.float32) for array in self._map(number))) for number, row in places]

    def captions(self) -> list[str]:
        """Texts of all samples."""
        files = (self.manifest.path / f"{shard.name}.captions.json" for shard in self._shards)
        return [caption for file in files for caption in json.loads(file.read_text(encoding="utf-8"))]

    def shape(self, index: int) -> tuple[int, int]:
        """Rows and columns of a sample's image tokens."""
        shard = self._shards[self._shard_of(index)]
        return shard.rows, shard.columns

    def _shard_of(self, index: int) -> int:
        return bisect_right(self._offsets, index) - 1

    def _open(self, number: int) -> list[np.ndarray]:
        return [_load(self.manifest, f"{self._shards[number].name}.{kind}") for kind in self._kinds]


def _load(manifest: LatentManifest, name: str) -> np.ndarray:
    path = manifest.path / f"{name}.npy"
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        violation = Violation("data.paths", str(manifest.path), f"{path.name}: {error}", "copy or encode it again")
        raise UserError("The latent store is damaged.", [violation]) from error
