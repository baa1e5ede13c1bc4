"""WebDataset shards: tar files in which files with equal names up to the first dot are one sample."""

import io
import json
import tarfile
from collections.abc import Iterator
from glob import glob
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from titan_exp.data.images.captioned_images import SUFFIXES, damaged, no_images, open_image, to_rgb


class _Member(NamedTuple):
    """A file in a shard."""

    shard: Path
    name: str
    offset: int
    size: int

    def read(self) -> bytes:
        with self.shard.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


class WebDatasetImages:
    """Images of uncompressed tar files that have a caption in KEY.txt, or under `caption_key` of KEY.json.

    `paths` is a shard or a pattern, as in `shards/*.tar`. Raises UserError if there are none, or one is damaged.
    """

    def __init__(self, paths: str, caption_key: str) -> None:
        shards = [Path(path) for path in sorted(glob(str(Path(paths).expanduser())))]
        if not shards:
            raise no_images(paths, "no file has this name", "images=webdataset paths='shards/*.tar'")
        self._pairs = list[tuple[_Member, str]]()
        digest, seen = blake2b(digest_size=8), 0
        for shard in shards:
            for image, caption in _samples(shard, caption_key):
                seen += 1
                if caption:
                    self._pairs.append((image, caption))
                    digest.update(json.dumps([image.name, image.size, caption]).encode())
        if not self._pairs:
            reason = f"none of {seen} images in {len(shards)} shards has a caption"
            raise no_images(paths, reason, f"KEY.txt beside KEY.jpg, or {caption_key} in KEY.json (caption_key=...)")
        left_out = seen - len(self._pairs)
        self.name = f"{len(self._pairs)} images of tar files, {left_out} without caption left out, {digest.hexdigest()}"

    def __len__(self) -> int:
        return len(self._pairs)

    def caption(self, index: int) -> str:
        """Caption of an image."""
        return self._pairs[index][1]

    def size(self, index: int) -> tuple[int, int]:
        """Height and width."""
        member, _ = self._pairs[index]
        with open_image(io.BytesIO(member.read()), f"{member.shard}: {member.name}") as image:
            return image.height, image.width

    def image(self, index: int) -> np.ndarray:
        """Image [height, width, 3] in uint8."""
        member, _ = self._pairs[index]
        name = f"{member.shard}: {member.name}"
        with open_image(io.BytesIO(member.read()), name) as image:
            return to_rgb(image, name)


def _samples(shard: Path, caption_key: str) -> Iterator[tuple[_Member, str]]:
    """Images of a shard with their captions, empty without one."""
    samples = dict[str, dict[str, _Member]]()
    try:
        with tarfile.open(shard, "r:") as archive:
            for info in archive:
                if info.isfile():
                    folder, _, file = info.name.rpartition("/")
                    key, _, suffix = file.partition(".")
                    member = _Member(shard, info.name, info.offset_data, info.size)
                    samples.setdefault(f"{folder}/{key}", {})[f".{suffix.lower()}"] = member
    except (tarfile.TarError, OSError) as error:
        remedy = "copy it again, or remove it" if shard.suffix == ".tar" else "an uncompressed tar file, as of gunzip"
        raise damaged(str(shard), error, "the shard", remedy) from error
    for files in samples.values():
        image = next((files[suffix] for suffix in SUFFIXES if suffix in files), None)
        if image is None:
            continue
        caption = ""
        if ".txt" in files:
            caption = files[".txt"].read().decode("utf-8", "replace")
        elif ".json" in files:
            try:
                found = json.loads(files[".json"].read())
            except ValueError as error:
                raise damaged(
                    f"{shard}: {files['.json'].name}", error, "the caption", "write the shard again"
                ) from error
            text = found.get(caption_key) if isinstance(found, dict) else None
            caption = text if isinstance(text, str) else ""
        yield image, caption.strip()
