"""FSDP groups of a model's ends: embedding, final norm and LM head are gathered when they are called, and freed after.

`pp_plan()` names the ends. Parameters of a model without a plan stay in the root's group, gathered for the whole step,
since nothing says when they are used; so do parameters that two children share.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from titan_exp.models.spec.model_spec import PipelinePlan


class ShardModules(Protocol):
    """Function that makes an FSDP group."""

    def __call__(self, modules: Sequence[nn.Module], *, reshard: bool) -> None:
        """Group the modules' parameters, freed after forward if `reshard`."""


def shard_ends(model: nn.Module, shard: ShardModules, *, free: bool) -> list[nn.Module]:
    """Make FSDP groups of the ends of a model or pipeline stage; `free` is False if parameters stay gathered.

    The first children (embedding) are freed after their forward. The last (norm, head) share a group and are kept from
    forward to backward, between which nothing is computed. A tied weight is kept from the embedding's forward to the
    head's backward. Autograd holds its gradient, of the same size, from there to the embedding's backward, so that
    freeing it between its two uses would lower no peak. Returns the modules that are kept.
    """
    plan = pipeline_plan(model)
    if plan is None:
        return []
    kept: list[nn.Module] = []
    for name, child in _unshared_children(model, plan.first):
        tied = name in plan.shared
        shard([child], reshard=free and not tied)
        assert isinstance(child, FSDPModule)
        if tied:
            _gather_in_backward_of_head(child)
            kept.append(child)
        elif not getattr(child, "reads_weight_in_backward", True):
            child.set_unshard_in_backward(False)
            # Not the default, which is what ran before it: the head in the micro-batch or evaluation before.
            child.set_modules_to_backward_prefetch([child])
    # The norm before a tied head stays with the root: between head and last block it would end FSDP2's prefetching.
    last = [] if plan.shared else [child for _, child in _unshared_children(model, plan.last)]
    if last:
        shard(last, reshard=False)
    return [*kept, *last]


def lookup_tables(model: nn.Module) -> list[nn.Module]:
    """Embeddings of a model or pipeline stage whose weights nothing on this rank uses but lookups."""
    plan = pipeline_plan(model)
    if plan is None:
        return []
    head = bool(_children(model, plan.last))
    return [
        child
        for name, child in _unshared_children(model, plan.first)
        if hasattr(child, "row_dtype") and not (head and name in plan.shared)
    ]


def pipeline_plan(model: nn.Module) -> PipelinePlan | None:
    """Plan that names a model's ends; None if it has none."""
    plan = model.pp_plan() if hasattr(model, "pp_plan") else None  # type: ignore[operator]  # a method
    return plan if isinstance(plan, PipelinePlan) else None


def _gather_in_backward_of_head(embedding: FSDPModule) -> None:
    """Gather a tied weight for the head's backward if it was freed, and not for a lookup's, which reads no weight.

    FSDP2 knows one policy per module, so hooks tell its calls apart: the head's begin with hidden states.
    """
    assert isinstance(embedding, nn.Module)

    def gather(_: Tensor) -> None:
        embedding.set_unshard_in_backward(True)
        embedding.unshard()  # FSDP2 does so only if no lookup's backward came before, of another micro-batch

    def register(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not inputs[0].requires_grad:
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(gather)
        inputs[0].register_hook(lambda _: embedding.set_unshard_in_backward(False))

    embedding.set_unshard_in_backward(False)
    embedding.register_forward_hook(register)


def _children(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Children of this stage by name; other stages hold the rest."""
    return {name: child for name in names if isinstance(child := getattr(model, name, None), nn.Module)}


def _unshared_children(model: nn.Module, names: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Children with parameters, none of which another child has too."""
    owners = Counter(parameter for child in model.children() for parameter in child.parameters())
    return [
        (name, child)
        for name, child in _children(model, names).items()
        if any(True for _ in child.parameters()) and all(owners[parameter] == 1 for parameter in child.parameters())
    ]
