"""Four captioned images of flat colours, and a latent store of them."""

from pathlib import Path

import numpy as np

from titan_exp.extensions.diffusion.config import EncodeOptions
from titan_exp.extensions.diffusion.encoders import HashedWords, Pixels
from titan_exp.extensions.diffusion.images import CaptionedImages
from titan_exp.extensions.diffusion.latent_format import LatentManifest
from titan_exp.extensions.diffusion.latents import Encoders, write_latent_store

COLOURS = {"red": (230, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 230), "white": (250, 250, 250)}


class Flags(CaptionedImages):
    """An image per colour, whose lower half is black."""

    name = "flags, 4x4"

    def __len__(self) -> int:
        return len(COLOURS)

    def caption(self, index: int) -> str:
        return f"a {list(COLOURS)[index]} flag"

    def size(self, index: int) -> tuple[int, int]:
        return 4, 4

    def image(self, index: int) -> np.ndarray:
        image = np.zeros((4, 4, 3), dtype=np.uint8)
        image[:2] = list(COLOURS.values())[index]
        return image


def write_flags(out: Path) -> LatentManifest:
    """Store with 4 image tokens of 12 features and 4 words of 16."""
    texts = HashedWords(4, 16, 16, seed=0)
    options = EncodeOptions(size=4, validation_fraction=0.0, shard_samples=3)
    return write_latent_store(out, Flags(), Encoders(Pixels(2), texts), options)
