"""Sizes of the inputs of a model of latents: noisy image tokens, and the states of their texts. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LatentInputs:
    """Sizes by the key of the model's configuration, and optional inputs."""

    patch_dim: int
    """Numbers per image token."""
    text_tokens: int
    """Text tokens of a sample; the rest of a sequence are image tokens."""
    text_dim: int
    """Width of their states."""
    pooled_dim: int
    """Width of a text's pooled embedding."""
    guidance: bool
    """True if the model reads a guidance scale."""
