"""Files that the data group names: dataset loaders, tokenizer, validation split."""

from pathlib import Path

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.data import DataConfig

LOADERS = ("arrow", "csv", "json", "parquet", "text", "webdataset")
"""Values of `data.dataset` that are loaders of files."""


def tokenizer_file(name: str) -> Path:
    """Path of the tokenizer.json that `data.tokenizer` names, as a file or by its folder."""
    path = Path(name).expanduser()
    return path / "tokenizer.json" if path.is_dir() else path


def unlimited_split(data: DataConfig) -> Violation:
    """Violation for documents held out of a stream without a limit."""
    return Violation(
        "data.validation_documents",
        data.validation_documents,
        "documents are held out of a stream, and all of it would have to be read to find them",
        "data.validation_documents=1024 evaluates the first 1024; or training.evaluate_every=0",
    )
