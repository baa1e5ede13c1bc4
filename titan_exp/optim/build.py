"""From the optimizer group to a torch optimizer."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from titan_exp.config.dotted import import_dotted, is_dotted
from titan_exp.config.optimizer import OptimizerConfig


def build_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Build the optimizer over a model's parameters, in two groups: with and without weight decay.

    Vectors (norms, biases) are not decayed unless `decay_vectors`. A class of the user's own is called as
    `Class(groups, lr=lr, **options)`.

    Raises:
        UserError: the dotted name cannot be imported.
    """
    matrices, vectors = [], []
    for parameter in parameters:
        if parameter.requires_grad:
            (vectors if parameter.dim() < 2 and not config.decay_vectors else matrices).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": group, "weight_decay": decay}
        for group, decay in ((matrices, config.weight_decay), (vectors, 0.0))
        if group
    ]
    if is_dotted(config.name):
        return import_dotted(config.name, "optimizer.name")(groups, lr=config.lr, **config.options)
    assert config.name == "adamw", "checked by the configuration's rules"
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )
