"""Source `huggingface`: data sets of `datasets.load_dataset`, as a random-access table or streamed file by file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_exp.config.data_files import existing, matching_files, no_such_file
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.schema.foreign_code import SourceDescription
from titan_exp.data.sources.base import CorpusContent, Source
from titan_exp.data.sources.text import FileSource

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


DESCRIPTION = SourceDescription(
    reads=("dataset", "subset", "data_files", "split", "validation_split", "text_column"), is_endless=True
)
LOADERS = ("arrow", "csv", "json", "parquet", "text", "webdataset")  # values of `data.dataset` that are file loaders
_HUB_TIMEOUT_SECONDS = 5.0
_COMPRESSIONS = {"zstd": "zstandard", "lz4": "lz4"}
"""Packages to install, by the compression that the library names when it lacks them."""


def load_split(config: DataConfig, split: str) -> Any:
    """Load a `Dataset`, or an `IterableDataset` with `data.streaming`. Raises UserError if it cannot be loaded."""
    if config.dataset is None:
        remedy = "name one, as in data.dataset=allenai/c4, or data.dataset=json data.data_files='[corpus.jsonl]'"
        raise UserError("There is no text to read.", [Violation("data.dataset", None, "you named no data set", remedy)])
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
    except Exception as error:  # the library and its dependencies raise many types of errors
        raise explain(config, split, error, offline=offline) from error


def _needs_hub(config: DataConfig) -> bool:
    """True if the hub may be needed; False for a local folder, or a loader with local files."""
    assert config.dataset is not None
    if any("://" in file for file in config.data_files):
        return False  # data on another server, independent of the hub
    return config.dataset not in LOADERS and not Path(config.dataset).expanduser().exists()


def _hub_answers() -> bool:
    """True if the hub answers a short request; otherwise switch the libraries to offline mode. By default they would
    retry for minutes, on every rank."""
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
    """Make the error for a data set that cannot be loaded or read."""
    import datasets.exceptions

    # The error that the library raises about a file says only that there was one.
    of_file = isinstance(error, datasets.exceptions.DatasetGenerationError)
    error = error.__cause__ if of_file and isinstance(error.__cause__, Exception) else error
    message = (str(error).strip() or type(error).__name__).splitlines()[0]
    if offline:
        remedy = (
            "use a machine that reaches the hub, or type the same command once on such a machine, to fill the cache of "
            "HF_HOME (streaming=false), or use local files: data.dataset=parquet data.data_files='[part-*.parquet]', "
            "or data=python_stdlib"
        )
        reason = f"the hub does not answer, and the cache lacks the data set ({message})"
        return _failure(Violation("data.dataset", config.dataset, reason, remedy))
    if "split" in message.lower():
        return _failure(Violation("data.split", split, message, "name a split of the data set"))
    if "config" in message.lower():
        return _failure(Violation("data.subset", config.subset, message, "name one of the data set's configurations"))
    if lacking := [package for kind, package in _COMPRESSIONS.items() if f"type {kind} not" in message]:
        package = lacking[0]
        key = "data.data_files" if config.data_files else "data.dataset"
        value = list(config.data_files) or config.dataset
        return _failure(Violation(key, value, f"it takes {package} to unpack its files", f"type pip install {package}"))
    if config.data_files and not isinstance(error, FileNotFoundError):
        empty = isinstance(error, StopIteration)
        reason = "there are no rows" if empty else f"{type(error).__name__}: {message}"
        remedy = f"give files that the loader {config.dataset} reads"
        return _failure(Violation("data.data_files", list(config.data_files), reason, remedy))
    loader = f"a loader ({', '.join(LOADERS)}) with data.data_files"
    remedy = f"a data set of the hub (signed in if it is gated), a local folder, or {loader}"
    return _failure(Violation("data.dataset", config.dataset, f"{type(error).__name__}: {message}", remedy))


def _failure(violation: Violation) -> UserError:
    return UserError("Cannot load the data set.", [violation])


def build(config: DataConfig) -> Source:
    """Open the training split. Raises UserError if it cannot be loaded or lacks the text column."""
    return _open(config, config.split)


def build_validation(config: DataConfig) -> Source:
    """Open the validation split."""
    assert config.validation_split is not None
    return _open(config, config.validation_split)


def local_entries(config: DataConfig) -> tuple[str, ...]:
    """Files, folders and globs on this machine; empty for data on the hub or on another server."""
    if config.dataset is None or any("://" in entry for entry in config.data_files):
        return ()
    folder = Path(config.dataset).expanduser()
    local = config.dataset not in LOADERS and folder.is_dir()
    entries = (str(folder / entry) for entry in config.data_files) if local else config.data_files
    return tuple(entries) or ((str(folder),) if folder.is_dir() else ())


def violations(config: DataConfig) -> Iterator[Violation]:
    """Check that the data set is named, and that its local files exist, have rows and can be unpacked here."""
    files = "data.data_files='[corpus.jsonl]'"
    if config.dataset is None:
        remedy = f"name one of the hub, data.dataset=NAME, or use data.dataset=json {files}"
        yield Violation("data.dataset", None, "the source huggingface needs a data set", remedy)
        return
    if config.dataset in LOADERS and not config.data_files:
        yield Violation("data.data_files", (), f"the loader {config.dataset} reads files, and you named none", files)
    local = config.dataset.startswith((".", "/", "~"))
    if local and not Path(config.dataset).expanduser().exists():
        yield no_such_file(config.dataset, "data.dataset")
    for file in config.data_files:
        if config.dataset in LOADERS and "://" not in file and not existing(file):
            yield no_such_file(file, "data.data_files")
    named = [path for file in config.data_files for path in existing(file)] or config.data_files
    within = Path(config.dataset).expanduser().glob("**/*") if local and not config.data_files else ()
    for key, found in (("data.data_files", named), ("data.dataset", map(str, within))):
        yield from islice(filter(None, (_missing_decompressor(file, key) for file in found)), 1)
    entries = local_entries(config)
    sizes = [path.stat().st_size for entry in entries for _, path in matching_files(entry)]
    if sizes and not any(sizes):
        key, value = ("data.data_files", entries) if config.data_files else ("data.dataset", config.dataset)
        yield Violation(key, value, "there are no rows", f"give files that the loader {config.dataset} reads")


_DECOMPRESSORS = {".zst": "zstandard", ".lz4": "lz4"}
"""Packages that the datasets library needs for files with these suffixes; `.gz`, `.bz2`, `.xz` and `.zip` need none."""


def _missing_decompressor(file: str, key: str) -> Violation | None:
    suffix = Path(file).suffix.lower()
    if suffix == ".lzma":
        remedy = "compress it anew with xz --format=xz, or unpack it with unlzma"
        return Violation(key, file, "the datasets library does not read .lzma", remedy)
    package = _DECOMPRESSORS.get(suffix)
    if package is None or find_spec(package) is not None:
        return None
    remedy = f"type pip install {package}, or give the file unpacked, or as .gz, .bz2, .xz or .zip"
    return Violation(key, file, f"it takes {package} to unpack {suffix}, which is not installed here", remedy)


def open_files(config: DataConfig) -> FileSource | None:
    """List the local files of a data set; None for a data set on the hub or on another server."""
    if not (entries := local_entries(config)):
        return None
    return FileSource("huggingface", sorted({file for entry in entries for file in matching_files(entry)}))


class HuggingFaceTable:
    """Random-access source over one column of a downloaded, memory-mapped split."""

    def __init__(self, dataset: Dataset, config: DataConfig, split: str) -> None:
        _check_column(dataset.column_names, config)
        self._column, self._config = config.text_column, config
        self._dataset = dataset.select_columns([self._column])
        # A digest of a few documents: reading all may take hours, and file names differ between machines.
        count = len(dataset)
        sample = sorted({0, count // 3, count // 2, count - 1}) if count else []
        digest = _digest("\0".join(self[index] for index in sample))
        self.fingerprint = f"{_name(config, split)}: {count} documents, {digest}"
        self.content, self.revision = _identity(config, dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> str:
        return _text(self._dataset[index][self._column], self._config)


class HuggingFaceStream:
    """Streamed split; a part is a shard of `datasets`, usually a file."""

    def __init__(self, dataset: IterableDataset, config: DataConfig, split: str) -> None:
        if dataset.column_names is not None:  # in some formats, columns are known only after the first row
            _check_column(dataset.column_names, config)
        self._dataset = dataset
        self._config = config
        self.parts = dataset.num_shards
        self.content, _ = _identity(config, None)
        try:
            first = next(self.open(0, None), "")
        except ValueError as error:  # raised by a decompression package
            raise explain(config, split, error) from error
        self.fingerprint = f"{_name(config, split)}: streamed in {self.parts} parts, {_digest(first)}"

    def open(self, part: int, state: Mapping[str, Any] | None) -> HuggingFaceReader:
        """Read one part from its beginning or from a reader's state."""
        dataset = self._dataset.shard(self.parts, part)
        if self._dataset.column_names is not None:
            dataset = dataset.select_columns([self._config.text_column])
        if state is not None:
            dataset.load_state_dict(dict(state))
        return HuggingFaceReader(dataset, self._config)


