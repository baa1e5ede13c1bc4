"""Garbage collection, off while many objects are made: it visits all of them, and those of torch, again and again."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage, then none in the `with` block, as in the trainer's steps: reference cycles stay allocated."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
