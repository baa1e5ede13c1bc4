"""Garbage collection, off while many objects are made: it visits all of them, and those of torch, again and again."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage, then none in the `with` block, as in the trainer's steps: reference cycles stay allocated."""
    collecting, frozen = gc.isenabled(), gc.get_freeze_count()
    # Within such a block, only what was made since the last collection is visited.
    gc.collect(2 if collecting else 1)
    gc.disable()
    if not frozen:
        # Collections within the block visit what is made in it.
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if collecting:
            gc.enable()
