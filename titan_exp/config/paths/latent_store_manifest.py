"""Latent store manifest: `manifest.json`, written last by `titan-exp encode`: a store that has it is complete.

A store is a folder. A split (`train`, `validation`) is a list of shards; a shard is one file of captions and three
arrays of numpy, one row per sample: NAME.captions.json, NAME.latents.npy [samples, image tokens, channels],
NAME.text.npy [samples, text tokens, text_dim] and NAME.pooled.npy [samples, pooled_dim]. Latents of an autoencoder are
means, and NAME.deviations.npy has standard deviations. `empty.text.npy` and `empty.pooled.npy` are the states of the
empty text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.images.latent_format import LatentFormat
from titan_exp.config.paths.token_store_manifest import UNFINISHED

FORMAT, VERSION = "titan_exp latent store", 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")


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
        values = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if (values["format"], values["version"]) != (FORMAT, VERSION):
            raise ValueError(f"it is {values['format']} {values['version']}, not {FORMAT} {VERSION}")
        splits = {split: [LatentShard(**shard) for shard in values["splits"][split]] for split in SPLITS}
        own = {key: value for key, value in values.items() if key not in ("format", "version", "splits")}
        return LatentManifest(path=path, splits=splits, **own)
    except FileNotFoundError:
        remedy = f"titan-exp encode images=emoji out={folder} writes one, or images=glyphs, which needs no font"
        reason = f"there is no {MANIFEST} in it" if path.is_dir() else "no such folder"
        if (path / UNFINISHED).is_dir():
            reason, remedy = "it is not finished", "the titan-exp encode command that began it, which continues"
    except (KeyError, TypeError):
        reason = f"its {MANIFEST} is not that of a latent store of this version"
        remedy = "encode the images again, into another folder"
    except (OSError, ValueError) as error:
        reason, remedy = f"its {MANIFEST} cannot be read: {error}", "encode the images again, into another folder"
    raise UserError("The latent store cannot be used.", [Violation("data.paths", str(folder), reason, remedy)])
