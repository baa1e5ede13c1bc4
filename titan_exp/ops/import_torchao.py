"""Import torchao without its warnings about kernels for other hardware."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def import_torchao() -> Iterator[None]:
    """Silence warnings of torchao in the `with` block."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
