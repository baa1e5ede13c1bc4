"""Pixels as latents: image tokens are square patches of pixels, without an autoencoder.

Features of a token are ordered by channel, row and column in the patch, as Flux orders those of latents.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from titan_exp.config.images.latent_format import COLOURS, PIXELS


class Pixels:
    """Image codec that scales pixels to [-1, 1] and divides them into patches."""

    def __init__(self, patch: int) -> None:
        self.token_size = patch
        """Height and width of a token in pixels."""
        self.channels = COLOURS * patch**2
        """Features of a token."""

    @property
    def description(self) -> Mapping[str, Any]:
        """Entry of the manifest."""
        return {"name": PIXELS, "patch": self.token_size}

    def encode(self, images: np.ndarray) -> tuple[np.ndarray, ...]:
        """Images [n, height, width, 3] in uint8 to tokens [n, rows · columns, channels] in fp32."""
        return (to_tokens(images / np.float32(127.5) - 1, self.token_size),)

    def decode(self, tokens: np.ndarray, rows: int, columns: int) -> np.ndarray:
        """Tokens [n, rows · columns, channels] to images [n, height, width, 3] in uint8."""
        return to_uint8(from_tokens(tokens, rows, columns, self.token_size))


def to_tokens(images: np.ndarray, patch: int) -> np.ndarray:
    """Images [n, height, width, channels] to patches [n, rows · columns, channels · patch²], fp32."""
    n, height, width, channels = images.shape
    patches = images.reshape(n, height // patch, patch, width // patch, patch, channels).transpose(0, 1, 3, 5, 2, 4)
    return patches.reshape(n, -1, channels * patch * patch).astype(np.float32)


def from_tokens(tokens: np.ndarray, rows: int, columns: int, patch: int) -> np.ndarray:
    """Patches [n, rows · columns, channels · patch²] to images [n, height, width, channels]."""
    patches = tokens.reshape(len(tokens), rows, columns, -1, patch, patch).transpose(0, 1, 4, 2, 5, 3)
    return patches.reshape(len(tokens), rows * patch, columns * patch, -1)


def to_uint8(images: np.ndarray) -> np.ndarray:
    """Images in [-1, 1] to uint8; others are clipped."""
    return ((images + 1) * 127.5).round().clip(0, 255).astype(np.uint8)
