"""Source `sums`: documents of additions, such as `12+30=42`."""

from dataclasses import dataclass

from titan_exp.config.groups.run import DataConfig
from titan_exp.config.groups.types import PositiveInt
from titan_exp.config.schema.foreign_code import SourceDescription

DESCRIPTION = SourceDescription()


class Sums:
    """One document for each number from 0 to 999: its sums with others."""

    @dataclass(frozen=True)
    class Options:
        """Keys of `data.options`."""

        others: PositiveInt = 50
        """Sums of a document."""

    fingerprint = "sums: 1000 numbers"
    """Identity of the documents, beside the options."""

    def __init__(self, config: DataConfig, options: Options) -> None:
        self.others = options.others

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> str:
        return "\n".join(f"{index}+{other}={index + other}" for other in range(self.others))


build = Sums
