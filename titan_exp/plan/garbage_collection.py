"""Garbage collection, off while many objects are made: it visits all of them, and those of torch, again and again."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage, then none in the `with` block, as in the trainer's steps: reference cycles stay allocated."""
    collecting, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.collect()
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
