"""Text encoders: captions and prompts to the states and the pooled embeddings of a store."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from titan_exp.config.paths.latent_store_manifest import LatentManifest
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


def text_encoder(manifest: LatentManifest) -> TextEncoder:
    """Encoder of a store.

    Raises:
        UserError: its package or files are missing.
    """
    texts = manifest.texts
    if texts["name"] == t5_and_clip.NAME:
        return t5_and_clip.T5AndCLIP(texts["folder"], manifest.text_tokens)
    return hashed_words.HashedWords(manifest.text_tokens, manifest.text_dim, manifest.pooled_dim, texts["seed"])
