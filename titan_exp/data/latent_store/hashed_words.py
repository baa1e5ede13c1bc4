"""Text encoder without training: a frozen random vector for each word, by its hash, plus sinusoids of its place.

Any word has a vector, so that captions that no one trained on can be encoded.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from titan_exp.config.images.latent_format import HASHED_WORDS
from titan_exp.data.keyed_random import keyed_generator


class HashedWords:
    """Encoder of captions; words are letters and digits, in any case."""

    def __init__(self, tokens: int, dim: int, pooled_dim: int, seed: int) -> None:
        self.tokens, self.dim, self.pooled_dim, self.seed = tokens, dim, pooled_dim, seed
        half = -(-dim // 2)
        angles = np.arange(tokens)[:, None] * 10_000.0 ** (-np.arange(half) / half)
        self._places = np.concatenate((np.cos(angles), np.sin(angles)), axis=1)[:, :dim]

    @property
    def description(self) -> Mapping[str, Any]:
        """Entry of the manifest."""
        return {"name": HASHED_WORDS, "seed": self.seed}

    def __call__(self, caption: str) -> tuple[np.ndarray, np.ndarray]:
        """States [tokens, dim] of the first words, zeros behind the last one, and the sum of all words' vectors over
        the root of their number [pooled_dim], in fp32."""
        words = re.findall(r"\w+", caption.lower())
        states, pooled = np.zeros((self.tokens, self.dim)), np.zeros(self.pooled_dim)
        for place, word in enumerate(words[: self.tokens]):
            states[place] = self._vector(word, "state", self.dim) + self._places[place]
        for word in words:
            pooled += self._vector(word, "pooled", self.pooled_dim) / len(words) ** 0.5
        return states.astype(np.float32), pooled.astype(np.float32)

    def _vector(self, word: str, purpose: str, width: int) -> np.ndarray:
        return keyed_generator(self.seed, 0, f"{purpose}/{word}").standard_normal(width)
