"""Captioned images without a network: emoji of the Debian package fonts-noto-color-emoji, by their Unicode names, and
characters in the font faces that matplotlib includes."""

import string
import unicodedata
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.extensions.diffusion.images import CaptionedImages

FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")  # font of the package (Open Font License)
BITMAP_SIZE = 109  # the only size of the font's bitmaps
SKIN_TONES = {
    chr(0x1F3FB): "light",
    chr(0x1F3FC): "medium light",
    chr(0x1F3FD): "medium",
    chr(0x1F3FE): "medium dark",
    chr(0x1F3FF): "dark",
}
"""Skin-tone modifiers of faces, hands and people."""


class _Rendered(CaptionedImages):
    """Square images that are drawn when they are asked for."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self, index: int) -> tuple[int, int]:
        return self._size, self._size


class EmojiImages(_Rendered):
    """Images of all single-character emoji, and of their variants in five skin tones, on white. Raises UserError if the
    font is missing, or Pillow cannot combine characters."""

    def __init__(self, size: int) -> None:
        from PIL import features

        if not FONT.is_file():
            remedy = "apt-get install fonts-noto-color-emoji, or use images=glyphs, which needs no package"
            raise UserError("We cannot encode this.", [Violation("images", "emoji", f"there is no {FONT}", remedy)])
        if not features.check("raqm"):
            reason, remedy = "your Pillow lacks raqm, which combines characters", "pip install --force-reinstall pillow"
            raise UserError("We cannot encode this.", [Violation("images", "emoji", reason, remedy)])
        super().__init__(size)
        self._texts = self._drawn_texts()
        self.name = f"{len(self._texts)} emoji of {FONT.name}, {size}x{size}"

    def __len__(self) -> int:
        return len(self._texts)

    def caption(self, index: int) -> str:
        """Unicode name of the character, and its skin tone if it has one."""
        character, *tone = self._texts[index]
        name = unicodedata.name(character).capitalize()
        return f"{name}, {SKIN_TONES[tone[0]]} skin tone" if tone else name

    def image(self, index: int) -> np.ndarray:
        from PIL import Image, ImageDraw

        text = self._texts[index]
        left, top, right, bottom = (round(edge) for edge in self._font.getbbox(text))
        side = max(right - left, bottom - top)
        image = Image.new("RGB", (side, side), "white")
        place = ((side - right - left) / 2, (side - bottom - top) / 2)
        ImageDraw.Draw(image).text(place, text, font=self._font, embedded_color=True)
        return np.asarray(image.resize((self._size, self._size), Image.Resampling.LANCZOS))

    @cached_property
    def _font(self) -> Any:
        from PIL import ImageFont

        return ImageFont.truetype(str(FONT), BITMAP_SIZE)

    def _drawn_texts(self) -> list[str]:
        """Characters that have a name and that the font draws, each followed by its skin-tone variants."""
        from matplotlib.ft2font import FT2Font

        texts = list[str]()
        for character in sorted(map(chr, FT2Font(str(FONT)).get_charmap())):
            if (
                character in SKIN_TONES
                or not unicodedata.name(character, "")
                or not self._font.getmask(character).getbbox()
            ):
                continue
            texts.append(character)
            width = self._font.getlength(character)
            texts += [character + tone for tone in SKIN_TONES if self._font.getlength(character + tone) == width]
        return texts


CHARACTERS = string.ascii_letters + string.digits + "".join(map(chr, range(0x3B1, 0x3CA)))
"""Latin letters, digits and small Greek letters."""
FAMILIES = ("DejaVu",)
"""First words of the font families whose faces are drawn; the other families have mathematical symbols."""


class GlyphImages(_Rendered):
    """Images of each character in each face, black on white, with captions."""

    def __init__(self, size: int) -> None:
        from matplotlib import get_data_path
        from matplotlib.ft2font import FT2Font

        super().__init__(size)
        files = sorted(Path(get_data_path(), "fonts", "ttf").glob("*.ttf"))
        fonts = {file: FT2Font(str(file)) for file in files}
        names = {file: f"{font.family_name} {font.style_name}".removesuffix(" Book") for file, font in fonts.items()}
        self._pairs = [
            (file, face, character)
            for file, face in names.items()
            if face.startswith(FAMILIES)
            for character in CHARACTERS
            if fonts[file].get_char_index(ord(character)) != 0
        ]
        self.name = f"{len(self._pairs)} glyphs of matplotlib's fonts, {size}x{size}"

    def __len__(self) -> int:
        return len(self._pairs)

    def caption(self, index: int) -> str:
        """Unicode name of the character, family and style of the face."""
        _, face, character = self._pairs[index]
        return f"{unicodedata.name(character).capitalize()}, {face}"

    def image(self, index: int) -> np.ndarray:
        from PIL import Image, ImageDraw, ImageFont

        file, _, character = self._pairs[index]
        image = Image.new("RGB", (self._size, self._size), "white")
        font = ImageFont.truetype(str(file), round(0.75 * self._size))
        middle = (self._size / 2, self._size / 2)
        ImageDraw.Draw(image).text(middle, character, fill="black", font=font, anchor="mm")
        return np.asarray(image)
