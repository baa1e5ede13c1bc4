"""Which documents are held out for evaluation: a hash of a document's identity, never of the seed."""

from hashlib import blake2b

import numpy as np

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.data.sources.base import RandomAccessSource


class Subset:
    """Some documents of a random-access source, as a source of their own. `indices` are into `source`, ascending."""

    def __init__(self, source: RandomAccessSource, indices: np.ndarray) -> None:
        self._source = source
        self._indices = indices.astype(np.uint32 if len(source) < 2**32 else np.int64)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> str:
        return self._source[int(self._indices[index])]


def unit_hash(identity: str) -> float:
    """A fixed place in [0, 1) for whatever `identity` names; it is held out where `unit_hash(identity) < fraction`."""
    digest = blake2b(identity.encode("utf-8", errors="surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def training_subset(source: RandomAccessSource, fraction: float) -> Subset:
    """The documents to train on. Raises UserError where the held-out fraction leaves none."""
    kept = np.flatnonzero(unit_hashes(source) >= fraction)
    if len(kept) == 0:
        reason = f"it leaves none of the {len(source)} documents to train on"
        raise _refusal(fraction, reason, _or_finer("a smaller fraction", source))
    return Subset(source, kept)


def validation_subset(source: RandomAccessSource, fraction: float) -> Subset:
    """The documents to evaluate on. Raises UserError where there would be none."""
    found = unit_hashes(source)
    held_out = np.flatnonzero(found < fraction)
    if len(held_out) == 0:
        remedy = "training.evaluate_every=0 to go without evaluation"
        if len(source) > 1:
            enough = np.ceil((found.min() + 1e-9) * 1000) / 1000
            remedy = f"data.validation_fraction={enough:g} holds out at least one; {remedy}"
        raise _refusal(fraction, f"it holds out none of the {len(source)} documents", _or_finer(remedy, source))
    return Subset(source, held_out)


def _or_finer(remedy: str, source: RandomAccessSource) -> str:
    """`remedy`, after the setting that makes more documents of the source's text where there is one."""
    finer = getattr(source, "finer", None)
    return remedy if finer is None else f"{finer} divides the same text into more documents; {remedy}"


def unit_hashes(source: RandomAccessSource, which: range | None = None) -> np.ndarray:
    """The place of each of some documents (None: all) by their keys, or their numbers; float64 [documents]."""
    which = range(len(source)) if which is None else which
    key = getattr(source, "key", None)
    if key is not None:
        return np.fromiter((unit_hash(key(index)) for index in which), np.float64, len(which))
    return _index_hashes(which)


def _index_hashes(which: range) -> np.ndarray:
    """Places for sources whose documents have no name but their number: splitmix64 (Steele et al. 2014), vectorized."""
    mixed = np.arange(which.start + 1, which.stop + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)) / 2**53


def _refusal(fraction: float, reason: str, remedy: str) -> UserError:
    return UserError(
        "The documents cannot be divided.", [Violation("data.validation_fraction", fraction, reason, remedy)]
    )
