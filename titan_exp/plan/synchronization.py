"""Semi-synchronous training on paper: the largest message of a rank, and numbers of a checkpoint of all groups."""

import math

from titan_exp.config.groups.semi_sync import SemiSyncConfig
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.optim.outer.fragments import fragments_of

NUMBER = 4
"""Bytes of an fp32 number."""


def largest_fragment(config: SemiSyncConfig, spec: ModelSpec, layout: ResolvedLayout, pipeline_rank: int) -> float:
    """Share of a pipeline rank's parameters in the fragment of which it has most: what it sends at a time."""
    shapes, sizes, seen = spec.shapes, [0] * config.fragments, False
    stages = {block: stage for stage, blocks in enumerate(layout.stage_layers) for block in blocks}
    last = layout.stage_count - 1
    for name, fragment in fragments_of(shapes, config, len(spec.blocks)).items():
        first, _, rest = name.partition(".")
        is_in_block = first == "blocks"
        seen = seen or is_in_block
        own = {stages[int(rest.partition(".")[0])] if is_in_block else last * seen}
        if name in spec.pipeline.copied:
            own.add(last)
        held = [layout.stage_placement[stage] for stage in own]
        sizes[fragment] += held.count(pipeline_rank) * math.prod(shapes[name])
    return max(sizes) / sum(sizes)


def checkpoint_numbers(config: SemiSyncConfig, state: float) -> float:
    """Numbers of a checkpoint per parameter, of which optimizers keep `state`: every group's inner state, and its own
    weights if they differ, and the outer momentum; the kept weights are the weights."""
    if not config.enabled:
        return 1 + state
    momentum = int(config.outer[1] > 0)
    return 1 + momentum + config.groups * (state - 1 - momentum + config.keeps_own_weights)
