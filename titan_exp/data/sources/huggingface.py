"""Source `huggingface`: data sets of `datasets.load_dataset`, as a random-access table or streamed by file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.data import DataConfig
from titan_exp.config.paths.data_files import corpus_entries, matching_files
from titan_exp.config.schema.builtins import SourceDescription
from titan_exp.data.sources.base import Source
from titan_exp.data.sources.content import CorpusContent
from titan_exp.data.sources.load_dataset import explain, load_split
from titan_exp.data.sources.text_files import FileSource

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

DESCRIPTION = SourceDescription(reads=("dataset", "subset", "data_files", "validation_split"), is_endless=True)


def build(config: DataConfig) -> Source:
    """Open the training split. Raises UserError if it cannot be loaded or lacks the text column."""
    return _build_split(config, config.split)


def build_validation(config: DataConfig) -> Source:
    """Open the validation split."""
    assert config.validation_split is not None
    return _build_split(config, config.validation_split)


def open_files(config: DataConfig) -> FileSource | None:
    """List the local files of a data set; None for one of the hub or of another server."""
    if not (entries := corpus_entries(config)):
        return None
    return FileSource("huggingface", sorted({file for entry in entries for file in matching_files(entry)}))


class HuggingFaceTable:
    """Random-access source over one column of a downloaded, memory-mapped split."""

    def __init__(self, dataset: Dataset, config: DataConfig, split: str) -> None:
        _check_column(dataset.column_names, config)
        self._column = config.text_column
        self._config = config
        self._dataset = dataset.select_columns([self._column])
        self.fingerprint = f"{_name(config, split)}: {len(dataset)} documents, {self._sample_digest()}"
        self.content, self.revision = _identity(config, dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> str:
        return _text(self._dataset[index][self._column], self._config)

    def _sample_digest(self) -> str:
        """Digest of a few documents: reading all may take hours, and file names differ between machines."""
        count = len(self)
        sample = sorted({0, count // 3, count // 2, count - 1}) if count else []
        return _digest("\0".join(self[index] for index in sample))


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
        except ValueError as error:  # of a compression
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
        self._dataset = dataset
        self._config = config
        self._rows = iter(dataset)

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


def _build_split(config: DataConfig, split: str) -> Source:
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
        raise _wrong_column(config, "the data set lacks this column", f"one of {', '.join(columns)}")


def _text(value: object, config: DataConfig) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _wrong_column(config, f"it holds {type(value).__name__}, not text", "a text column")
    return value


def _wrong_column(config: DataConfig, reason: str, remedy: str) -> UserError:
    return UserError(
        "The data set cannot be read.", [Violation("data.text_column", config.text_column, reason, remedy)]
    )
