"""Tensors of a language model in a multimodal checkpoint, by their names without the prefix."""

from collections.abc import Mapping

import torch
from torch import Tensor

from titan_exp.checkpoint.formats.tensor_reader import TensorReader


class PrefixedReader:
    """Reads the tensors whose names have a prefix; the others are hidden."""

    def __init__(self, store: TensorReader, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        found = store.shapes.items()
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name.removeprefix(prefix): shape for name, shape in found if name.startswith(prefix)
        }

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""
        return self._store.dtype(self._prefix + name)

    def read(self, name: str, *window: slice) -> Tensor:
        """Read only a slice from disk."""
        return self._store.read(self._prefix + name, *window)
