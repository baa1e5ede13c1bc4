"""Latent store writer: shards of encoded images and captions, each written whole, and the manifest at the end.

A complete shard has its checksums in a separate file, so that the same command resumes after it.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.paths.latent_store_manifest import (
    FORMAT,
    MANIFEST,
    SPLITS,
    VERSION,
    LatentManifest,
    read_latent_manifest,
)
from titan_exp.data.latent_store.image_codec import ImageCodec
from titan_exp.data.latent_store.reader import ARRAYS
from titan_exp.data.latent_store.text_encoder import TextEncoder
from titan_exp.data.permutation import Permutation
from titan_exp.data.token_store.shard_writer import write_json
from titan_exp.data.token_store.verify import file_checksum
from titan_exp.data.validation_split import unit_hash

ENCODED_TOGETHER = 16
"""Images in a call of the codec."""
UNFINISHED = "unfinished"
"""Folder of an unfinished store's journal."""


@dataclass(frozen=True)
class Encoders:
    """Frozen encoders of a store."""

    images: ImageCodec
    """Codec of images."""
    texts: TextEncoder
    """Encoder of captions."""


class CaptionedImages(Protocol):
    """Images with captions."""

    name: str

    def __len__(self) -> int:
        """Number of images."""
        ...

    def caption(self, index: int) -> str:
        """Text of an image."""
        ...

    def image(self, index: int) -> np.ndarray:
        """Image [height, width, 3] in uint8, of even height and width, the same for all."""
        ...


def write_latent_store(
    out: Path,
    images: CaptionedImages,
    encoders: Encoders,
    *,
    validation_fraction: float,
    shard_samples: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LatentManifest:
    """Write or resume a store, or return a complete one of these arguments.

    `progress` is called with the number of samples encoded, and of all.

    Raises:
        UserError: the folder holds something else, or an unfinished store of other arguments.
    """
    codec, texts = encoders.images, encoders.texts
    height, width, _ = images.image(0).shape
    plan: dict[str, Any] = {
        "images": images.name,
        "latents": codec.description,
        "texts": texts.description,
        "rows": height // codec.token_size,
        "columns": width // codec.token_size,
        "channels": codec.channels,
        "text_tokens": texts.tokens,
        "text_dim": texts.dim,
        "pooled_dim": texts.pooled_dim,
    }
    plan["options"] = {"validation_fraction": validation_fraction, "shard_samples": shard_samples, "seed": seed}
    if (out / MANIFEST).is_file():
        done = read_latent_manifest(out)
        if all(getattr(done, key) == value for key, value in plan.items()):
            return done
    _begin(out, plan)
    for kind, array in zip(("text", "pooled"), texts(""), strict=True):
        np.save(out / f"empty.{kind}.npy", array)
    order = Permutation(len(images), "images", seed)
    shuffled = [order[rank] for rank in range(len(images))]
    held_out = {index: unit_hash(images.caption(index)) < validation_fraction for index in shuffled}
    encoded, splits = 0, dict[str, list[dict[str, Any]]]()
    for split in SPLITS:
        indices, splits[split] = [index for index in shuffled if held_out[index] is (split == "validation")], []
        for number, chunk in enumerate(_chunks(indices, shard_samples)):
            splits[split].append(_shard(out, f"{split}-{number:05d}", images, encoders, chunk))
            encoded += len(chunk)
            progress(encoded, len(images))
    empty = {name: file_checksum(out / name) for name in ("empty.text.npy", "empty.pooled.npy")}
    fingerprint = blake2b(json.dumps([plan, splits, empty], sort_keys=True).encode(), digest_size=16).hexdigest()
    content = {"format": FORMAT, "version": VERSION, **plan, "fingerprint": fingerprint, "splits": splits}
    write_json(out / MANIFEST, content)
    shutil.rmtree(out / UNFINISHED)
    return read_latent_manifest(out)


def _begin(out: Path, journal: dict[str, Any]) -> None:
    """Make the folder and its journal, or find that of an interrupted run."""
    path = out / UNFINISHED / "plan.json"
    if path.is_file():
        if json.loads(path.read_text(encoding="utf-8")) != journal:
            raise UserError(f"{out} was begun with other options. Give those again, or another folder.")
        return
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty. Give another folder.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, journal)


def _chunks(indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for first in range(0, len(indices), size):
        yield indices[first : first + size]


def _shard(out: Path, name: str, images: CaptionedImages, encoders: Encoders, indices: Sequence[int]) -> dict[str, Any]:
    """Write a shard unless it is complete."""
    record = out / UNFINISHED / f"{name}.json"
    if record.is_file():
        return json.loads(record.read_text(encoding="utf-8"))
    captions = [images.caption(index) for index in indices]
    states, pooled = zip(*map(encoders.texts, captions), strict=True)
    batches = [np.stack([images.image(index) for index in chunk]) for chunk in _chunks(indices, ENCODED_TOGETHER)]
    latents = np.concatenate([encoders.images.encode(batch) for batch in batches])
    for kind, array in zip(ARRAYS, (latents, np.stack(states), np.stack(pooled)), strict=True):
        np.save(out / f"{name}.{kind}.npy", array)
    write_json(out / f"{name}.captions.json", captions)
    files = ["captions.json", *(f"{kind}.npy" for kind in ARRAYS)]
    checksums = {file: file_checksum(out / f"{name}.{file}") for file in files}
    found = {"name": name, "samples": len(indices), "checksums": checksums}
    write_json(record, found)
    return found
