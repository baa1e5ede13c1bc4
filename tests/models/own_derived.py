"""A Llama whose configuration derives an attribute that is no field, as a user's may."""

from dataclasses import dataclass

from titan_exp.models import llama
from titan_exp.models.llama import block, spec, violations

__all__ = ["Config", "block", "spec", "violations"]


@dataclass(frozen=True)
class Config(llama.Config):
    """Shape of a Llama; `half` is derived from it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "half", self.dim // 2)
