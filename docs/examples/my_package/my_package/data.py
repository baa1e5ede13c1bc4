"""Documents of additions, such as `12+30=42`."""

import random

from titan_exp.config.groups.run import DataConfig


class Additions:
    """A random-access source, called as `Additions(config, **data.options)` with the group `data`."""

    def __init__(self, config: DataConfig, documents: int = 2000, largest: int = 99, lines: int = 20) -> None:
        self.documents, self.largest, self.lines = documents, largest, lines

    def __len__(self) -> int:
        """Number of documents."""
        return self.documents

    def __getitem__(self, index: int) -> str:
        """Text of a document, the same in every process."""
        draw = random.Random(index)
        pairs = ((draw.randint(0, self.largest), draw.randint(0, self.largest)) for _ in range(self.lines))
        return "\n".join(f"{a}+{b}={a + b}" for a, b in pairs)
