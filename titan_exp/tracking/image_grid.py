"""Image files: single images with their description, and grids with a caption under each."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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
