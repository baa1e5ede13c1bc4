"""Inputs of a model that reads something else than token ids, as its family describes them. Imports no torch."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar


class ModelInputs(ABC):
    """Inputs of a model by the arguments of its `forward`, and what else depends on their kind."""

    positional: ClassVar[tuple[str, ...]]
    """Positional arguments of `forward`."""
    named: ClassVar[tuple[str, ...]]
    """Its other arguments."""
    trained_by: ClassVar[str]
    """Overrides that train such a model."""
    makes: ClassVar[str]
    """Outputs of `titan-exp generate`, as `Extension.generators` names them."""

    @abstractmethod
    def streams(self, seq_len: int) -> tuple[int, ...]:
        """Tokens of each stream of a sequence; ranks that share the sequence divide each stream."""

    @abstractmethod
    def example(self, rows: int, seq_len: int) -> Any:
        """Micro-batch of zeros with the tensors that the loader's have."""
