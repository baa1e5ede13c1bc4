"""How a block may be divided among ranks that share its matrices: plain data beside its definition, naming no mesh.

A projection by `Colwise` is followed by one by `Rowwise` (Shoeybi et al. 2019), so that what is between them, heads or
feed-forward channels, is each rank's own, and only their input and output are exchanged.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicatedKV:
    """What is left whole where a unit of outputs is itself divided among ranks."""

    pieces: int
    """Equal pieces that a unit begins with, and that can be divided, as query heads are."""
    width: int
    """Outputs in a piece."""
    count: str
    """The block's attribute that counts a unit's pieces on this rank."""


@dataclass(frozen=True)
class Colwise:
    """A projection whose outputs are divided: a rank computes some of them from the whole input."""

    units: int
    """Equal groups of consecutive outputs that stay together, as the heads of one key are."""
    common: ReplicatedKV | None = None
    """How a unit is divided where there are more ranks than units; None where it cannot be."""


@dataclass(frozen=True)
class Rowwise:
    """A projection whose inputs are divided, as the outputs of the `Colwise` before are; ranks' outputs are summed."""


@dataclass(frozen=True)
class SequenceParallel:
    """Computes every token by itself, with all of its parameters."""


@dataclass(frozen=True)
class VocabEmbedding:
    """A table whose rows, one for each word of the vocabulary, are divided."""


@dataclass(frozen=True)
class VocabLogits:
    """LM head whose weight is sharded by vocabulary rows, as a `VocabEmbedding` table is."""

    vocabulary: int
    """Words of the whole weight."""


TPStyle = Colwise | Rowwise | SequenceParallel | VocabEmbedding | VocabLogits
