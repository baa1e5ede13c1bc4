"""Attention implementations that are given to the classes of transformers: our kernels, and a recorder of shapes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from titan_exp.models.spec.model_spec import AttentionSpec
from titan_exp.ops.attention.mask_pattern import MaskPattern
from titan_exp.ops.attention.sdpa import AttentionBackend, CausalAttention

KERNELS = "titan_exp"
"""Name of the implementation by our kernels, under which transformers makes no masks."""

RECORDER = "titan_exp_recorder"
"""Name of the implementation that computes nothing and notes its arguments."""

KNOWN_OPTIONS = frozenset(
    {"sliding_window", "position_ids", "use_cache", "is_causal", "cache_position", "cu_seq_lens_q"}
)
"""Arguments beside tensors, scaling, dropout and masks that the kernels compute with, or that training never gives."""


@dataclass
class AttentionCalls:
    """Calls of the attention of a model, recorded in a forward pass on the meta device."""

    found: dict[nn.Module, AttentionSpec] = field(default_factory=dict)
    """Attention of each module that called."""
    unknown: dict[str, object] = field(default_factory=dict)
    """Arguments that the kernels do not know."""
    dropout: float = 0.0
    """Largest dropout of attention probabilities."""
    masks_arrive: bool = True
    """True if every call got the masks that the model was called with."""
    is_causal: bool = True
    """False if a module sees later tokens."""

    def add(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        masks: object = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attention function of transformers: note a call, and return values of the right shape."""
        heads, width = query.shape[1], query.shape[3]
        self.found[module] = AttentionSpec(
            heads,
            key.shape[1],
            width,
            value.shape[3],
            qk_dim_key="the head size of config.json",
            window=options.get("sliding_window"),
            scale=None if scaling is None or abs(scaling - width**-0.5) < 1e-9 else float(scaling),
        )
        self.unknown |= {key: given for key, given in options.items() if given is not None and key not in KNOWN_OPTIONS}
        self.dropout = max(self.dropout, dropout)
        self.masks_arrive &= masks is not None
        self.is_causal &= getattr(module, "is_causal", True) and options.get("is_causal", True) is not False
        return query.new_empty(query.shape[0], query.shape[2], heads, value.shape[3]), None


_RECORDING: ContextVar[AttentionCalls] = ContextVar("recording")


@contextmanager
def recording_attention() -> Iterator[AttentionCalls]:
    """Let models with the recorder note their calls."""
    calls = AttentionCalls()
    token = _RECORDING.set(calls)
    try:
        yield calls
    finally:
        _RECORDING.reset(token)


def give_kernels(found: dict[nn.Module, AttentionSpec], backend: AttentionBackend) -> list[CausalAttention]:
    """Give attention modules the kernel of their pattern as `core`; returns one core per pattern."""
    cores: dict[MaskPattern, CausalAttention] = {}
    for module, spec in found.items():
        module.core = CausalAttention(backend, spec.scale, spec.pattern)
        cores.setdefault(spec.pattern, module.core)
        module.mask_number = list(cores).index(spec.pattern)  # type: ignore[assignment]  # a plain attribute
    return list(cores.values())


def _record(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return _RECORDING.get().add(*args, **kwargs)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, *, masks: Sequence[Any], **_: Any
) -> tuple[Tensor, None]:
    """Attention function of transformers, by the module's kernel and the mask of its pattern."""
    out = module.core(query, key, value, masks[module.mask_number])
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(KERNELS, _attend)
AttentionInterface.register(RECORDER, _record)
