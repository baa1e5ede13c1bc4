"""Inputs of a model that reads something other than token ids, as its family describes them. Imports no torch."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar


class ModelInputs(ABC):
    """Inputs of a model by the arguments of its `forward`, and the settings that depend on their kind."""

    positional: ClassVar[tuple[str, ...]]
    """Positional arguments of `forward`."""
    named: ClassVar[tuple[str, ...]]
    """Its other arguments."""
    trained_by: ClassVar[str]
    """Overrides that select training of such a model."""
    makes: ClassVar[str]
    """Kind of outputs of `titan-exp generate`, by its name in `Extension.generators`."""

    @abstractmethod
    def streams(self, seq_len: int) -> tuple[int, ...]:
        """Number of tokens in each stream of a sequence; ranks that share the sequence divide each stream."""

    @abstractmethod
    def example(self, rows: int, seq_len: int) -> Any:
        """Micro-batch of zeros with the same tensors as the loader's."""
