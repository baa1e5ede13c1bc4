"""Context length of a model: the longest sequence that its positions reach, with its scaling of RoPE."""

from collections.abc import Iterator

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.model import ModelConfig
from titan_exp.models.spec.rope import ROPE, PlainRope, ScaledRope


def longest_sequence(model: ModelConfig) -> int:
    """Longest sequence in tokens: the context, or what the scaling of RoPE reaches, if that is more."""
    rope = getattr(model, "rope", None)
    return rope.longest(model.context) if isinstance(rope, PlainRope) else model.context


def exceeds_context(model: ModelConfig, seq_len: int) -> Iterator[Violation]:
    """Sequence length beyond the model's context, with the scalings that reach it."""
    rope, longest = getattr(model, "rope", None), longest_sequence(model)
    if seq_len <= longest:
        return
    reason = f"it is longer than the context of {model.name}, {longest} tokens"
    stretched = f"model.context={seq_len}"
    if isinstance(rope, ScaledRope):
        resolved = rope.resolved(model.context)
        assert resolved.original_context is not None, "resolved"
        if resolved.scaling == "none":
            factor = -(-seq_len // resolved.original_context)
            scaling = f"{ROPE}.scaling=yarn {ROPE}.factor={factor} (or linear, llama3)"
        else:
            reason += f" with {ROPE}.scaling={rope.scaling} {ROPE}.factor={rope.factor:g}"
            scaling = f"{ROPE}.factor={rope.factor * -(-seq_len // longest):g}"
            scaling += f" {stretched}" if resolved.scaling == "llama3" else ""
        stretched = f"to stretch it, {scaling}; or {stretched} for weights of that context, or new ones"
    yield Violation("training.seq_len", seq_len, reason, f"at most training.seq_len={longest}; {stretched}")
