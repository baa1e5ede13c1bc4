"""Tensor-parallel styles of linears, norms, embedding and head, and rows of fused weights: plain data, naming no mesh.

A `Colwise` linear is followed by a `Rowwise` one (Shoeybi et al. 2019), so that heads or feed-forward channels between
them stay on their rank, and only the block's input and output are exchanged. A style's handler in
`parallel/tensor_parallel/styles.py` changes the module, and nothing else asks for a style by name.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True)
class TPStyle:
    """Tensor-parallel style: a module has it as `tp_style`, a linear in the `tp_plan()` of the module around it."""

    divided: ClassVar[Literal["inputs", "outputs"] | None] = None
    """Dim of a linear's weight that is divided among the ranks; None if every rank has all of it."""

    def repeats_outputs(self, degree: int) -> bool:
        """True if several of `degree` ranks compute the same outputs of a linear."""
        return False


@dataclass(frozen=True)
class ReplicatedKV:
    """Sharding of a unit of outputs among several ranks: query heads are split, key and value heads replicated."""

    pieces: int
    """Equal pieces at the start of a unit that can be split (query heads)."""
    width: int
    """Outputs per piece."""
    count: str
    """Attribute of the block that counts a unit's pieces on this rank."""


@dataclass(frozen=True)
class ReplicatedGateUp:
    """Sharding of gate and up rows if the ranks' boundaries cut through groups: the weight is replicated. A unit is a
    group of gate rows followed by as many up rows. Each rank computes only its own channels."""

    pieces: int
    """Channels per group."""
    count: str
    """Attribute of the block that counts a group's channels in this rank's outputs, which are all of its channels."""


@dataclass(frozen=True)
class Colwise(TPStyle):
    """Column-parallel linear: each rank computes some outputs from the whole input."""

    divided = "outputs"
    units: int
    """Groups of consecutive outputs that stay together, such as the heads of one key."""
    common: ReplicatedKV | ReplicatedGateUp | None = None
    """Sharding of units that are fewer than ranks; None if a unit cannot be split."""
    described: str = "the units of a linear layer"
    """Noun phrase for error messages."""
    key: str = ""
    """Key of the configuration that sets the number of units."""
    width: int = 1
    """Number of that key's units per unit here."""
    gathers: bool = True
    """False if the linear's input is already gathered, by a `GatherTokens` module or as an input of a module with
    `GatherInput`."""
    gathers_output: bool = False
    """True if every rank gets all ranks' outputs, for a `Rowwise` linear that splits them again."""
    vector: bool = False
    """True for a modulation: its input is one vector per sequence, which every rank has. Every rank gets all outputs,
    for its own tokens."""

    @property
    def pieces(self) -> int:
        """Number of parts that a unit can be split into."""
        return 1 if self.common is None else self.common.pieces

    def divides(self, degree: int) -> bool:
        """True if each of `degree` ranks gets equal whole units, or equal splits of them."""
        if isinstance(self.common, ReplicatedKV) and self.is_replicated(degree):
            return degree % self.units == 0 and self.pieces % (degree // self.units) == 0
        return self.units * self.pieces % degree == 0

    def is_replicated(self, degree: int) -> bool:
        """True if `degree` ranks replicate the weight because several ranks use the same unit."""
        return self.common is not None and self.units % degree != 0

    def repeats_outputs(self, degree: int) -> bool:
        return isinstance(self.common, ReplicatedKV) and self.is_replicated(degree)


@dataclass(frozen=True)
class Rowwise(TPStyle):
    """Row-parallel linear: inputs are split like the outputs of the preceding `Colwise` linear, and outputs are
    summed."""

    divided = "inputs"
    splits_input: bool = False
    """True if every rank has the whole input and takes its part."""
    gathers: str = ""
    """Name of a sibling module before the linear, such as a norm over all heads, that needs the features of all ranks;
    the linear takes its part of the result. Empty if there is none."""


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
    """RMSNorm over the features of all heads at once, including other ranks'; its weight is sharded with the heads."""

    heads: int
    """Number of heads in the weight; if there are fewer heads than ranks, several ranks share one."""


@dataclass(frozen=True)
class HeadSharded(TPStyle):
    """One number per head, sharded with the heads."""


@dataclass(frozen=True)
class GatherTokens(TPStyle):
    """Module without weights that gathers all tokens from this rank's, for several readers that each use a part of
    them."""


@dataclass(frozen=True)
class GatherInput(TPStyle):
    """Module that is called with all tokens, although its hidden states, the first argument or `hidden_states`, are
    this rank's."""


@dataclass(frozen=True)
class WholeTokens(GatherInput):
    """Replicated module that mixes tokens: with sequence parallelism it is called with all of them, and a rank keeps
    its own of the output, or of the first output."""


@dataclass(frozen=True)
class ShardTokens(TPStyle):
    """Module without weights that takes this rank's part of the model's input tokens."""


@dataclass(frozen=True)
class GatherResult(TPStyle):
    """Module without weights that gathers results of all tokens from this rank's; every rank uses them alike."""


@dataclass(frozen=True)
class GatheredOrder(TPStyle):
    """Module without weights that puts the RoPE caches of two streams in the order of gathered tokens."""


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
    """Row layout of a fused weight: units of the same pieces, repeated through the weight."""

    kind: Literal["attention", "feed_forward"]
    """Kind of the projections; attention's have heads."""
    pieces: tuple[RowPiece, ...]
    """Pieces of a unit in order."""

    @property
    def unit(self) -> int:
        """Rows of a unit."""
        return sum(piece.heads * piece.width for piece in self.pieces)
