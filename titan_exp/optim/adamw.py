"""AdamW (Loshchilov and Hutter 2019): torch's, with low-precision moments, or fused with clipping."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from titan_exp.config.groups.optimizer import AdamWConfig as Config

if TYPE_CHECKING:
    import torch

    from titan_exp.optim.parameter_groups import NamedParameter

__all__ = ["Config", "build"]


def build(parameters: Sequence["NamedParameter"], config: Config) -> "torch.optim.Optimizer":
    """Build the implementation that `implementation` and `state_precision` choose.

    Raises:
        UserError: a block of 8-bit moments would lie on two ranks.
    """
    import torch

    from titan_exp.optim.fused_clip_adamw import FusedClipAdamW
    from titan_exp.optim.low_precision_adamw import LowPrecisionAdamW
    from titan_exp.optim.parameter_groups import parameter_groups

    groups, lr, betas = parameter_groups(parameters, config), config.lr, (config.betas[0], config.betas[1])
    assert config.implementation != "auto", "resolved before launch"
    precision, implementation, eps = config.state_precision, config.implementation, config.eps
    if implementation == "triton":
        assert precision in ("fp32", "bf16"), "checked by the rules"
        moments = torch.float32 if precision == "fp32" else torch.bfloat16
        return FusedClipAdamW(groups, lr=lr, betas=betas, eps=eps, moments=moments)
    if precision != "fp32":
        return LowPrecisionAdamW(groups, lr=lr, betas=betas, eps=eps, precision=precision)
    fused, foreach = implementation == "fused", implementation == "foreach"
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused, foreach=foreach)
