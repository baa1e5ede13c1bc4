"""`datasets.load_dataset` with a short offline check, readable errors, no remote code, and progress bars only on a
terminal."""

import os
import sys
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.data import DataConfig
from titan_exp.config.paths.data_files import LOADERS

_HUB_TIMEOUT_SECONDS = 5.0
_COMPRESSIONS = {"zstd": "zstandard", "lz4": "lz4"}
"""Packages by the compressions that the library names when it lacks them."""


def load_split(config: DataConfig, split: str) -> Any:
    """Load a `Dataset`, or an `IterableDataset` with `data.streaming`. Raises UserError if it cannot be loaded."""
    if config.dataset is None:
        remedy = "data.dataset=allenai/c4, or data.dataset=json data.data_files='[corpus.jsonl]'"
        raise UserError("There is no text to read.", [Violation("data.dataset", None, "no data set is given", remedy)])
    import datasets
    import datasets.config

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    needs_hub = _needs_hub(config)
    if not needs_hub:
        # By default the library reports every load of local files to a server, and waits for it.
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    offline = needs_hub and not _hub_answers()
    try:
        return datasets.load_dataset(
            os.path.expanduser(config.dataset),
            config.subset,
            data_files=[os.path.expanduser(file) for file in config.data_files] or None,
            split=split,
            streaming=config.streaming,
        )
    except Exception as error:  # the library and its dependencies raise many types
        raise explain(config, split, error, offline=offline) from error


def _needs_hub(config: DataConfig) -> bool:
    """True if the hub may be needed: not for a local folder or a loader with local files."""
    assert config.dataset is not None
    if any("://" in file for file in config.data_files):
        return False  # another server, independent of the hub
    return config.dataset not in LOADERS and not Path(config.dataset).expanduser().exists()


def _hub_answers() -> bool:
    """True if the hub answers a short request; otherwise switch the libraries to offline mode.

    By default they would retry for minutes, on every rank.
    """
    import datasets.config
    import huggingface_hub
    from huggingface_hub import constants

    if datasets.config.HF_HUB_OFFLINE or constants.HF_HUB_OFFLINE:
        return False
    try:
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_SECONDS)
    except Exception:  # the HTTP library differs between versions of the hub client
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
        return False
    return True


def explain(config: DataConfig, split: str, error: Exception, *, offline: bool = False) -> UserError:
    """Error of a data set that cannot be loaded or read."""
    import datasets.exceptions

    # The error that the library raises about a file says only that there was one.
    of_file = isinstance(error, datasets.exceptions.DatasetGenerationError)
    error = error.__cause__ if of_file and isinstance(error.__cause__, Exception) else error
    message = (str(error).strip() or type(error).__name__).splitlines()[0]
    if offline:
        remedy = (
            "a machine that reaches the hub; or the same command once on such a machine, to fill the cache of "
            "HF_HOME (streaming=false); or local files: data.dataset=parquet data.data_files='[part-*.parquet]'; "
            "or data=python_stdlib"
        )
        reason = f"the hub cannot be reached, and the cache lacks it ({message})"
        return _failure(Violation("data.dataset", config.dataset, reason, remedy))
    if "split" in message.lower():
        return _failure(Violation("data.split", split, message, "a split of the data set"))
    if "config" in message.lower():
        return _failure(Violation("data.subset", config.subset, message, "one of the data set's configurations"))
    if (
        package := next((name for kind, name in _COMPRESSIONS.items() if f"type {kind} not" in message), None)
    ) is not None:
        key = "data.data_files" if config.data_files else "data.dataset"
        value = list(config.data_files) or config.dataset
        return _failure(Violation(key, value, f"its files are unpacked by {package}", f"pip install {package}"))
    if config.data_files and not isinstance(error, FileNotFoundError):
        empty = isinstance(error, StopIteration)
        reason = "there are no rows" if empty else f"{type(error).__name__}: {message}"
        return _failure(
            Violation(
                "data.data_files", list(config.data_files), reason, f"files that the loader {config.dataset} reads"
            )
        )
    remedy = (
        "a data set of the hub (signed in if it is gated), a local folder, "
        f"or a loader ({', '.join(LOADERS)}) with data.data_files"
    )
    return _failure(Violation("data.dataset", config.dataset, f"{type(error).__name__}: {message}", remedy))


def _failure(violation: Violation) -> UserError:
    return UserError("The data set cannot be loaded.", [violation])
