"""Documents of a source: the validation split, and a check before the launch that opens them as a rank does."""

from concurrent.futures import Future
from threading import Thread

import numpy as np

from titan_exp.config.data_files import none_held_out, none_to_train_on, unit_hash, unlimited_split
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.schema.data_sets import asked, open_files
from titan_exp.config.schema.foreign_code import described
from titan_exp.data.sources.base import RandomAccessSource, build_source, held_out_fraction
from titan_exp.data.tokenizers import ByteTokenizer, encode_document


class Subset:
    """Subset of a random-access source's documents, by ascending `indices`."""

    def __init__(self, source: RandomAccessSource, indices: np.ndarray) -> None:
        self._source = source
        self._indices = indices.astype(np.uint32 if len(source) < 2**32 else np.int64)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> str:
        return self._source[int(self._indices[index])]


def training_subset(source: RandomAccessSource, fraction: float) -> Subset:
    """Documents to train on. Raises UserError if the held-out fraction leaves none."""
    kept = np.flatnonzero(unit_hashes(source) >= fraction)
    if len(kept) == 0:
        violation = none_to_train_on(fraction, len(source), getattr(source, "split_further", None))
        raise UserError("Cannot split the documents.", [violation])
    return Subset(source, kept)


def validation_subset(source: RandomAccessSource, fraction: float) -> Subset:
    """Held-out documents. Raises UserError if there are none."""
    hashes = unit_hashes(source)
    held_out = np.flatnonzero(hashes < fraction)
    if len(held_out) == 0:
        further = getattr(source, "split_further", None)
        violation = none_held_out(fraction, len(source), float(hashes.min()), further)
        raise UserError("Cannot split the documents.", [violation])
    return Subset(source, held_out)


def unit_hashes(source: RandomAccessSource, indices: range | None = None) -> np.ndarray:
    """Unit hashes (float64) of documents (None: all) by key, or by index if the source has no keys."""
    indices = range(len(source)) if indices is None else indices
    key = getattr(source, "key", None)
    if key is not None:
        return np.fromiter((unit_hash(key(index)) for index in indices), np.float64, len(indices))
    # splitmix64 (Steele et al. 2014), vectorized
    mixed = np.arange(indices.start + 1, indices.stop + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)) / 2**53


CHECK_SECONDS = 10.0  # seconds after which opening a source is left to the ranks
SMALL_BYTES = 2**24  # largest size at which files are opened as documents; larger corpora are only listed


def check_source(config: DataConfig, *, evaluates: bool) -> None:
    """Open a source, divide it if the run evaluates on held-out documents, and read its first document.

    Raises:
        UserError: it cannot be opened (in the source's own words) or cannot be divided.
        Exception: your own source raised it.
    """
    if described(config.source).holds != "text" or "document" in described(config.source).reads:
        return  # the rules have checked these
    opened: Future[None] = Future()

    def run() -> None:
        try:
            opened.set_result(_open(config, evaluates))
        except BaseException as error:
            opened.set_exception(error)

    Thread(target=run, name="titan_exp-source-check", daemon=True).start()
    try:
        opened.result(CHECK_SECONDS)
    except TimeoutError:
        if opened.done():  # raised by the source
            raise


def _open(config: DataConfig, evaluates: bool) -> None:
    try:
        files = open_files(config)
    except OSError as error:
        reason = f"titan_exp cannot read {error.filename} ({(error.strerror or str(error)).lower()})"
        violation = Violation("data.source", config.source, reason, "give files that you can read")
        raise UserError("Cannot use this data source.", [violation]) from error
    small = files is not None and described(config.source).files and files.content.size <= SMALL_BYTES
    if asked(config.source, "open_files") is not None and not small:
        return
    source, fraction = build_source(config), held_out_fraction(config)
    if isinstance(source, RandomAccessSource):
        training_subset(source, fraction)
        if evaluates and fraction:
            validation_subset(source, fraction)
        document = source[0]
    else:
        if evaluates and fraction and config.validation_documents is None:
            raise UserError("The validation split of a stream has no limit.", [unlimited_split(config)])
        document = next(iter(source.open(0, None)), "")
    encode_document(document, ByteTokenizer())
