"""Tensor-parallel plan of a class of transformers, in our styles."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from titan_exp.models.spec.model_spec import AttentionSpec
from titan_exp.models.spec.tp_plan import SEQUENCE_PARALLEL, Colwise, Rowwise, SequenceParallel

LinearStyle = Colwise | Rowwise | SequenceParallel

GATHERED = ("colwise_gather_output", "colwise_rep")
SPLIT = ("rowwise_split_input", "rowwise_rep")
SUPPORTED = ("colwise", "rowwise", *GATHERED, *SPLIT, "replicated_with_grad_allreduce", "replicate")
"""Styles of transformers that are translated."""


@dataclass
class BlockStyles:
    """Tensor-parallel styles of a block."""

    linears: dict[str, LinearStyle] = field(default_factory=dict)
    """Style by the path of a linear."""
    heads: list[str] = field(default_factory=list)
    """Paths of norms over this rank's heads."""
    gathering: list[str] = field(default_factory=list)
    """Paths of modules that are called with all tokens."""
    refusal: str | None = None
    """Reason for which the block cannot be sharded."""


def block_styles(
    plan: Mapping[str, str],
    linears: Mapping[str, int],
    parameters: Iterable[str],
    attention: tuple[str, AttentionSpec] | None,
) -> BlockStyles:
    """Styles of a block from the class's plan for it: style by path, with `*` for numbers.

    `linears` are outputs by path, `parameters` all names, `attention` the attention module's path and shapes.
    """
    found = BlockStyles()
    named = {name: _of(plan, name) for name in parameters}
    owners = dict.fromkeys(name.rpartition(".")[0] for name in named)
    styles = {owner: _of(plan, owner) for owner in owners}
    unknown = {style for style in (*styles.values(), *named.values()) if style is not None and style not in SUPPORTED}
    if unknown:
        found.refusal = f"its plan has the style {sorted(unknown)[0]}, which is not translated"
        return found
    for owner, style in styles.items():
        if owner in linears:
            found.linears[owner] = _linear_style(owner, style, linears[owner], attention)
        elif style == "replicated_with_grad_allreduce":
            found.heads.append(owner)
        elif style not in (None, "replicate"):
            found.refusal = f"its plan has the style {style} for {owner}, which is no linear layer"
    for module in {name.rpartition(".")[0]: None for name, style in found.linears.items() if _gathers(style)}:
        if not any(_splits(style) for name, style in found.linears.items() if name.rpartition(".")[0] == module):
            found.refusal = f"its plan gathers outputs of {module}, and splits them for no linear after it"
    _gather_once(found)
    for owner, style in styles.items():
        inside = [module for module in _sharded_modules(found) if owner.startswith(f"{module}.")]
        if style is None and inside:
            found.refusal = f"its plan shards {inside[0]} and says nothing about {owner}"
    return found


def _gathers(style: LinearStyle) -> bool:
    return isinstance(style, Colwise) and style.gathers_output


def _splits(style: LinearStyle) -> bool:
    return isinstance(style, Rowwise) and style.splits_input


def _of(plan: Mapping[str, str], name: str) -> str | None:
    """Style of a name, whose numbers are `*` in the plan."""
    return plan.get(".".join("*" if part.isdecimal() else part for part in name.split(".")))


def _linear_style(
    name: str, style: str | None, outputs: int, attention: tuple[str, AttentionSpec] | None
) -> LinearStyle:
    if style in ("rowwise", *SPLIT):
        return Rowwise(splits_input=style in SPLIT)
    if style in GATHERED:
        return Colwise(outputs, described=f"{outputs} outputs of {name}", gathers_output=True)
    if style != "colwise":
        return SEQUENCE_PARALLEL
    if attention is not None and name.startswith(f"{attention[0]}."):
        heads, kv_heads = attention[1].heads, attention[1].kv_heads
        return Colwise(kv_heads, described=f"{heads} query heads with {kv_heads} key and value heads")
    return Colwise(outputs, described=f"{outputs} outputs of {name}")


def _gather_once(found: BlockStyles) -> None:
    """Let modules with column-parallel linears gather their input for all of them."""
    for name, style in found.linears.items():
        module = name.rpartition(".")[0]
        if isinstance(style, Colwise) and module:
            found.linears[name] = replace(style, gathers=False)
            found.gathering.append(module)
    found.gathering = list(dict.fromkeys(found.gathering))


def _sharded_modules(found: BlockStyles) -> set[str]:
    """Modules between whose linears each rank has its own features."""
    return {
        name.rpartition(".")[0]
        for name, style in found.linears.items()
        if isinstance(style, Colwise) and not style.gathers_output
    }
