"""Text encoders: captions and prompts to the states and the pooled embeddings of a store."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from titan_exp.config.images.latent_format import T5_AND_CLIP, LatentFormat
from titan_exp.data.latent_store import hashed_words, t5_and_clip


class TextEncoder(Protocol):
    """Frozen encoder of texts."""

    tokens: int
    """States of a text."""
    dim: int
    """Width of a state."""
    pooled_dim: int
    """Width of the pooled embedding."""

    @property
    def description(self) -> Mapping[str, Any]:
        """Entry of the manifest, from which `text_encoder` builds it again."""
        ...

    def __call__(self, caption: str) -> tuple[np.ndarray, np.ndarray]:
        """States [tokens, dim] and pooled embedding [pooled_dim], in fp32."""
        ...


def text_encoder(encoded: LatentFormat) -> TextEncoder:
    """Encoder of a store, or of images encoded in training.

    Raises:
        UserError: its package or files are missing.
    """
    texts = encoded.texts
    if texts["name"] == T5_AND_CLIP:
        return t5_and_clip.T5AndCLIP(texts["folder"], encoded.text_tokens)
    return hashed_words.HashedWords(encoded.text_tokens, encoded.text_dim, encoded.pooled_dim, texts["seed"])
