"""From the optimizer group to a torch optimizer."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titan_exp.config.groups.optimizer import OptimizerConfig
from titan_exp.config.schema.import_path import import_dotted, is_dotted
from titan_exp.optim.fused_clip_adamw import FusedClipAdamW
from titan_exp.optim.low_precision_adamw import LowPrecisionAdamW


def build_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Build the optimizer over a model's parameters, in groups with and without weight decay for every mesh.

    Vectors (norms, biases) are not decayed unless `decay_vectors`. A class of the user's own is called as
    `Class(groups, lr=lr, **options)`.

    Raises:
        UserError: the dotted name cannot be imported; moments in 8 bits cannot be divided so.
    """
    # Fused and foreach kernels take tensors of one mesh at a time.
    by_kind: dict[tuple[bool, object], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.requires_grad:
            decayed = parameter.dim() >= 2 or config.decay_vectors
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_kind[decayed, mesh].append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": group, "weight_decay": config.weight_decay if decayed else 0.0}
        for (decayed, _), group in sorted(by_kind.items(), key=lambda item: not item[0][0])
    ]
    if is_dotted(config.name):
        return import_dotted(config.name, "optimizer.name")(groups, lr=config.lr, **config.options)
    assert config.name == "adamw", "checked by the configuration's rules"
    if config.implementation == "triton":
        assert config.state_precision in ("fp32", "bf16"), "checked by the configuration's rules"
        return FusedClipAdamW(
            groups,
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            moments=torch.float32 if config.state_precision == "fp32" else torch.bfloat16,
        )
    if config.state_precision != "fp32":
        return LowPrecisionAdamW(
            groups,
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            precision=config.state_precision,
        )
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )
