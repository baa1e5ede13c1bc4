"""Python's garbage collection at the same steps on every rank, so that no rank makes the others wait."""

import gc


class GarbageCollection:
    """Collects every `every` steps and at no other time; with 0 Python decides by itself."""

    def __init__(self, every: int) -> None:
        self.every = every
        if every:
            gc.disable()
            gc.collect(1)

    def step(self, step: int) -> None:
        """Called once after each step."""
        if self.every and step % self.every == 0:
            # Generation 1: cheap, and what a training loop leaves behind is young.
            gc.collect(1)

    def close(self) -> None:
        """Give collection back to Python."""
        gc.enable()
