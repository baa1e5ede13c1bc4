"""Stage split: prunes a model on the meta device to the children and layers of one pipeline stage."""

from collections.abc import Collection

from torch import nn

from titan_exp.models.spec.model_spec import PipelinePlan


def prune_to_stage(model: nn.Module, layers: Collection[int], *, first: bool, last: bool) -> None:
    """Keep the layers and children of one stage, in place; parameters keep their names in the whole model.

    The model has `pp_plan()` and a `ModuleDict` named `blocks` whose keys are layer numbers.
    """
    plan = model.pp_plan()  # type: ignore[operator]  # a method, not a submodule; checked by the rules
    assert isinstance(plan, PipelinePlan)
    blocks = model.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleDict), "checked by the rules"
    for key in list(blocks):
        if int(key) not in layers:
            del blocks[key]
    kept = {*(plan.first if first else ()), *((*plan.last, *plan.copied) if last else ())}
    for child in {*plan.first, *plan.last} - kept:
        setattr(model, child, None)


def shared_parameters(model: nn.Module) -> tuple[str, ...]:
    """Names of the first stage's parameters that the last stage has a copy of; for the unpruned model."""
    return tuple(
        f"{child}.{name}"
        for child in model.pp_plan().copied  # type: ignore[operator]  # a method, not a submodule
        for name, _ in model.get_submodule(child).named_parameters()
    )
