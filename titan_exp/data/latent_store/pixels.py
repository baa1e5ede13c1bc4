"""Pixels as latents: image tokens are patches of 2 by 2 pixels, without an autoencoder.

Features of a token are ordered by channel, row and column in the patch, as Flux orders those of latents.
"""

import numpy as np

NAME = "pixels"
"""Name in a store's manifest."""
PATCH = 2
"""Height and width of a patch."""


def to_tokens(image: np.ndarray) -> np.ndarray:
    """Image [height, width, 3] in uint8 to tokens [height / 2 · width / 2, 12] in fp32, from -1 to 1."""
    height, width, channels = image.shape
    patches = image.reshape(height // PATCH, PATCH, width // PATCH, PATCH, channels).transpose(0, 2, 4, 1, 3)
    return (patches.reshape(-1, channels * PATCH * PATCH) / 127.5 - 1).astype(np.float32)


def to_image(tokens: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Tokens [rows · columns, 12] to an image [2 · rows, 2 · columns, 3] in uint8, the inverse of `to_tokens`."""
    patches = tokens.reshape(rows, columns, -1, PATCH, PATCH).transpose(0, 3, 1, 4, 2)
    pixels = (patches.reshape(rows * PATCH, columns * PATCH, -1) + 1) * 127.5
    return pixels.round().clip(0, 255).astype(np.uint8)
