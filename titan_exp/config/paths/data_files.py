"""Data files of the data group: dataset loaders, tokenizer, validation split."""

from pathlib import Path

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.data import DataConfig

LOADERS = ("arrow", "csv", "json", "parquet", "text", "webdataset")
"""Values of `data.dataset` that are file loaders."""


def tokenizer_file(name: str) -> Path:
    """Path of the tokenizer.json for `data.tokenizer`, given as a file or a folder."""
    path = Path(name).expanduser()
    return path / "tokenizer.json" if path.is_dir() else path


def unlimited_split(data: DataConfig) -> Violation:
    """Violation of a validation split held out of a stream without a limit."""
    return Violation(
        "data.validation_documents",
        data.validation_documents,
        "documents are held out of a stream, and all of it would have to be read to find them",
        "data.validation_documents=1024 evaluates the first 1024; or training.evaluate_every=0",
    )
