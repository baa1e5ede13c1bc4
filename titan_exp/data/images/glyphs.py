"""Captioned images without a network: characters in the faces of the fonts that matplotlib brings along."""

import string
import unicodedata
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

CHARACTERS = string.ascii_letters + string.digits + "".join(map(chr, range(0x3B1, 0x3CA)))
"""Latin letters, digits and small Greek letters."""
FAMILIES = ("DejaVu",)
"""Beginnings of the families whose faces are drawn; the others are of mathematical symbols."""


class GlyphImages:
    """Images of each character in each face, black on white, with their captions."""

    def __init__(self, size: int) -> None:
        from matplotlib import get_data_path

        self._size = size
        files = sorted(Path(get_data_path(), "fonts", "ttf").glob("*.ttf"))
        faces = {file: _face(file) for file in files}
        self._pairs = [
            (file, face, character)
            for file, face in faces.items()
            if face.startswith(FAMILIES)
            for character in CHARACTERS
            if _draws(file, character)
        ]
        self.name = f"{len(self._pairs)} glyphs of matplotlib's fonts, {size}x{size}"
        """Identity of the images."""

    def __len__(self) -> int:
        return len(self._pairs)

    def caption(self, index: int) -> str:
        """Unicode name of the character, family and style of the face."""
        _, face, character = self._pairs[index]
        return f"{unicodedata.name(character).capitalize()}, {face}"

    def size(self, index: int) -> tuple[int, int]:
        """Height and width."""
        return self._size, self._size

    def image(self, index: int) -> np.ndarray:
        """Image [size, size, 3] in uint8."""
        from PIL import Image, ImageDraw, ImageFont

        file, _, character = self._pairs[index]
        image = Image.new("RGB", (self._size, self._size), "white")
        font = ImageFont.truetype(str(file), round(0.75 * self._size))
        middle = (self._size / 2, self._size / 2)
        ImageDraw.Draw(image).text(middle, character, fill="black", font=font, anchor="mm")
        return np.asarray(image)


def _face(file: Path) -> str:
    font = _font(file)
    return f"{font.family_name} {font.style_name}".removesuffix(" Book")


@lru_cache(maxsize=64)
def _font(file: Path) -> Any:
    from matplotlib.ft2font import FT2Font

    return FT2Font(str(file))


def _draws(file: Path, character: str) -> bool:
    return _font(file).get_char_index(ord(character)) != 0
