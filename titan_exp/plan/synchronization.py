"""Replica groups on paper: seconds of sums over the groups, the largest message of a rank, and numbers of a checkpoint
of all groups in semi-synchronous training."""

import math
from dataclasses import replace

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.semi_sync import SemiSyncConfig
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.devices import device_type
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.optim.outer.fragments import fragments_of
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.time.roofline import message_seconds
from titan_exp.plan.trace.memory_tracker import Moment
from titan_exp.plan.trace.trace_step import Trace
from titan_exp.trainer.replica_groups.buckets import BUCKET_BYTES

NUMBER = 4
"""Bytes of an fp32 number."""


def exchange_seconds(experiment: Experiment, weights: float, device: Device, step: float) -> float:
    """Seconds of a step that a rank waits for sums over the groups, by TCP between nodes and over the host's memory:
    of gradients, or of the step's part of a synchronization, less the steps of `step` seconds that train meanwhile.
    `weights` are the bytes of the rank's fp32 weights."""
    groups, config = experiment.cluster.replica_groups, experiment.semi_sync
    if groups == 1:
        return 0.0
    interval, fragments, delay = 1, 1, 0
    if config.enabled:
        interval, fragments, delay = config.interval, config.fragments, config.delay
    part = weights / fragments
    seconds = message_seconds("all-reduce", round(part), range(groups), device, 1, calls=math.ceil(part / BUCKET_BYTES))
    if device_type(experiment.cluster) == "cuda":
        seconds += 2 * part / (device.host_gbs * 1e9 * device.link_efficiency)
    return fragments * max(0.0, seconds - delay * step) / interval


def with_bucket(experiment: Experiment, trace: Trace) -> Trace:
    """Trace of a rank on a CPU whose peak may be the sum of gradients over the groups, with a copy of a bucket."""
    if experiment.cluster.replica_groups == 1 or experiment.semi_sync.enabled:
        return trace
    held = {**trace.persistent, "gradients": trace.gradients}
    sizes = {**dict.fromkeys(trace.peak.by_category, 0), **held}
    sizes["communication"] = sizes.get("communication", 0) + min(trace.gradients, BUCKET_BYTES)
    moment = Moment(sum(sizes.values()), sizes, "sum over the groups")
    return replace(trace, peak=max(trace.peak, moment, key=lambda peak: peak.bytes))


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
