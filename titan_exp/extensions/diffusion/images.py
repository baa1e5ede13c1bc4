"""Images in folders, WebDatasets and Hugging Face data sets; they are opened one by one and checked."""

import csv
import io
import json
import math
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from glob import glob
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from titan_exp.config.errors.user_error import UserError, Violation, listed

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")  # suffixes of image files


class CaptionedImages(ABC):
    """Images with captions, by index."""

    name: str  # identity of images and captions, as far as it can be known without decoding them

    @abstractmethod
    def __len__(self) -> int:
        """Number of images."""

    @abstractmethod
    def caption(self, index: int) -> str:
        """Text of an image."""

    @abstractmethod
    def size(self, index: int) -> tuple[int, int]:
        """Height and width of an image in pixels."""

    @abstractmethod
    def image(self, index: int) -> np.ndarray:
        """Image [height, width, 3] in uint8."""


def open_image(file: Path | IO[bytes], name: str) -> Any:
    """Open an image with Pillow, without reading its pixels. Raises UserError if it is not an image."""
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(file)
    except (OSError, UnidentifiedImageError) as error:
        raise damaged(name, error) from error


def to_rgb(image: Any, name: str) -> np.ndarray:
    """Convert a Pillow image to [height, width, 3] in uint8; transparent parts become white. Raises UserError if it
    cannot be decoded."""
    from PIL import Image

    try:
        layers = image.convert("RGBA")
    except (OSError, ValueError, SyntaxError) as error:
        raise damaged(name, error) from error
    background = Image.new("RGBA", layers.size, "white")
    return np.asarray(Image.alpha_composite(background, layers).convert("RGB"))


def damaged(
    name: str, error: Exception, part: str = "the image", remedy: str = "replace or remove the file"
) -> UserError:
    """Make the error for an image, or another part of a data set, that cannot be decoded."""
    violation = Violation("paths", name, f"we cannot read {part}: {error}", remedy)
    return UserError("We cannot encode this.", [violation])


def no_images(paths: str, reason: str, remedy: str) -> UserError:
    """Make the error for a source without images."""
    return UserError("We cannot encode this.", [Violation("paths", paths, reason, remedy)])


class Bucket(NamedTuple):
    """Aspect bucket: a shape in image tokens."""

    rows: int  # rows of image tokens
    columns: int  # columns of image tokens


def aspect_buckets(side: int, max_aspect: float) -> list[Bucket]:
    """Shapes with side² tokens and at most this ratio of their sides, from wide to high; a ratio of 1 gives only the
    square. Sides with many divisors have many shapes: 48 tokens have 36 × 64 (9:16) and 32 × 72 besides 48 × 48."""
    tokens = side**2
    shapes = [Bucket(rows, tokens // rows) for rows in range(1, tokens + 1) if tokens % rows == 0]
    return [shape for shape in shapes if max(shape) <= max_aspect * min(shape)]


def nearest_bucket(height: int, width: int, buckets: list[Bucket]) -> Bucket:
    """Bucket with the nearest ratio of sides, measured as a factor."""
    return min(buckets, key=lambda shape: abs(math.log(shape.rows / shape.columns * width / height)))


def fit(image: np.ndarray, bucket: Bucket, token_size: int) -> np.ndarray:
    """Scale an image [height, width, 3] in uint8 to cover the bucket, and crop its middle."""
    from PIL import Image

    height, width = bucket.rows * token_size, bucket.columns * token_size
    if image.shape[:2] == (height, width):
        return image
    factor = max(height / image.shape[0], width / image.shape[1])
    size = max(width, round(factor * image.shape[1])), max(height, round(factor * image.shape[0]))
    scaled = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.LANCZOS))
    top, left = (scaled.shape[0] - height) // 2, (scaled.shape[1] - width) // 2
    return scaled[top : top + height, left : left + width]


MARGIN = 4  # pixels between images
TEXT_HEIGHT = 11  # height in pixels of a line of a caption
LEAST_WIDTH = 96  # width in pixels below which images are enlarged by a whole factor, so that captions can be read


