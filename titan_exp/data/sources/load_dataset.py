"""Loading through the `datasets` library: quiet without a terminal, quick to give up without a network, never running
code from the hub, and with errors in words."""

import os
import sys
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.data import DataConfig
from titan_exp.config.paths.data_files import LOADERS

_REACH_SECONDS = 5.0


def load(config: DataConfig, split: str) -> Any:
    """A `Dataset`, or with `data.streaming` an `IterableDataset`. Raises UserError where it cannot be loaded."""
    if config.dataset is None:
        remedy = "data.dataset=allenai/c4, or data.dataset=json data.data_files='[corpus.jsonl]'"
        raise UserError("There is no text to read.", [Violation("data.dataset", None, "none is named", remedy)])
    import datasets
    import datasets.config

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    needs_hub = _needs_hub(config)
    if not needs_hub:
        # Otherwise the library counts every load of local files on a server, and waits for it.
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
    except Exception as error:  # the library and what it calls raise dozens of types
        raise _explained(config, split, error, offline=offline) from error


def _needs_hub(config: DataConfig) -> bool:
    """Whether files may have to come from the hub: not for a local folder, nor for a loader with local files."""
    assert config.dataset is not None
    if any("://" in file for file in config.data_files):
        return False  # another server, of which the hub's health says nothing
    return config.dataset not in LOADERS and not Path(config.dataset).expanduser().exists()


def _hub_answers() -> bool:
    """Whether the hub can be reached, asked once and briefly; if not, the libraries are told to use their caches.

    Left alone they would retry for minutes, on every rank.
    """
    import datasets.config
    import huggingface_hub
    from huggingface_hub import constants

    if datasets.config.HF_HUB_OFFLINE or constants.HF_HUB_OFFLINE:
        return False
    try:
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=_REACH_SECONDS)
    except Exception:  # each version of the hub's client raises the types of another HTTP library
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
        return False
    return True


def _explained(config: DataConfig, split: str, error: Exception, *, offline: bool) -> UserError:
    words = (str(error).strip() or type(error).__name__).splitlines()[0]
    if offline:
        remedy = (
            "a machine that reaches the hub; or the same command once where it can be reached, to fill the cache that "
            "HF_HOME names (streaming=false); or local files: data.dataset=parquet data.data_files='[part-*.parquet]'; "
            "or data=python_stdlib"
        )
        reason = f"the hub cannot be reached, and the cache does not hold it ({words})"
        return _failure(Violation("data.dataset", config.dataset, reason, remedy))
    if "split" in words.lower():
        return _failure(Violation("data.split", split, words, "a split that the data set has"))
    if "config" in words.lower():
        return _failure(Violation("data.subset", config.subset, words, "one of the data set's configurations"))
    remedy = (
        "a data set of the hub (signed in where it is gated), a local folder, "
        f"or a loader ({', '.join(LOADERS)}) with data.data_files"
    )
    return _failure(Violation("data.dataset", config.dataset, f"{type(error).__name__}: {words}", remedy))


def _failure(violation: Violation) -> UserError:
    return UserError("The data set cannot be loaded.", [violation])
