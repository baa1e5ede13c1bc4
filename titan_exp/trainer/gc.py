"""Garbage collection at the same steps on every rank, so that no rank delays the others."""

import gc

from titan_exp.trainer.part import Part, Run, Step


class GarbageCollection(Part):
    """Collects every `every` steps only."""

    name = "garbage_collection"
    isolated = False  # it runs nothing of a model's

    def __init__(self, every: int) -> None:
        self._every = every

    def begin(self, run: Run) -> None:
        """Disable automatic collection."""
        gc.disable()
        gc.collect(1)

    def after(self, step: Step) -> None:
        """Collect if due."""
        if step.step % self._every == 0:
            # Generation 1 is cheap, and garbage of a training loop is young.
            gc.collect(1)

    def close(self) -> None:
        """Enable automatic collection again."""
        gc.enable()
