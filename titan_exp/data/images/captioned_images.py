"""Interface of captioned images, and their conversion to arrays."""

from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from titan_exp.config.errors.user_error import UserError, Violation

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
