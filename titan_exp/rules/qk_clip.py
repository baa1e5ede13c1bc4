"""QK-Clip rules: layers whose logits follow their projections, in a kernel without a mask of its own."""

from collections.abc import Iterator

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.groups.optimizer import OptimizerConfig
from titan_exp.config.groups.parallelism import CompileConfig
from titan_exp.config.machine.torch_features import ATTENTION_BACKEND
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.model_spec import LayerSpec
from titan_exp.rules.rule import rules

FIELD = "optimizer.qk_clip"


def logits_can_be_clipped(
    optimizer: OptimizerConfig, model: ModelConfig, compile: CompileConfig, device: str
) -> Iterator[Violation]:
    """Queries and keys are projections without a norm, and no kernel computes a mask of its own."""
    spec = model_spec(model)
    layers = [] if spec is None else [layer for layer in spec.blocks if layer.attention is not None]
    reasons = [] if layers else [f"model.architecture={model.architecture} does not describe its heads"]
    reasons += filter(None, map(_reason_of_layer, layers))
    backend = getattr(model, "attention_backend", "auto")
    if backend == "flex" or (backend == "auto" and device == "cuda" and any(map(_is_masked, layers))):
        reasons.append(f"FlexAttention masks logits itself ({ATTENTION_BACKEND}={backend})")
    if compile.cuda_graphs:
        reasons.append("largest logits in a captured pass are untested (compile.cuda_graphs=true)")
    for reason in dict.fromkeys(reasons):
        yield Violation(FIELD, optimizer.max_logit, reason, f"{FIELD}=null, or change that")
        return


def _reason_of_layer(layer: LayerSpec) -> str:
    assert layer.attention is not None
    if layer.vector("attention.q_norm") is not None or layer.attention.rotated_norm_eps is not None:
        return "layers normalize queries and keys, which bounds their logits already"
    linears = [linear for linear in layer.linears if linear.rows is not None and linear.rows.kind == "attention"]
    named = {piece.name for linear in linears if linear.rows is not None for piece in linear.rows.pieces}
    return "" if {"query", "key"} <= named else "layers do not describe their heads"


def _is_masked(layer: LayerSpec) -> bool:
    return layer.attention is not None and (layer.attention.sinks or not layer.attention.pattern.is_causal)


CLIP_RULES = rules(logits_can_be_clipped, when=lambda optimizer: optimizer.max_logit is not None)
