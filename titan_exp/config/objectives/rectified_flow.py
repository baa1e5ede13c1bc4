"""Options of `training.objective=rectified_flow`, keys of `training.objective_options`."""

from dataclasses import dataclass
from typing import Literal

from titan_exp.config.groups.types import PositiveFloat, Share


@dataclass(frozen=True)
class RectifiedFlowOptions:
    """Times, dropout of texts, and guidance."""

    times: Literal["logit_normal", "mode", "uniform"] = "logit_normal"
    """Distribution of times: sigmoid of a standard normal, SD3's with a mode in the middle, or uniform (Esser et al.
    2024, arXiv 2403.03206, section 3.1)."""
    shift: bool = False
    """Shift times towards noise by the number of image tokens, as Flux does in sampling."""
    text_dropout: Share = 0.1
    """Share of samples whose text states are those of the empty text, for classifier-free guidance."""
    pooled_dropout: Share = 0.1
    """The same for pooled embeddings, drawn independently."""
    guidance: tuple[PositiveFloat, PositiveFloat] = (3.5, 3.5)
    """Bounds between which the guidance scale of a model that takes one is drawn uniformly. Training such a model from
    the data, not from a guided teacher, teaches it nothing about guidance."""
