"""Activation checkpointing: backward recomputes activations instead of keeping them (Chen et al. 2016)."""

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titan_exp.config.errors.did_you_mean import did_you_mean
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.activation_checkpoint import ActivationCheckpointConfig
from titan_exp.config.machine.aten_ops import read_entry
from titan_exp.models.blocks.block_list import iter_blocks, iter_numbered_blocks


def apply_activation_checkpointing(
    model: nn.Module, config: ActivationCheckpointConfig, *, random: bool = True
) -> None:
    """Make blocks keep the configured activations and recompute the rest in backward, in place.

    Only `forward` is replaced, so parameter names stay; FSDP's hooks run around it. `random=False` says that blocks
    draw no random numbers, whose state then need not be restored.

    Raises:
        UserError: an operator to keep does not exist.
    """
    blocks = list(iter_blocks(model))
    match config.mode:
        case "full":
            _recompute(blocks, preserve_rng_state=random)
        case "every_n":
            # Layer numbers are those of the whole model, also in a pipeline stage.
            every = [block for number, block in iter_numbered_blocks(model) if (number + 1) % config.every == 0]
            _recompute(every, preserve_rng_state=random)
        case "selective":
            contexts = functools.partial(_selective_contexts, _kept_operators(config.save))
            _recompute(blocks, context_fn=contexts, preserve_rng_state=random)
        case "budget":
            # Read when a graph is partitioned into forward and backward, at its first call.
            functorch_config.activation_memory_budget = config.budget
            if hasattr(functorch_config, "unsafe_treat_script_objects_as_zero_size"):
                # The compiler cannot know that the process groups of tensor-parallel blocks hold no tensors.
                functorch_config.unsafe_treat_script_objects_as_zero_size = True


def needs_compiler(config: ActivationCheckpointConfig) -> bool:
    """True if the compiler must see the recomputation, because it chooses among a block's operators."""
    return config.mode == "selective"


def _recompute(blocks: Sequence[nn.Module], **options: Any) -> None:
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)


def _selective_contexts(kept: Mapping[Any, int]) -> Any:
    """Contexts of a block's forward pass and of its recomputation, each with its own call counters."""
    calls: Counter[Any] = Counter()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator not in kept:
            return CheckpointPolicy.PREFER_RECOMPUTE
        call = calls[context.is_recompute, operator]
        calls[context.is_recompute, operator] += 1
        return CheckpointPolicy.PREFER_RECOMPUTE if call % kept[operator] else CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


def _kept_operators(entries: Sequence[str]) -> dict[Any, int]:
    """Operators to keep, each with its period: 2 keeps every second call."""
    kept: dict[Any, int] = {}
    for entry in entries:
        read = read_entry(entry)
        found = _overloads(read.operator) if read is not None else []
        if read is None or not found:
            raise UserError("Unknown operator in activation_checkpoint.save.", [_unknown(entry)])
        kept.update(dict.fromkeys(found, read.every))
    return kept


def _overloads(name: str) -> list[Any]:
    """All overloads of an operator's name, or the one it names; empty if there is none."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            return []
    if isinstance(found, torch._ops.OpOverload):
        return [found]
    return [getattr(found, overload) for overload in found.overloads()]


def _unknown(entry: str) -> Violation:
    name = entry.partition("/")[0]
    offer = did_you_mean(name, _neighbours(name))
    return Violation(
        "activation_checkpoint.save",
        entry,
        "torch has no such operator here",
        offer or "use names of torch.ops, such as aten.mm or aten.mm.default",
    )


def _neighbours(name: str) -> Iterator[str]:
    """Names in the same namespace, with overloads if the entry has one."""
    namespace, _, rest = name.partition(".")
    for known in torch._C._dispatch_get_all_op_names():
        known_namespace, _, operator = known.partition("::")
        if known_namespace == namespace:
            packet, _, overload = operator.partition(".")
            yield f"{namespace}.{packet}.{overload or 'default'}" if "." in rest else f"{namespace}.{packet}"
