"""Frozen networks of diffusers and transformers from local folders, with errors in words and without their messages."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
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
        reason = f"it cannot be loaded: {shorten(str(error), 160, placeholder=' ...')}"
        raise _refusal(option, folder, reason, contents) from error
    finally:
        logging.disable(level)


@contextmanager
def encoders_of_samples() -> Iterator[None]:
    """Say of an encoder that cannot be loaded that the samples of a store or a run name it: options cannot replace it.

    Raises:
        UserError: an encoder cannot be loaded.
    """
    try:
        yield
    except UserError as error:
        remedy = "the folder that the samples were encoded with, back in this place (a link will do)"
        found = [replace(violation, remedy=remedy) for violation in error.violations]
        raise UserError("An encoder of the samples cannot be loaded.", found) from error


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


def load_tokenizer(path: Path) -> Any:
    """Tokenizer of a folder.

    Raises:
        ValueError: its vocabulary is missing, for which transformers would take a few special tokens.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    files = dict(tokenizer.vocab_files_names)
    whole = files.pop("tokenizer_file", "tokenizer.json")
    if not (path / whole).is_file() and not (files and all((path / name).is_file() for name in files.values())):
        raise ValueError(f"{path.name} has no {whole}, and no vocabulary in {' and '.join(files.values())}")
    return tokenizer


def _refusal(option: str, folder: str, reason: str, remedy: str) -> UserError:
    return UserError("A frozen network cannot be used.", [Violation(option, folder, reason, remedy)])
