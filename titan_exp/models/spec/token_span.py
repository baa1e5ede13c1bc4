"""Tokens of a sequence that a layer computes, for FLOPs. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenSpan:
    """Tokens of a sequence that a layer computes, as the bounds of a slice."""

    start: int = 0
    """First token."""
    stop: int | None = None
    """End of the tokens; None is that of the sequence."""

    def share(self, seq_len: int) -> float:
        """Computed tokens per token of a sequence."""
        return len(range(seq_len)[self.start : self.stop]) / seq_len


EVERY_TOKEN = TokenSpan()
"""All tokens of a sequence."""
ONCE = TokenSpan(stop=1)
"""As many as one token: a layer over a vector per sequence."""
