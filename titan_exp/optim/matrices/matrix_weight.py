"""Weight of a linear layer, or of the experts' linear layers, as matrices: its sharding, and the projections in it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from titan_exp.config.groups.optimizer import SplitMatrixOptimizerConfig
from titan_exp.models.spec.tp_plan import FusedRows
from titan_exp.optim.matrices.newton_schulz import BATCH_ELEMENTS
from titan_exp.optim.matrices.sharded_matrix import ShardedMatrix, local_matrices
from titan_exp.optim.parameter_groups import NamedParameter


@dataclass(frozen=True)
class MatrixWeight:
    """A parameter of one matrix or a stack of them, and how each is split."""

    parameter: Tensor
    sharding: ShardedMatrix
    rows: FusedRows | None
    by_head: bool

    @classmethod
    def of(cls, named: NamedParameter, config: SplitMatrixOptimizerConfig) -> "MatrixWeight":
        """A parameter with the split that the configuration asks for."""
        split = "fused" if named.rows is None else getattr(config, f"split_{named.rows.kind}")
        rows = None if split == "fused" else named.rows
        return cls(named.parameter, ShardedMatrix.of(named.parameter), rows, split == "head")

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """Rows and columns of the matrices of each piece."""
        rows, columns = self.sharding.rows, self.sharding.columns
        if self.rows is None:
            return [(rows, columns)]
        units = rows // self.rows.unit
        return [(piece.width * (1 if self.by_head else units * piece.heads), columns) for piece in self.rows.pieces]

    @property
    def counts(self) -> list[int]:
        """Matrices of each piece in a matrix of the parameter."""
        if self.rows is None or not self.by_head:
            return [1] * len(self.shapes)
        return [self.sharding.rows // self.rows.unit * piece.heads for piece in self.rows.pieces]

    @property
    def flops(self) -> float:
        """Work on one matrix, relative to other weights'."""
        return self.sharding.rows * self.sharding.columns * min(self.sharding.rows, self.sharding.columns)

    @property
    def elements(self) -> int:
        """Numbers of this rank's matrices, each whole."""
        return len(local_matrices(self.parameter)) * self.sharding.rows * self.sharding.columns


def rounds(weights: Sequence[MatrixWeight], ranks: int) -> Iterator[list[MatrixWeight]]:
    """Consecutive weights that give each rank at most `BATCH_ELEMENTS` numbers, at least one weight."""
    few, elements = list[MatrixWeight](), 0
    for weight in weights:
        if few and elements + weight.elements > ranks * BATCH_ELEMENTS:
            yield few
            few, elements = [], 0
        few.append(weight)
        elements += weight.elements
    if few:
        yield few
