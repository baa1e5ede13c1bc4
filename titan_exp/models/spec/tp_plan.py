"""Tensor-parallel styles of linears, norms, embedding and head, and rows of fused weights: plain data, naming no mesh.

A `Colwise` linear is followed by a `Rowwise` one (Shoeybi et al. 2019), so that heads or feed-forward channels between
them stay on their rank, and only the block's input and output are exchanged. What a style does to a module is its
handler in `parallel/tensor_parallel/styles.py`, and nothing else asks for a style by its name.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True)
class TPStyle:
    """Tensor-parallel style: of a module as its `tp_style`, of a linear in the `tp_plan()` of the module around it."""

    divided: ClassVar[Literal["inputs", "outputs"] | None] = None
    """Dim of a linear's weight that is divided among the ranks; None if every rank has all of it."""

    def repeats_outputs(self, degree: int) -> bool:
        """True if several of `degree` ranks compute the same outputs of a linear."""
        return False


@dataclass(frozen=True)
class ReplicatedKV:
    """Sharding of a unit of outputs among ranks: query heads are split, key and value heads replicated."""

    pieces: int
    """Equal pieces at the start of a unit that can be split (query heads)."""
    width: int
    """Outputs per piece."""
    count: str
    """Attribute of the block that counts a unit's pieces on this rank."""


@dataclass(frozen=True)
class ReplicatedGateUp:
    """Sharding of groups of gate and up rows among ranks, if their boundaries cut through groups: weights replicated.

    A unit is a group of gate rows and as many up rows. Each rank computes its channels only.
    """

    pieces: int
    """Channels per group."""
    count: str
    """Attribute of the block that counts a group's channels in this rank's outputs: all of its channels."""


@dataclass(frozen=True)
class Colwise(TPStyle):
    """Column-parallel linear: each rank computes some outputs from the whole input."""

    divided = "outputs"
    units: int
    """Groups of consecutive outputs that stay together, such as the heads of one key."""
    common: ReplicatedKV | ReplicatedGateUp | None = None
    """Split of units that cannot be divided among the ranks; None if units cannot be split."""
    described: str = "the units of a linear layer"
    """Noun phrase for error messages."""
    key: str = ""
    """Key of the configuration that sets the number of units."""
    width: int = 1
    """Units of that key per unit here."""
    gathers: bool = True
    """False if the linear's input is the output of a `GatherTokens` module, or an input of one with `GatherInput`."""
    gathers_output: bool = False
    """True if every rank gets the outputs of all, for a `Rowwise` linear that splits them again."""
    vector: bool = False
    """True for a modulation: its input is a vector per sequence, which every rank has, and every rank gets the outputs
    of all, for its own tokens."""

    @property
    def pieces(self) -> int:
        """Parts that a unit can be split into."""
        return 1 if self.common is None else self.common.pieces

    def divides(self, degree: int) -> bool:
        """True if each of `degree` ranks gets equal whole units, or equal splits of them."""
        if isinstance(self.common, ReplicatedKV) and self.is_replicated(degree):
            return degree % self.units == 0 and self.pieces % (degree // self.units) == 0
        return self.units * self.pieces % degree == 0

    def is_replicated(self, degree: int) -> bool:
        """True if `degree` ranks replicate the weight, since some units are used by several of them."""
        return self.common is not None and self.units % degree != 0

    def repeats_outputs(self, degree: int) -> bool:
        """True if ranks share the key and value heads of a unit."""
        return isinstance(self.common, ReplicatedKV) and self.is_replicated(degree)


@dataclass(frozen=True)
class Rowwise(TPStyle):
    """Row-parallel linear: inputs are split like the outputs of the `Colwise` linear before, outputs summed."""

    divided = "inputs"
    splits_input: bool = False
    """True if every rank has the whole input, of which it takes its part."""
    gathers: str = ""
    """Name of a module beside the linear and before it, such as a norm over all heads, that is called with the features
    of all ranks; the linear takes its part of what comes of them. Empty if none is."""


@dataclass(frozen=True)
class SequenceParallel(TPStyle):
    """A norm or linear over this rank's tokens; its gradient is partial with sequence parallelism."""


SEQUENCE_PARALLEL = SequenceParallel()
"""Style of norms over the residual stream, and of replicated linears that read it."""


@dataclass(frozen=True)
class HeadParallel(TPStyle):
    """A norm over this rank's heads; its gradient is always partial."""


@dataclass(frozen=True)
class AcrossHeads(TPStyle):
    """An RMSNorm over the features of all heads at once, those of other ranks included; its weight is sharded with the
    heads."""

    heads: int
    """Heads of the weight; several ranks share one if there are fewer than ranks."""


@dataclass(frozen=True)
class HeadSharded(TPStyle):
    """One number per head, sharded with the heads."""


@dataclass(frozen=True)
class GatherTokens(TPStyle):
    """A module without weights: this rank's tokens to all tokens, for several readers that each use them in part."""


@dataclass(frozen=True)
class GatherInput(TPStyle):
    """A module whose hidden states, its first argument or `hidden_states`, are this rank's tokens: it is called with
    all tokens."""


@dataclass(frozen=True)
class ShardTokens(TPStyle):
    """A module without weights: all tokens of the model's input to this rank's tokens."""


@dataclass(frozen=True)
class GatherResult(TPStyle):
    """A module without weights: results of this rank's tokens to those of all tokens, which every rank uses alike."""


@dataclass(frozen=True)
class GatheredOrder(TPStyle):
    """A module without weights: RoPE caches of two streams in the order in which gathered tokens come."""


@dataclass(frozen=True)
class VocabEmbedding(TPStyle):
    """Vocabulary-parallel embedding, split by rows."""


@dataclass(frozen=True)
class VocabLogits(TPStyle):
    """Vocabulary-parallel head, split like a `VocabEmbedding`."""

    vocabulary: int
    """Rows of the whole weight."""


@dataclass(frozen=True)
class RowPiece:
    """Consecutive rows of a unit that belong to one projection."""

    name: str
    """Projection (`query`)."""
    width: int
    """Rows per head; in a feed-forward per group."""
    heads: int = 1
    """Heads in a unit."""


@dataclass(frozen=True)
class FusedRows:
    """Units of rows with the same pieces, repeated through the weight."""

    kind: Literal["attention", "feed_forward"]
    """Kind of the projections; those of attention have heads."""
    pieces: tuple[RowPiece, ...]
    """Pieces of a unit in order."""

    @property
    def unit(self) -> int:
        """Rows of a unit."""
        return sum(piece.heads * piece.width for piece in self.pieces)
