"""Steps of many micro-batches, planned by few: all of them but the first and the last take the same.

So memory is that of three micro-batches, and work grows by the same amount with each further one. With a pipeline the
micro-batches overlap, and all of them are planned.
"""

from dataclasses import replace
from typing import Any

from titan_exp.config.experiment import Experiment
from titan_exp.config.layout import data_parallel_degree, gradient_accumulation, micro_batch_size
from titan_exp.plan.devices import Device

FEW = 3
"""Micro-batches whose peak is that of any larger number."""


def shortened(experiment: Experiment, micro_batches: int = FEW) -> Experiment:
    """The run with at most so many micro-batches in a step, where there is no pipeline."""
    if experiment.parallelism.pp > 1 or gradient_accumulation(experiment) <= micro_batches:
        return experiment
    size = micro_batch_size(experiment)
    together = micro_batches * size * data_parallel_degree(experiment)
    training = replace(experiment.training, micro_batch_size=size, global_batch_size=together)
    return replace(experiment, training=training)


def plan_rank(experiment: Experiment, device: Device | None, rank: int) -> dict[str, Any]:
    """The plan of a pipeline rank as `plan.report.as_json` has it; many micro-batches are extended from few.

    Raises:
        UserError: something of it is not modelled.
    """
    from titan_exp.plan.predict import predict
    from titan_exp.plan.report import as_json
    from titan_exp.plan.roofline import RankTime, step_time

    number = gradient_accumulation(experiment)
    if experiment.parallelism.pp > 1 or number <= 2 * FEW - 1:
        return as_json(predict(experiment, device, (rank,)))
    few = predict(shortened(experiment), device, (rank,))
    found, fewer = as_json(few), as_json(predict(shortened(experiment, FEW - 1), device, (rank,)))
    (here,), (there,) = found["ranks"], fewer["ranks"]

    def extended(more: float, less: float) -> float:
        return more + (number - FEW) * (more - less)

    # The batches themselves wait from the beginning of the step.
    batches = (number - FEW) * max(0, here["peak_by_category"]["other"] - there["peak_by_category"]["other"])
    here["peak_by_category"] = {**here["peak_by_category"], "other": here["peak_by_category"]["other"] + batches}
    here["peak_allocated_bytes"] += batches
    for name in ("flops", "operators"):
        here[name] = round(extended(here[name], there[name]))
    for message, other in zip(here["messages"], there["messages"], strict=True):
        for name in ("bytes", "calls"):
            message[name] = round(extended(message[name], other[name]))
    if here["seconds"] is not None:
        seconds = {name: extended(value, there["seconds"][name]) for name, value in here["seconds"].items()}
        here["seconds"] = seconds
        few = replace(few, experiment=experiment, step_seconds=step_time(experiment, [RankTime(**seconds)])[1])
        found |= {
            "step_seconds": few.step_seconds,
            "tokens_per_second_per_device": few.tokens_per_second,
            "mfu": few.mfu,
            "gpu_hours": few.gpu_hours,
        }
    return found
