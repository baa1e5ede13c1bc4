"""Data files of the data group: dataset loaders, tokenizer, validation split."""

from importlib.util import find_spec
from pathlib import Path

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.data import DataConfig
from titan_exp.config.paths.foreign_json import read_object
from titan_exp.config.paths.token_store_manifest import read_manifest

LOADERS = ("arrow", "csv", "json", "parquet", "text", "webdataset")
"""Values of `data.dataset` that are file loaders."""

END_OF_TEXT = "<|endoftext|>"
"""Name of the byte tokenizer's end-of-text token in its file."""


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


def tokenizer_path(config: DataConfig) -> str:
    """`bytes`, or the path of the tokenizer's files: `data.tokenizer`, or the copy in the first store. Raises UserError
    if that store cannot be read."""
    if config.tokenizer != "store":
        return config.tokenizer
    if not config.paths:
        violation = Violation("data.paths", (), "no token store is given", "data.paths='[stores/mine]'")
        raise UserError("There is no tokenizer.", [violation])
    manifest = read_manifest(config.paths[0])
    return "bytes" if manifest.tokenizer == "bytes" else str(manifest.path)


def tokenizer_words(path: str) -> dict[str, int]:
    """Words of a tokenizer with their ids, from `bytes` or the path of its files.

    Raises:
        UserError: there is no such file, or it is no tokenizer.json.
    """
    if path == "bytes":
        return byte_words()
    file = tokenizer_file(path)
    described = read_object(file)
    model, added = described.get("model"), described.get("added_tokens") or []
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    try:
        if isinstance(vocabulary, list):
            vocabulary = {word: number for number, (word, *_) in enumerate(vocabulary)}
        words = {**vocabulary, **{token["content"]: token["id"] for token in added}}  # type: ignore[dict-item]
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(f"{file} is not a tokenizer.json of Hugging Face's tokenizers.") from error
    if not words or any(type(number) is not int or not 0 <= number < 2**31 for number in words.values()):
        raise UserError(f"{file} is not a tokenizer.json of Hugging Face's tokenizers.")
    return words


def byte_words() -> dict[str, int]:
    """Words of the byte tokenizer: the printable character of each byte in byte-level vocabularies (Radford et al.
    2019), and the end of text."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    words = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    return {**words, END_OF_TEXT: 256}


def unlimited_split(data: DataConfig) -> Violation:
    """Violation of a validation split held out of a stream without a limit."""
    return Violation(
        "data.validation_documents",
        data.validation_documents,
        "documents are held out of a stream, and all of it would have to be read to find them",
        "data.validation_documents=1024 evaluates the first 1024; or training.evaluate_every=0",
    )
