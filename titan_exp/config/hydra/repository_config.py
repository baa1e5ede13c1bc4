"""OmegaConf resolvers for a model repository: the content of its `config.json`, and single sizes in it."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from titan_exp.config.errors.did_you_mean import did_you_mean
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.resolve import UnreadableSourceError
from titan_exp.config.paths.foreign_json import read_object

CONFIG_FILE = "config.json"
HUB_TIMEOUT = 10
"""Seconds to wait for the hub."""

REMEDY = "a folder with a config.json, as docs/examples/olmo_debug is; or a name on the hub, organisation/name"
"""Repositories that can be read."""

CONFIG_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
    "dim": ("hidden_size", "n_embd", "d_model", "dim", "emb_dim"),
    "vocab_size": ("vocab_size",),
    "context": (
        *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
        *("model_max_length", "context_length"),
    ),
}
"""Names of a size in `config.json`, by our key; classes differ."""

UNLIMITED = 2**20
"""Context in tokens of a class that has no limit, such as one without positions."""


def repository_config(repository: object, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Content of a repository's `config.json`, with some values replaced.

    `repository` is a folder, or a name on the hub (`organisation/name`), of which this file alone is fetched. Raises
    UnreadableSourceError if there is none.
    """
    path = _config_file(str(repository))
    try:
        return {**read_object(path), **overrides}
    except UserError as error:
        raise UnreadableSourceError(str(error), REMEDY) from error


def config_size(values: Mapping[str, Any], size: str) -> int:
    """A size in the content of `config.json` (`layers`, `dim`, `vocab_size`, `context`).

    Raises:
        ValueError: it is not there.
    """
    names = CONFIG_KEYS[size]
    found = next((values[name] for name in names if values.get(name) is not None), None)
    if found is None and size == "context":
        return UNLIMITED
    if found is None and size == "layers":
        found = _kinds_of_layers(values)
    if type(found) is not int:
        raise ValueError(f"config.json has no {' or '.join(names)}")
    return found


def _kinds_of_layers(values: Mapping[str, Any]) -> int | None:
    """Length of the longest list of names in the content of a `config.json`: those of its layers' kinds."""
    lists = [value for value in values.values() if isinstance(value, Sequence) and not isinstance(value, str)]
    return max((len(names) for names in lists if all(isinstance(name, str) for name in names)), default=0) or None


def _config_file(repository: str) -> Path:
    folder = Path(repository).expanduser()
    file = folder / CONFIG_FILE
    if file.is_file():
        return file
    if folder.is_dir():
        near = sorted(found.parent.name for found in folder.glob(f"*/{CONFIG_FILE}"))
        offer = f"there is one in its folder {near[0]}" if near else REMEDY
        raise UnreadableSourceError("this folder has no config.json", offer)
    if repository.count("/") != 1 or repository.startswith((".", "~", "/")) or folder.parent.is_dir():
        beside = [str(folder.parent / other.name) for other in _folders(folder.parent)]
        raise UnreadableSourceError("there is no such folder", did_you_mean(str(folder), beside) or REMEDY)
    return _fetched(repository)


def _folders(parent: Path) -> list[Path]:
    return [entry for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []


@cache
def _fetched(repository: str) -> Path:
    from huggingface_hub import constants, get_session, hf_hub_download, try_to_load_from_cache

    try:
        if not isinstance(try_to_load_from_cache(repository, CONFIG_FILE), str):
            # Without a network the download itself would try again for a minute.
            get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT)
        return Path(hf_hub_download(repository, CONFIG_FILE))
    except Exception as error:  # the library does not wrap its HTTP client's errors
        reason = str(error).partition("\n")[0]
        raise UnreadableSourceError(
            f"there is no such folder, and the hub gives no {CONFIG_FILE} of that name ({reason})", REMEDY
        ) from error