def save_image(path: Path, image: np.ndarray, description: Mapping[str, Any]) -> None:
    """Write an image [height, width, 3] in uint8 as PNG, with a description that `identify -verbose` shows."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    for key, value in description.items():
        info.add_itxt(key, str(value))
    Image.fromarray(image).save(path, pnginfo=info)


def image_grid(images: Sequence[np.ndarray], captions: Sequence[str], columns: int) -> np.ndarray:
    """Lay out images [height, width, 3] in uint8 in rows of `columns`, each above its caption, as one image."""
    from PIL import Image, ImageDraw, ImageFont

    height, width = (max(image.shape[axis] for image in images) for axis in (0, 1))
    factor = max(1, -(-LEAST_WIDTH // width))
    height, width = factor * height, factor * width
    font = ImageFont.load_default(TEXT_HEIGHT - 1)
    lines = [_wrapped(caption, font, width) for caption in captions]
    cell = (width + MARGIN, height + TEXT_HEIGHT * max(map(len, lines)) + MARGIN)
    rows = -(-len(images) // columns)
    grid = Image.new("RGB", (columns * cell[0] + MARGIN, rows * cell[1] + MARGIN), "white")
    draw = ImageDraw.Draw(grid)
    for number, (image, words) in enumerate(zip(images, lines, strict=True)):
        left, top = MARGIN + number % columns * cell[0], MARGIN + number // columns * cell[1]
        size = (factor * image.shape[1], factor * image.shape[0])
        grid.paste(Image.fromarray(image).resize(size, Image.Resampling.NEAREST), (left, top))
        for line, text in enumerate(words):
            draw.text((left, top + height + line * TEXT_HEIGHT), text, fill="black", font=font)
    return np.asarray(grid)


def _wrapped(caption: str, font: Any, width: int) -> list[str]:
    """Lines of a caption, no wider than the image except for single words."""
    lines = [""]
    for word in caption.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


class _ListedImages(CaptionedImages):
    """Images that are opened one by one; `_pairs` has an opener for each, and its caption."""

    _pairs: list[tuple[Any, str]]

    @abstractmethod
    def _open(self, image: Any) -> tuple[Any, str]:
        """Open an image with Pillow; returns it with its name for messages."""

    def __len__(self) -> int:
        return len(self._pairs)

    def caption(self, index: int) -> str:
        return self._pairs[index][1]

    def size(self, index: int) -> tuple[int, int]:
        image, _ = self._open(self._pairs[index][0])
        with image:
            return image.height, image.width

    def image(self, index: int) -> np.ndarray:
        image, name = self._open(self._pairs[index][0])
        with image:
            return to_rgb(image, name)


class _Member(NamedTuple):
    """File inside a shard."""

    shard: Path
    name: str
    offset: int
    size: int

    def read(self) -> bytes:
        with self.shard.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


class WebDatasetImages(_ListedImages):
    """Images in uncompressed tar files that have a caption in KEY.txt, or under `caption_key` in KEY.json. `paths` is a
    shard or a pattern, as in `shards/*.tar`. Raises UserError if there are none, or one is damaged."""

    def __init__(self, paths: str, caption_key: str) -> None:
        shards = [Path(path) for path in sorted(glob(str(Path(paths).expanduser())))]
        if not shards:
            remedy = "give tar files, as in images=webdataset paths='shards/*.tar'"
            raise no_images(paths, "no file has this name", remedy)
        self._pairs = []
        digest, seen = blake2b(digest_size=8), 0
        for shard in shards:
            for image, caption in _samples(shard, caption_key):
                seen += 1
                if caption:
                    self._pairs.append((image, caption))
                    digest.update(json.dumps([image.name, image.size, caption]).encode())
        if not self._pairs:
            reason = f"none of {seen} images in {len(shards)} shards has a caption"
            remedy = f"write KEY.txt beside KEY.jpg, or {caption_key} in KEY.json, or name its key: caption_key=NAME"
            raise no_images(paths, reason, remedy)
        left_out = seen - len(self._pairs)
        self.name = f"{len(self._pairs)} images of tar files, {left_out} without caption left out, {digest.hexdigest()}"

    def _open(self, image: _Member) -> tuple[Any, str]:
        name = f"{image.shard}: {image.name}"
        return open_image(io.BytesIO(image.read()), name), name


def _samples(shard: Path, caption_key: str) -> Iterator[tuple[_Member, str]]:
    """Images of a shard with their captions; the caption is empty if there is none."""
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
        remedy = (
            "copy it again, or remove it" if shard.suffix == ".tar" else f"unpack it to a plain tar: gunzip {shard}"
        )
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


FILE_KEY = "file_name"  # key of an image's path in a file of captions, as in Hugging Face's image folders


class FolderImages(_ListedImages):
    """Images with a caption in a folder and its subfolders, sorted by path. Captions are in NAME.txt, or under
    `caption_key` of a line of `*.jsonl` or `*.csv`, whose `file_name` is relative to it. Raises UserError if there are
    none, or a file of captions cannot be read."""

    def __init__(self, folder: str, caption_key: str) -> None:
        root = Path(folder).expanduser()
        if not root.is_dir():
            raise no_images(folder, "there is no such folder", "give another: images=folder paths=FOLDER")
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
            remedy = f"write NAME.txt beside NAME.png, or a metadata.jsonl with {FILE_KEY} and {caption_key}"
            raise no_images(folder, reason, remedy)
        digest = blake2b(digest_size=8)
        for path, caption in self._pairs:
            digest.update(json.dumps([str(path.relative_to(root)), path.stat().st_size, caption]).encode())
        left_out = len(files) - len(self._pairs)
        self.name = f"{len(self._pairs)} images of a folder, {left_out} without caption left out, {digest.hexdigest()}"

    def _open(self, image: Path) -> tuple[Any, str]:
        return open_image(image, str(image)), str(image)


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
                wrong = TypeError("it is not a JSON object")
                raise damaged(str(file), wrong, f"row {number}", "correct it, or remove it")
            missing = [key for key in (FILE_KEY, caption_key) if not isinstance(row.get(key), str)]
            if missing:
                reason = f"row {number} has no text under {' and '.join(missing)}, only {', '.join(map(str, row))}"
                remedy = "name the key of the captions: caption_key=NAME"
                raise UserError("We cannot encode this.", [Violation("paths", str(file), reason, remedy)])
            yield row


class HuggingFaceImages(_ListedImages):
    """Images and captions from two columns of a data set; rows without a caption are left out. Raises UserError if the
    data set cannot be loaded, or has no such column."""

    def __init__(self, path: str, split: str, image_key: str, caption_key: str) -> None:
        if not path:
            remedy = "name one, images=huggingface paths=OWNER/NAME, or a local folder"
            raise no_images(path, "you named no data set", remedy)
        data = _load(path, split)
        for option, key in (("image_key", image_key), ("caption_key", caption_key)):
            if key not in data.column_names:
                reason = f"{path} has no such column"
                remedy = f"use {option}={listed(data.column_names)}"
                raise UserError("We cannot encode this.", [Violation(option, key, reason, remedy)])
        captions = [str(text or "").strip() for text in data.select_columns([caption_key])[caption_key]]
        self._pairs = [(index, caption) for index, caption in enumerate(captions) if caption]
        if not self._pairs:
            remedy = f"name the column of the captions: caption_key={listed(data.column_names)}"
            raise no_images(path, f"no row has a caption under {caption_key}", remedy)
        self._data, self._key, self._path = data, image_key, path
        left_out = len(captions) - len(self._pairs)
        self.name = f"{len(self._pairs)} images of {path}, {left_out} without caption left out, {data._fingerprint}"

    def _open(self, image: int) -> tuple[Any, str]:
        try:
            return self._data[image][self._key], f"{self._path}: row {image}"
        except Exception as error:  # decoders of many formats
            reason = f"we cannot decode row {image}: {error}"
            raise no_images(self._path, reason, "remove the row from the data set") from error


def _load(path: str, split: str) -> Any:
    from datasets import Dataset, load_dataset, load_from_disk

    local = Path(path).expanduser()
    try:
        if (local / "state.json").is_file() or (local / "dataset_dict.json").is_file():
            found = load_from_disk(str(local))
            return found if isinstance(found, Dataset) else found[split]
        return load_dataset(str(local) if local.exists() else path, split=split)
    except Exception as error:  # the hub, its cache, and files of many formats
        reason = f"it does not load with split={split}: {str(error).strip().partition(chr(10))[0]}"
        raise no_images(path, reason, "give OWNER/NAME on the hub or a local folder, and one of its splits") from error
