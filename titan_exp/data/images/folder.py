"""Folder of images with captions: a text file beside each image, or one file of JSON lines or CSV for all."""

import csv
import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import count
from pathlib import Path

import numpy as np

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.data.images.captioned_images import SUFFIXES, damaged, no_images, open_image, to_rgb

FILE_KEY = "file_name"
"""Key of an image's path in a file of captions, as in Hugging Face's image folders."""


class FolderImages:
    """Images of a folder and the folders in it that have a caption, sorted by path.

    Captions are in NAME.txt, or under `caption_key` of a line of `*.jsonl` or `*.csv`, whose `file_name` is relative to
    it.

    Raises:
        UserError: there are none, or a file of captions cannot be read.
    """

    def __init__(self, folder: str, caption_key: str) -> None:
        root = Path(folder).expanduser()
        if not root.is_dir():
            raise no_images(folder, "no such folder", "images=folder paths=FOLDER")
        files = sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES)
        listed = {
            (file.parent / row[FILE_KEY]).resolve(): row[caption_key]
            for file in sorted((*root.rglob("*.jsonl"), *root.rglob("*.csv")))
            for row in _rows(file, caption_key)
        }
        captions = {path: _caption(path, listed) for path in files}
        self._pairs = [(path, caption) for path, caption in captions.items() if caption]
        if not self._pairs:
            reason = f"none of its {len(files)} images has a caption"
            remedy = f"NAME.txt beside NAME.png, or a metadata.jsonl with {FILE_KEY} and {caption_key}"
            raise no_images(folder, reason, remedy)
        digest = blake2b(digest_size=8)
        for path, caption in self._pairs:
            digest.update(json.dumps([str(path.relative_to(root)), path.stat().st_size, caption]).encode())
        left_out = len(files) - len(self._pairs)
        self.name = f"{len(self._pairs)} images of a folder, {left_out} without caption left out, {digest.hexdigest()}"

    def __len__(self) -> int:
        return len(self._pairs)

    def caption(self, index: int) -> str:
        """Caption of an image."""
        return self._pairs[index][1]

    def size(self, index: int) -> tuple[int, int]:
        """Height and width, from the file's header."""
        path, _ = self._pairs[index]
        with open_image(path, str(path)) as image:
            return image.height, image.width

    def image(self, index: int) -> np.ndarray:
        """Image [height, width, 3] in uint8."""
        path, _ = self._pairs[index]
        with open_image(path, str(path)) as image:
            return to_rgb(image, str(path))


def _caption(path: Path, listed: Mapping[Path, str]) -> str:
    text = path.with_suffix(".txt")
    if not text.is_file():
        return listed.get(path.resolve(), "").strip()
    try:
        return text.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise damaged(str(text), error, "the caption", "save it as UTF-8, or remove the file") from error


def _rows(file: Path, caption_key: str) -> Iterator[Mapping[str, str]]:
    with file.open(encoding="utf-8", newline="") as lines:
        rows = csv.DictReader(lines) if file.suffix == ".csv" else (json.loads(line) for line in lines if line.strip())
        for number in count(1):
            try:
                row = next(rows, None)
            except (csv.Error, ValueError) as error:
                raise damaged(str(file), error, f"row {number}", "correct the row, or remove it") from error
            if row is None:
                return
            if not isinstance(row, dict):
                raise damaged(str(file), TypeError("it is no JSON object"), f"row {number}", "correct it, or remove it")
            missing = [key for key in (FILE_KEY, caption_key) if not isinstance(row.get(key), str)]
            if missing:
                reason = f"row {number} has no text under {' and '.join(missing)}; it has {', '.join(map(str, row))}"
                remedy = "caption_key=NAME of the captions"
                raise UserError("This cannot be encoded.", [Violation("paths", str(file), reason, remedy)])
            yield row
