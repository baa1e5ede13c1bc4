"""Latent store manifest: `manifest.json`, written last by `titan-exp encode`: a store that has it is complete.

A store is a folder. A split (`train`, `validation`) is a list of shards; a shard is one file of captions and three
arrays of numpy, one row per sample: NAME.captions.json, NAME.latents.npy [samples, image tokens, channels],
NAME.text.npy [samples, text tokens, text_dim] and NAME.pooled.npy [samples, pooled_dim]. Latents of an autoencoder are
means, and NAME.deviations.npy has standard deviations. `empty.text.npy` and `empty.pooled.npy` are the states of the
empty text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.images.latent_format import LatentFormat
from titan_exp.config.paths.foreign_json import count, digests, file_name, items, read_object, table, text
from titan_exp.config.paths.token_store_manifest import UNFINISHED

FORMAT, VERSION = "titan_exp latent store", 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
SIZES = ("rows", "columns", "channels", "text_tokens", "text_dim", "pooled_dim")
"""Numbers of a latent format."""


@dataclass(frozen=True)
class LatentShard:
    """Shard of a split: four files."""

    name: str
    """Name of the files, without their endings."""
    samples: int
    """Number of samples."""
    rows: int
    """Rows of image tokens; every shard has as many tokens."""
    columns: int
    """Columns of image tokens."""
    checksums: Mapping[str, str]
    """16-byte blake2b digest of each file, by its ending."""


@dataclass(frozen=True, kw_only=True)
class LatentManifest(LatentFormat):
    """Manifest of a complete store."""

    path: Path
    """Folder of the store."""
    images: str
    """Source of the images, and their size in pixels."""
    options: Mapping[str, Any]
    """Options of shapes, of the split, of the shards and of the order of samples."""
    fingerprint: str
    """Checksum of the whole store."""
    splits: Mapping[str, Sequence[LatentShard]]
    """Shards of each split."""

    @cached_property
    def samples(self) -> dict[str, int]:
        """Number of samples of each split."""
        return {split: sum(shard.samples for shard in shards) for split, shards in self.splits.items()}


def read_latent_manifest(folder: str | Path) -> LatentManifest:
    """Read the manifest of the store in `folder`.

    Raises:
        UserError: there is none, or it is of another version.
    """
    path = Path(folder).expanduser()
    try:
        if (path / MANIFEST).exists():
            return _manifest(path, read_object(path / MANIFEST))
        remedy = f"titan-exp encode images=emoji out={folder} writes one, or images=glyphs, which needs no font"
        reason = f"there is no {MANIFEST} in it" if path.is_dir() else "no such folder"
        if (path / UNFINISHED).is_dir():
            reason, remedy = "it is not finished", "the titan-exp encode command that began it, which continues"
    except (OSError, UserError) as error:
        reason, remedy = f"its {MANIFEST} cannot be read: {error}", "encode the images again, into another folder"
    raise UserError("The latent store cannot be used.", [Violation("data.paths", str(folder), reason, remedy)])


def _manifest(path: Path, values: Mapping[str, Any]) -> LatentManifest:
    """Manifest of its values. Raises UserError about one of another type."""
    if (values.get("format"), values.get("version")) != (FORMAT, VERSION):
        raise UserError(f"it is {values.get('format')} {values.get('version')}, not {FORMAT} {VERSION}")
    splits = table(values.get("splits"), "splits")
    sizes = {key: count(values.get(key), key, 2**31) for key in SIZES}
    return LatentManifest(
        path=path,
        splits={split: [_shard(one, split) for one in items(splits.get(split), f"splits.{split}")] for split in SPLITS},
        latents=table(values.get("latents"), "latents"),
        texts=table(values.get("texts"), "texts"),
        images=text(values.get("images"), "images"),
        options=table(values.get("options"), "options"),
        fingerprint=text(values.get("fingerprint"), "fingerprint"),
        **sizes,
    )


def _shard(values: object, split: str) -> LatentShard:
    shard, name = table(values, f"a shard of {split}"), f"of a shard of {split}"
    return LatentShard(
        file_name(shard.get("name"), f"name {name}"),
        checksums=digests(shard.get("checksums"), f"checksums {name}"),
        **{key: count(shard.get(key), f"{key} {name}", 2**31) for key in ("samples", "rows", "columns")},
    )
