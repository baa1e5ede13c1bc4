"""Mesh axes: degree, split dimension and collectives. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from operator import attrgetter

from titan_exp.config.groups.parallelism import ParallelismConfig


@dataclass(frozen=True)
class Axis:
    """Axis of the device mesh."""

    name: str
    """Name of the mesh dim."""
    meaning: str
    """Sentence for readers of the planner's page: what the ranks of a group share."""
    collectives: str
    """Communication along the axis."""
    key: str
    """Key of the degree, in group `parallelism`."""
    degree: Callable[[ParallelismConfig], int]
    """Number of ranks along the axis."""
    shards_parameters: bool = False
    """True if FSDP shards parameters over the axis, flattened with other such axes."""


def _axis(key: str, meaning: str, collectives: str, *, shards_parameters: bool = False) -> Axis:
    """Axis with the name of its key, whose value is the degree."""
    return Axis(key, meaning, collectives, key, attrgetter(key), shards_parameters)


_CONTEXT = (
    "Context parallelism: the tokens of every sequence are sharded. Ranks of the group exchange keys and values, so "
    "that a token attends to all earlier ones."
)
_ACROSS, _WITHIN = "ring or all-gather of keys and values", "all-to-all between tokens and heads"

AXES = (
    _axis(
        "pp",
        "Pipeline parallelism: the layers are split into consecutive stages, through which micro-batches pass forward "
        "and then backward.",
        "point-to-point sends of activations and their gradients",
    ),
    _axis(
        "dp_replicate",
        "Replicated data parallelism: each rank of the group belongs to another replica of the model, which computes "
        "other sequences.",
        "all-reduce of gradients",
    ),
    _axis(
        "dp_shard",
        "Sharded data parallelism (FSDP): each rank of the group computes other sequences and keeps a shard of every "
        "weight, its gradient and its optimizer state. Weights are gathered when a layer computes.",
        "all-gather of parameters, reduce-scatter of gradients",
        shards_parameters=True,
    ),
    Axis("cp_across", _CONTEXT, _ACROSS, "cp", lambda degrees: degrees.cp // degrees.ulysses_degree, True),
    Axis("cp_within", _CONTEXT, _WITHIN, "cp", lambda degrees: degrees.ulysses_degree, True),
    _axis(
        "tp",
        "Tensor parallelism: weight matrices are sharded. Each rank of the group multiplies with its shard, and they "
        "combine results twice in every layer, so they need the fastest links.",
        "all-reduce, or all-gather and reduce-scatter, of activations",
    ),
)
"""Axes from the outermost to the innermost: ranks along the last are adjacent."""

EXPERT_AXES = (
    *(axis for axis in AXES if axis.name in ("pp", "dp_replicate")),
    Axis(
        "efsdp",
        "Sharded data parallelism of experts: each rank of the group keeps a shard of the same experts' weights, which "
        "are gathered when a layer computes.",
        "all-gather of experts' parameters, reduce-scatter of their gradients",
        "dp_shard",
        lambda degrees: degrees.dp_shard * degrees.cp * degrees.tp // (degrees.ep * degrees.etp),
        shards_parameters=True,
    ),
    _axis(
        "ep",
        "Expert parallelism: each rank of the group keeps other experts. Tokens are sent to the ranks of their experts "
        "and back.",
        "all-to-all of tokens",
    ),
    _axis(
        "etp",
        "Tensor parallelism within experts: each rank of the group computes some channels of every expert, for the "
        "tokens of all of them.",
        "all-gather and reduce-scatter of tokens",
    ),
)
"""Axes of the experts' weights, over the same ranks in the same order: `ep` takes the ranks of tp (or `etp` does), then
of cp, then of dp_shard."""

DEGREES = tuple(dict.fromkeys(axis.key for axis in AXES))
"""Keys of the degrees whose product is the world size."""

ONE_DEVICE = dict.fromkeys((*DEGREES, "cp_ulysses", "ep", "etp"), 1)
"""Degrees of a single-device run, by key."""

BLOCK_DEGREES = ("cp", "tp", "ep")
"""Keys of the axes with collectives inside a block."""


def regroups_experts(parallelism: ParallelismConfig) -> bool:
    """True if experts are sharded over other groups of ranks than the other weights."""
    return parallelism.tp > 1 or parallelism.ep > 1


def world_size(parallelism: ParallelismConfig) -> int:
    """Product of the degrees."""
    return prod(getattr(parallelism, key) for key in DEGREES)
