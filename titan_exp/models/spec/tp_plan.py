"""Tensor-parallel styles of linears, norms, embedding and head: plain data, naming no mesh.

A `Colwise` linear is followed by a `Rowwise` one (Shoeybi et al. 2019), so that heads or feed-forward channels between
them stay on their rank, and only the block's input and output are exchanged.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicatedKV:
    """Sharding inside a unit of outputs where there are more ranks than units: query heads are split, the key and value
    head after them is replicated."""

    pieces: int
    """Equal pieces that a unit begins with and that can be split (query heads)."""
    width: int
    """Outputs per piece."""
    count: str
    """The block's attribute that counts a unit's pieces on this rank."""


@dataclass(frozen=True)
class Colwise:
    """A linear whose outputs are split: each rank computes some of them from the whole input."""

    units: int
    """Equal groups of consecutive outputs that stay together, such as the heads of one key."""
    common: ReplicatedKV | None = None
    """Split of a unit where there are more ranks than units; None where there is none."""
    described: str = "the units of a linear layer"
    """Noun phrase for error messages."""
    key: str = ""
    """Key of the configuration that sets the number of units."""
    width: int = 1
    """Units of that key per unit here."""

    @property
    def pieces(self) -> int:
        """Ranks that a unit can be split among."""
        return 1 if self.common is None else self.common.pieces

    def divides(self, degree: int) -> bool:
        """True if each of so many ranks gets equal whole units, or an equal split of one."""
        if self.units % degree == 0:
            return True
        return self.common is not None and degree % self.units == 0 and self.pieces % (degree // self.units) == 0


@dataclass(frozen=True)
class Rowwise:
    """A linear whose inputs are split like the outputs of the `Colwise` linear before; ranks' outputs are summed."""


@dataclass(frozen=True)
class SequenceParallel:
    """A norm that sees this rank's tokens; with sequence parallelism its gradient is partial."""


SEQUENCE_PARALLEL = SequenceParallel()
"""Style of norms over the residual stream."""


@dataclass(frozen=True)
class HeadParallel:
    """A norm over single heads that sees this rank's heads; its gradient is always partial."""


@dataclass(frozen=True)
class VocabEmbedding:
    """An embedding whose rows, one per token of the vocabulary, are split."""


@dataclass(frozen=True)
class VocabLogits:
    """A head whose rows, one per token of the vocabulary, are split like those of a `VocabEmbedding`."""

    vocabulary: int
    """Rows of the whole weight."""


TPStyle = Colwise | Rowwise | SequenceParallel | HeadParallel | VocabEmbedding | VocabLogits
