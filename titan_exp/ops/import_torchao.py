"""Importing torchao without what it says of itself: of its kernels, those for other hardware cannot be loaded, of which
it warns every process."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def import_torchao() -> Iterator[None]:
    """Only errors are said inside."""
    talkative = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in talkative]
    for logger in talkative:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(talkative, levels, strict=True):
            logger.setLevel(level)
