"""Image codecs: images to the latents of a store, and back."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from titan_exp.config.images.latent_format import AUTOENCODER
from titan_exp.data.latent_store import autoencoder, pixels


class ImageCodec(Protocol):
    """Codec between images [n, height, width, 3] in uint8 and tokens [n, rows · columns, channels] in fp32.

    The description has `posterior` if images have a distribution of latents.
    """

    token_size: int
    """Height and width of a token in pixels."""
    channels: int
    """Features of a token."""

    @property
    def description(self) -> Mapping[str, Any]:
        """Entry of the manifest, from which `image_codec` builds it again."""
        ...

    def encode(self, images: np.ndarray) -> tuple[np.ndarray, ...]:
        """Tokens of images whose height and width are multiples of `token_size`: the latents, or the means and the
        standard deviations of their posterior."""
        ...

    def decode(self, tokens: np.ndarray, rows: int, columns: int) -> np.ndarray:
        """Images of tokens."""
        ...


def image_codec(description: Mapping[str, Any]) -> ImageCodec:
    """Codec of a manifest's entry `latents`.

    Raises:
        UserError: its package or files are missing.
    """
    if description["name"] == AUTOENCODER:
        return autoencoder.Autoencoder(description["folder"])
    return pixels.Pixels(description["patch"])
