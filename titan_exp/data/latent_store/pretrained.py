"""Frozen networks of diffusers and transformers from local folders, with errors in words and without their messages."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from titan_exp.config.errors.user_error import UserError, Violation


@contextmanager
def loading(option: str, folder: str, contents: str) -> Iterator[None]:
    """Name the folder of an option in errors of packages and files in the `with` block; `contents` is the remedy.

    Raises:
        UserError: a package is not installed, or a file is missing, damaged or of something else.
    """
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # packages set the levels of their loggers when they are imported
    try:
        yield
    except ImportError as error:
        remedy = "pip install 'titan_exp[diffusion]'"
        raise _refusal(option, folder, f"a package that reads it is not installed: {error}", remedy) from error
    except UserError:
        raise
    except Exception as error:  # files of many formats
        reason = f"it cannot be loaded: {str(error).strip().partition(chr(10))[0]}"
        raise _refusal(option, folder, reason, contents) from error
    finally:
        logging.disable(level)


def load_network(kind: Any, path: Path) -> Any:
    """Network of a class with `from_pretrained`, in evaluation mode on the GPU, if there is one.

    Raises:
        ValueError: weights are missing, for which the class would take random ones.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    network, found = kind.from_pretrained(path, local_files_only=True, output_loading_info=True)
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"{path.name} has no weights of {missing[0]} and {len(missing) - 1:,} others")
    return network.eval().to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _refusal(option: str, folder: str, reason: str, remedy: str) -> UserError:
    return UserError("A frozen network cannot be used.", [Violation(option, folder, reason, remedy)])
