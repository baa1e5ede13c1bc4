"""Random numbers keyed by seed, sample and purpose: the same in every layout, batch size and resumed run."""

from hashlib import blake2b

import numpy as np


def keyed_generator(seed: int, sample: int, purpose: str) -> np.random.Generator:
    """Generator of one sample's numbers for one purpose; those of other samples and purposes are independent."""
    digest = blake2b(f"{seed}/{sample}/{purpose}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
