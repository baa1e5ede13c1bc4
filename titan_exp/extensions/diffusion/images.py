"""Captioned images: their interface, aspect buckets, and grids with a caption under each image.

Aspect buckets are shapes with equally many image tokens; images are scaled and cropped to the nearest one. Samples of
all shapes then have sequences of one length and share batches.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.extensions.diffusion.config import ImageOptions, ImageSource

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
"""Suffixes of image files."""


class CaptionedImages(Protocol):
    """Images with captions, by index."""

    name: str
    """Identity of images and captions, as far as it can be known without decoding them."""

    def __len__(self) -> int:
        """Number of images."""
        ...

    def caption(self, index: int) -> str:
        """Text of an image."""
        ...

    def size(self, index: int) -> tuple[int, int]:
        """Height and width of an image in pixels."""
        ...

    def image(self, index: int) -> np.ndarray:
        """Image [height, width, 3] in uint8."""
        ...


def open_image(file: Path | IO[bytes], name: str) -> Any:
    """Image of Pillow, whose pixels are not read yet.

    Raises:
        UserError: it is no image.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(file)
    except (OSError, UnidentifiedImageError) as error:
        raise damaged(name, error) from error


def to_rgb(image: Any, name: str) -> np.ndarray:
    """Image of Pillow as [height, width, 3] in uint8; transparent parts become white.

    Raises:
        UserError: it cannot be decoded.
    """
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
    """Error of an image, or another part of a data set, that cannot be decoded."""
    violation = Violation("paths", name, f"{part} cannot be read: {error}", remedy)
    return UserError("This cannot be encoded.", [violation])


def no_images(paths: str, reason: str, remedy: str) -> UserError:
    """Error of a source without images."""
    return UserError("This cannot be encoded.", [Violation("paths", paths, reason, remedy)])


class Bucket(NamedTuple):
    """Shape in image tokens."""

    rows: int
    """Rows of image tokens."""
    columns: int
    """Columns of image tokens."""


def aspect_buckets(side: int, max_aspect: float) -> list[Bucket]:
    """Shapes with side² tokens and at most this ratio of their sides, from wide to high; with 1 only the square.

    Sides with many divisors have many shapes: 48 tokens have 36 × 64 (9:16) and 32 × 72 besides 48 × 48.
    """
    tokens = side**2
    shapes = [Bucket(rows, tokens // rows) for rows in range(1, tokens + 1) if tokens % rows == 0]
    return [shape for shape in shapes if max(shape) <= max_aspect * min(shape)]


def nearest_bucket(height: int, width: int, buckets: list[Bucket]) -> Bucket:
    """Bucket whose ratio of sides is nearest, as a factor."""
    return min(buckets, key=lambda shape: abs(math.log(shape.rows / shape.columns * width / height)))


def fit(image: np.ndarray, bucket: Bucket, token_size: int) -> np.ndarray:
    """Image [height, width, 3] in uint8, scaled to cover the bucket, and its middle."""
    from PIL import Image

    height, width = bucket.rows * token_size, bucket.columns * token_size
    if image.shape[:2] == (height, width):
        return image
    factor = max(height / image.shape[0], width / image.shape[1])
    size = max(width, round(factor * image.shape[1])), max(height, round(factor * image.shape[0]))
    scaled = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.LANCZOS))
    top, left = (scaled.shape[0] - height) // 2, (scaled.shape[1] - width) // 2
    return scaled[top : top + height, left : left + width]


def open_images(source: ImageSource, options: ImageOptions) -> CaptionedImages:
    """Open images.

    Raises:
        UserError: there are none, or they cannot be read.
    """
    match source.images:
        case "emoji":
            from titan_exp.extensions.diffusion.rendered_images import EmojiImages

            return EmojiImages(options.size)
        case "glyphs":
            from titan_exp.extensions.diffusion.rendered_images import GlyphImages

            return GlyphImages(options.size)
        case "folder":
            from titan_exp.extensions.diffusion.image_files import FolderImages

            return FolderImages(source.paths, options.caption_key)
        case "webdataset":
            from titan_exp.extensions.diffusion.image_files import WebDatasetImages

            return WebDatasetImages(source.paths, options.caption_key)
        case "huggingface":
            from titan_exp.extensions.diffusion.image_files import HuggingFaceImages

            return HuggingFaceImages(source.paths, options.split, options.image_key, options.caption_key)


MARGIN = 4
"""Pixels between images."""
TEXT_HEIGHT = 11
"""Pixels of a line of a caption."""
LEAST_WIDTH = 96
"""Narrower images are enlarged by a whole factor to at least this, so that captions can be read."""


def save_image(path: Path, image: np.ndarray, description: Mapping[str, Any]) -> None:
    """Write an image [height, width, 3] in uint8 as PNG, with a description that `identify -verbose` shows."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    for key, value in description.items():
        info.add_itxt(key, str(value))
    Image.fromarray(image).save(path, pnginfo=info)


def image_grid(images: Sequence[np.ndarray], captions: Sequence[str], columns: int) -> np.ndarray:
    """Images [height, width, 3] in uint8, in rows of `columns`, each above its caption, as one image."""
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
    """Lines of a caption that are no wider than an image, but for single words."""
    lines = [""]
    for word in caption.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
