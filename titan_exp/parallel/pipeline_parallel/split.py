"""Cutting a model on the meta device into a pipeline stage: the same class, with other parts left out."""

from collections.abc import Collection

from torch import nn

from titan_exp.models.spec.pp_plan import PipelinePlan


def prune_to_stage(model: nn.Module, layers: Collection[int], *, first: bool, last: bool) -> None:
    """Leave of a model what one stage holds, in place; parameters keep their names in the whole model.

    Args:
        model: says by `pp_plan` what not every stage holds, and has a `ModuleDict` named `blocks` whose keys are
            the layers' numbers.
        layers: the layers that stay.
        first: whether this is the first stage.
        last: whether it is the last one.
    """
    ends = model.pp_plan()  # type: ignore[operator]  # a method, not a submodule; checked by the rules
    assert isinstance(ends, PipelinePlan)
    blocks = model.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleDict), "checked by the rules"
    for key in list(blocks):
        if int(key) not in layers:
            del blocks[key]
    stays = {*(ends.first if first else ()), *((*ends.last, *ends.shared) if last else ())}
    for child in {*ends.first, *ends.last} - stays:
        setattr(model, child, None)


def shared_parameters(model: nn.Module) -> tuple[str, ...]:
    """Names of the first stage's parameters that the last stage has a copy of; of the whole model, before it is cut."""
    return tuple(
        f"{child}.{name}"
        for child in model.pp_plan().shared  # type: ignore[operator]  # a method, not a submodule
        for name, _ in model.get_submodule(child).named_parameters()
    )
