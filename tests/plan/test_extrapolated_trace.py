"""Extrapolated traces equal full traces in every allocation and in reserved memory."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.patching import patch
from tests.plan.layouts import experiment_of, predicted
from tests.plan.test_extrapolate import ACCUMULATED, BF16, CUDA, PIPELINES, WHOLE
from tests.ranks import run_ranks
from titan_exp.config.devices import device_type
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.typed_config import load_experiment, to_yaml
from titan_exp.plan.extrapolate.eligibility import is_worthwhile, unsupported_reason

WORKSPACE = 32 * 2**20
MANY = {
    "more micro-batches than are composed": "training.micro_batch_size=1 training.global_batch_size=24 "
    "model.layers=6 parallelism.dp_shard=2",
    "tied, no clipping, moments in 8 bits": ACCUMULATED + BF16 + "model.layers=6 parallelism.dp_shard=2 "
    "model.tied_embeddings=true training.max_grad_norm=null optimizer.state_precision=int8",
    "hsdp x tp, never resharded": BF16 + "model.layers=6 parallelism=hsdp parallelism.tp=2 training.micro_batch_size=2 "
    "parallelism.reshard_after_forward=never",
    "ddp": BF16 + "model.layers=6 parallelism=ddp training.micro_batch_size=2 optimizer.implementation=foreach",
    "interleaved x tp x cp, selective": CUDA
    + "model.layers=14 parallelism.pp=2 parallelism.tp=2 parallelism.cp=2 parallelism.pp_schedule=Interleaved1F1B "
    "parallelism.pp_microbatches=8 activation_checkpoint=selective training.loss_chunk_tokens=37",
    "averaged weights, bf16 sums": ACCUMULATED + BF16 + "model.layers=6 parallelism.dp_shard=2 weight_average=ema "
    "training.accumulation_precision=bf16",
    "pipeline, averaged weights, bf16 sums": BF16 + "model.layers=8 parallelism.pp=2 parallelism.dp_shard=2 "
    "parallelism.pp_microbatches=4 weight_average=ema training.accumulation_precision=bf16",
    "SGD with momentum": ACCUMULATED + BF16 + "optimizer=sgd model.layers=6 parallelism.dp_shard=2",
    "tied, document mask, embedding alone in a stage, in passes": BF16
    + "model.layers=8 model.tied_embeddings=true parallelism.pp=2 parallelism.pp_layers=[0,8] data.document_mask=true "
    "parallelism.pp_microbatches=2 training.micro_batch_size=1",
    "uneven stages": "model.layers=8 parallelism.pp=3 parallelism.pp_layers=[2,5,1] parallelism.pp_microbatches=4",
}
QUICK = (
    "experts x ep on CUDA, full",
    "offloaded, 1F1B x fsdp x tp, AdaGC on CUDA",
)
"""Compared each time; the others by `make night`."""
EVERY = {**WHOLE, **PIPELINES, **MANY}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.night]) for name in EVERY]
)
def test_extrapolated_allocations_equal_the_full_trace(name: str, tmp_path: Path):
    experiment = experiment_of(EVERY[name])
    assert unsupported_reason(experiment) is None
    (tmp_path / "config.yaml").write_text(to_yaml(experiment))
    beyond_limit = name == "more micro-batches than are composed"
    limit = 240.0 if "compiled" in name else 120.0  # on busy cores it compiles for minutes
    (found,) = run_ranks(1, both_ways, str(tmp_path / "config.yaml"), beyond_limit, limit=limit)
    assert len(found) == experiment.parallelism.pp * (1 if device_type(experiment.cluster) == "cuda" else 2)
    for whole, short in found:
        for quantity, value in whole.items():
            assert short[quantity] == value, quantity


def both_ways(path: str, beyond_limit: bool) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Full and extrapolated trace of each pipeline rank, on CUDA and on the run's own device."""
    from titan_exp.plan.extrapolate.extrapolated_trace import TraceExtrapolator
    from titan_exp.plan.trace.torch_patches import uses_inductor
    from titan_exp.plan.trace.trace_step import fake_rank, pipeline_ranks, trace_step

    experiment, found = load_experiment(path, trust=True), []
    devices = dict.fromkeys((True, device_type(experiment.cluster) == "cuda"))
    extrapolators = [TraceExtrapolator(experiment, cuda, WORKSPACE * cuda) for cuda in devices]
    ranks = enumerate(pipeline_ranks(ResolvedLayout.of(experiment)))
    for (number, rank), extrapolator in product(ranks, extrapolators):
        # First, since the first trace of a process allocates its constants, such as tables of 8-bit moments.
        short = extrapolator.trace(number)
        with fake_rank(experiment, rank) as fake:
            whole = trace_step(
                fake.state,
                fake.step,
                warmup_step=fake.warmup_step,
                beside=fake.exchanges,
                preallocated=fake.preallocated,
                cuda=extrapolator.cuda,
                inductor=uses_inductor(experiment.compile),
                matmul_workspace=extrapolator.matmul_workspace,
            )
        assert {axis: short.axes.get(axis, ranks) for axis, ranks in whole.axes.items()} == whole.axes
        found.append((quantities(whole, beyond_limit), quantities(short, beyond_limit)))
    return found


