"""Activation checkpointing: what backward recomputes instead of keeping (Chen et al. 2016)."""

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
    """Make blocks keep what the configuration says and compute the rest again in backward, in place.

    Only `forward` is replaced, so parameter names stay as they are; sharding's hooks gather parameters around it.

    Args:
        model: its blocks are wrapped.
        config: what they keep.
        random: whether blocks may draw random numbers, which are then drawn again.

    Raises:
        UserError: an operator to keep does not exist.
    """
    blocks = list(iter_blocks(model))
    match config.mode:
        case "full":
            _recompute(blocks, preserve_rng_state=random)
        case "every_n":
            # By number in the whole model, of which a pipeline stage has some.
            every = [block for number, block in iter_numbered_blocks(model) if (number + 1) % config.every == 0]
            _recompute(every, preserve_rng_state=random)
        case "selective":
            kept = _kept_operators(config.save)
            contexts = functools.partial(_selective_contexts, kept)
            _recompute(blocks, context_fn=contexts, preserve_rng_state=random)
        case "budget":
            # Read where a graph is divided into forward and backward, at its first call.
            functorch_config.activation_memory_budget = config.budget
            if hasattr(functorch_config, "unsafe_treat_script_objects_as_zero_size"):
                # Tensor-parallel blocks hold process groups; that no tensor is in them, the compiler cannot know.
                functorch_config.unsafe_treat_script_objects_as_zero_size = True


def needs_compiler(config: ActivationCheckpointConfig) -> bool:
    """True if the compiler must see the recomputation, because it chooses among a block's operators."""
    return config.mode == "selective"


def _recompute(blocks: Sequence[nn.Module], **options: Any) -> None:
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)


def _selective_contexts(kept: Mapping[Any, int]) -> Any:
    """The contexts of one block's forward pass and of its recomputation, which count calls anew."""
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
            raise UserError("Activations cannot be chosen.", [_unknown(entry)])
        kept.update(dict.fromkeys(found, read.every))
    return kept


def _overloads(name: str) -> list[Any]:
    """The operator of a full name, or all overloads of a name without one; empty where there is none."""
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
        offer or "names are those of torch.ops, as in aten.mm or aten.mm.default",
    )


def _neighbours(name: str) -> Iterator[str]:
    """Names of the same namespace, with overloads where an overload is asked for."""
    namespace, _, rest = name.partition(".")
    for known in torch._C._dispatch_get_all_op_names():
        its_namespace, _, operator = known.partition("::")
        if its_namespace == namespace:
            packet, _, overload = operator.partition(".")
            yield f"{namespace}.{packet}.{overload or 'default'}" if "." in rest else f"{namespace}.{packet}"
