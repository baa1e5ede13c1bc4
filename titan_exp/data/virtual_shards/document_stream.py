"""Document stream interface: endless tokenized documents of one virtual shard."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np


class DocumentStream(Protocol):
    """Endless tokenized documents of one virtual shard, positioned at a non-empty document."""

    start: float
    """Skipped fraction of the shard's first document, in which another shard starts."""

    def prefetch(self) -> None:
        """Start fetching the current document without waiting for it."""
        ...

    def tokens(self) -> np.ndarray:
        """Tokens of the current document and its end-of-text, [at least 2]."""
        ...

    def advance(self) -> None:
        """Move to the next document."""
        ...

    def position(self) -> dict[str, Any]:
        """JSON-serializable position, with at least the key `epoch`."""
        ...

    def seek(self, position: Mapping[str, Any] | None) -> None:
        """Move to a `position()` of the same shard and corpus, or to the beginning (None)."""
        ...

    def epochs(self, position: Mapping[str, Any]) -> float:
        """Epochs over the whole corpus if all shards have progressed like this one at `position`; 0 for `{}`."""
        ...
