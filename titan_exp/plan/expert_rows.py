"""Rows of grouped matmuls with uniform routing. Imports no torch."""

from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.spec.lookup import model_spec


def expert_rows(layout: ResolvedLayout, model: ModelConfig) -> float | None:
    """Rows of an expert in a micro-batch, where its matmuls run; None without experts."""
    spec, parallelism = model_spec(model), layout.parallelism
    router = None if spec is None else next((layer.router for layer in spec.layers if layer.router is not None), None)
    if router is None:
        return None
    tokens = layout.micro_batch_size * layout.training.seq_len / parallelism.cp
    # A rank routes its own tokens; ranks with other channels of the same experts compute the tokens of all of them.
    tokens *= parallelism.ep * parallelism.etp / parallelism.tp
    return tokens * router.moe.active_experts / router.moe.experts
