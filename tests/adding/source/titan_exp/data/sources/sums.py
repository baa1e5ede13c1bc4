"""Source `sums`: documents of additions, such as `12+30=42`."""

from titan_exp.config.groups.run import DataConfig
from titan_exp.config.schema.builtins import SourceDescription

DESCRIPTION = SourceDescription()


def build(config: DataConfig) -> "Sums":
    """Open the source; it has no settings."""
    return Sums()


def open_files(config: DataConfig) -> None:
    """No files, whose checksum would be the identity of the documents."""


class Sums:
    """One document for each number from 0 to 999: the sums of it with 50 others."""

    fingerprint = "sums: 1000 numbers, 50 sums each"
    """Identity of the documents."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> str:
        return "\n".join(f"{index}+{other}={index + other}" for other in range(50))
