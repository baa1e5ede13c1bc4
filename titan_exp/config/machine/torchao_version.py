"""torchao's version check, of kernels of recipes that older versions lack, and its quiet import.

Imports neither torch nor torchao.
"""

import importlib.metadata
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.quantization import MIN_TORCHAO


def torchao_version() -> str | None:
    """Version of the installed torchao; None without one."""
    try:
        return importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        return None


def torchao_violations(recipe: str) -> list[Violation]:
    """Violation by a torchao without the recipe's kernels."""
    installed, least = torchao_version(), MIN_TORCHAO.get(recipe)
    if least is None or installed is None or tuple(map(int, re.findall(r"\d+", installed)[:2])) >= least:
        return []
    version = ".".join(map(str, least))
    reason = f"its kernels come with torchao {version}, and torchao {installed} is installed"
    remedy = f"pip install 'torchao>={version}'; or quantization.emulate=true, which is slow"
    return [Violation("quantization.recipe", recipe, reason, remedy)]


@contextmanager
def import_torchao() -> Iterator[None]:
    """Silence warnings of torchao about kernels for other hardware in the `with` block, which imports it."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
