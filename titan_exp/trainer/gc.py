"""Garbage collection at the same steps on every rank, so that no rank delays the others."""

import gc


class GarbageCollection:
    """Collects every `every` steps only; 0 leaves Python's automatic collection on."""

    def __init__(self, every: int) -> None:
        self.every = every
        if every:
            gc.disable()
            gc.collect(1)

    def step(self, step: int) -> None:
        """Called once after each step."""
        if self.every and step % self.every == 0:
            # Generation 1 is cheap, and garbage of a training loop is young.
            gc.collect(1)

    def close(self) -> None:
        """Enable automatic collection again."""
        gc.enable()