class HuggingFaceReader:
    """Reader of one pass over one part, resumable at any row."""

    def __init__(self, dataset: IterableDataset, config: DataConfig) -> None:
        self._dataset, self._config, self._rows = dataset, config, iter(dataset)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        row = next(self._rows)
        if self._config.text_column not in row:
            _check_column(list(row), self._config)
        return _text(row[self._config.text_column], self._config)

    def state_dict(self) -> Mapping[str, Any]:
        """Position after the last row read."""
        return self._dataset.state_dict()


def _open(config: DataConfig, split: str) -> Source:
    kind = HuggingFaceStream if config.streaming else HuggingFaceTable
    return kind(load_split(config, split), config, split)


def _identity(config: DataConfig, dataset: Dataset | None) -> tuple[CorpusContent | None, str | None]:
    """Content of local files, else the fingerprint of a downloaded data set."""
    files = open_files(config)
    if files is not None:
        return files.content, None
    return None, None if dataset is None else getattr(dataset, "_fingerprint", None)


def _name(config: DataConfig, split: str) -> str:
    assert config.dataset is not None
    local = Path(config.dataset).expanduser()
    files = "".join(f" {Path(file).name}" for file in config.data_files)
    dataset = local.name if local.exists() else config.dataset
    return f"huggingface {dataset} {config.subset or 'default'} {split} {config.text_column}{files}"


def _digest(text: str) -> str:
    return blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()


def _check_column(columns: list[str], config: DataConfig) -> None:
    if config.text_column not in columns:
        raise _wrong_column(config, "the data set has no such column", f"use one of {', '.join(columns)}")


def _text(value: object, config: DataConfig) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        reason = f"this column holds {type(value).__name__} instead of text"
        raise _wrong_column(config, reason, "name a column of text")
    return value


def _wrong_column(config: DataConfig, reason: str, remedy: str) -> UserError:
    return UserError("Cannot read the data set.", [Violation("data.text_column", config.text_column, reason, remedy)])
