"""Aspect buckets: shapes with equally many image tokens, and images that are scaled and cropped to the nearest one.

Samples of all shapes then have sequences of one length and share batches.
"""

import math
from typing import NamedTuple

import numpy as np


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
