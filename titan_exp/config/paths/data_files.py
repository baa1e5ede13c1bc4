"""Data files of the data group: dataset loaders, tokenizer, validation split."""

from importlib.util import find_spec
from pathlib import Path

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.data import DataConfig

LOADERS = ("arrow", "csv", "json", "parquet", "text", "webdataset")
"""Values of `data.dataset` that are file loaders."""


DECOMPRESSORS = {".zst": "zstandard", ".lz4": "lz4"}
"""Packages that the datasets library needs for files with these suffixes; `.gz`, `.bz2`, `.xz` and `.zip` need none."""


def missing_decompressor(file: str, key: str) -> Violation | None:
    """Violation of a compressed file that cannot be read in this environment."""
    suffix = Path(file).suffix.lower()
    if suffix == ".lzma":
        remedy = "xz --format=xz compresses it anew, or unlzma unpacks it"
        return Violation(key, file, "the datasets library does not read .lzma", remedy)
    package = DECOMPRESSORS.get(suffix)
    if package is None or find_spec(package) is not None:
        return None
    remedy = f"pip install {package}; or the file unpacked, or as .gz, .bz2, .xz or .zip"
    return Violation(key, file, f"{suffix} is unpacked by {package}, which is not installed here", remedy)


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
