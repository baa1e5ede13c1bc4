"""Train/validation split by a hash of each document's identity, independent of the seed."""

import numpy as np

from titan_exp.config.data_files import none_held_out, none_to_train_on, unit_hash
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.data.sources.base import RandomAccessSource


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
        raise _cannot_split(none_to_train_on(fraction, len(source), getattr(source, "split_further", None)))
    return Subset(source, kept)


def validation_subset(source: RandomAccessSource, fraction: float) -> Subset:
    """Held-out documents. Raises UserError if there are none."""
    hashes = unit_hashes(source)
    held_out = np.flatnonzero(hashes < fraction)
    if len(held_out) == 0:
        further = getattr(source, "split_further", None)
        raise _cannot_split(none_held_out(fraction, len(source), float(hashes.min()), further))
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


def _cannot_split(violation: Violation) -> UserError:
    return UserError("Cannot split the documents.", [violation])