def quantities(trace: Any, beyond_limit: bool) -> dict[str, Any]:
    from titan_exp.plan.caching_allocator import steady_reserved

    costs = trace.costs
    found = {
        "peak": trace.peak,
        "kept": trace.persistent,
        "host": trace.host,
        "gradients": trace.gradients,
        "costs": (
            costs.flops,
            costs.bytes_moved,
            costs.host_bytes,
            costs.operators,
            dict(costs.kernels),
            dict(costs.messages),
            dict(costs.calls),
        ),
        "reserved": [steady_reserved(trace.setup_events, trace.step_events, expandable=way) for way in (False, True)],
    }
    if beyond_limit:
        return found
    return {
        **found,
        "events": named([*trace.setup_events, *trace.step_events]),
        "before": len(trace.setup_events),
        "timeline": trace.timeline,
    }


@pytest.mark.night
def test_a_micro_batch_gathers_no_parameters_for_another(tmp_path: Path):
    words = BF16 + "model.layers=4 training.micro_batch_size=1 parallelism.pp=2 parallelism.dp_shard=2 "
    words += "parallelism.reshard_after_forward=always parallelism.pp_microbatches="

    def gathered(micro_batches: int, mutate: Callable[[], None] | None = None) -> int:
        run = experiment_of(f"{words}{micro_batches} training.global_batch_size={2 * micro_batches}")
        return predicted(run, tmp_path, mutate)[-1].messages["fsdp", "all-gather"]

    assert gathered(6) == 3 * gathered(2)
    assert gathered(6, keep_forward_orders) > gathered(6)


def keep_forward_orders() -> None:
    """A mutation: FSDP2 appends the orders of all forward passes."""
    patch("titan_exp.parallel.fsdp.restart_forward_order", lambda _: lambda module: None)


def named(events: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Events with storages and streams renumbered in order of first use."""
    allocations: dict[int, int] = {}
    streams: dict[int, int] = {0: 0}
    found = []
    for number, (storage, size, on) in enumerate(events):
        if size:
            allocations[storage] = number
        stream = streams.setdefault(on, len(streams)) if size else 0
        found.append((allocations[storage], size, stream))
    return found


@pytest.mark.night
def test_extrapolated_plan_equals_the_full_plan(tmp_path: Path):
    experiment = experiment_of(
        CUDA + "model.layers=13 parallelism.pp=4 parallelism.dp_shard=2 "
        "training.global_batch_size=16 parallelism.pp_microbatches=8"
    )
    assert worthwhile(experiment, 4)
    (tmp_path / "config.yaml").write_text(to_yaml(experiment))
    ((short, full, fallen_back),) = run_ranks(1, plans, str(tmp_path / "config.yaml"), limit=240)
    assert short.pop("traced_in_full_because") is None
    assert full.pop("traced_in_full_because") is None
    assert fallen_back.pop("traced_in_full_because") == "we cannot extrapolate it: a storage is released twice"
    for plan in (short, full, fallen_back):
        assert plan.pop("planning_seconds") > 0
    assert short == full == fallen_back
    assert [rank["pipeline_rank"] for rank in short["ranks"]] == [0, 1, 2, 3]


def plans(path: str) -> list[dict[str, Any]]:
    """The same run planned by extrapolation, in full, and after a failed extrapolation."""
    from titan_exp.plan.devices import DEVICES
    from titan_exp.plan.extrapolate.extrapolated_trace import EventComposer
    from titan_exp.plan.extrapolate.schedule import ExtrapolationError
    from titan_exp.plan.predict import predict
    from titan_exp.plan.tables import plan_to_json

    def fail(*_: Any) -> None:
        raise ExtrapolationError("a storage is released twice")

    experiment, device = load_experiment(path), DEVICES["h100"]
    found = [predict(experiment, device), predict(experiment, device, full=True)]
    release, EventComposer.release = EventComposer.release, fail  # type: ignore[method-assign]
    found.append(predict(experiment, device))
    EventComposer.release = release
    return [json.loads(json.dumps(plan_to_json(plan))) for plan in found]


def worthwhile(experiment: Experiment, ranks: int) -> bool:
    return is_worthwhile(ResolvedLayout.of(experiment), experiment.activation_checkpoint, ranks)


def test_small_runs_are_traced_in_full():
    small = experiment_of("")
    assert not worthwhile(small, 1)
    deep = replace(small, model=replace(small.model, layers=64))
    assert worthwhile(deep, 1)
    pipeline = experiment_of(
        "model.layers=32 parallelism.pp=4 parallelism.pp_microbatches=8 training.global_batch_size=16"
    )
    # Extrapolation is faster for one rank and for four.
    assert [worthwhile(pipeline, ranks) for ranks in (1, 4)] == [True, True]
