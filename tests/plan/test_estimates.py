"""Rows of a search are those of an exhaustive one, and cached operators produce the same tensors."""

import json
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.plan.layouts import experiment_of
from tests.plan.test_extrapolate import BF16
from tests.plan.test_search import composed
from tests.ranks import run_ranks
from titan_exp.config.layout.axes import DEGREES
from titan_exp.config.schema.typed_config import load_experiment, to_yaml

if TYPE_CHECKING:
    from titan_exp.plan.search.layout_cost import LayoutCost


@pytest.mark.parametrize(("schedule", "stages"), [("1F1B", 1), ("Interleaved1F1B", 2), ("GPipe", 1), ("LoopedBFS", 2)])
def test_blocks_in_flight_are_those_of_the_schedule(schedule: str, stages: int):
    from titan_exp.parallel.pipeline_parallel.runtime import build_schedule
    from titan_exp.plan.search.layout_columns import in_flight

    own = tuple(range(3, 3 + stages))
    for ranks, times in ((2, 1), (2, 3), (4, 1), (4, 2), (8, 3)):
        for rank, order in enumerate(build_schedule(schedule, ranks, ranks * stages, ranks * times)):
            forward = next(place for place, action in enumerate(order) if action.kind != "F")
            held = sum(own[action.stage // ranks] for action in order[:forward])
            assert in_flight(schedule, ranks, rank, own, ranks * times) == held


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV"])
def test_blocks_in_flight_are_released_by_weight_gradients(schedule: str):
    from titan_exp.parallel.pipeline_parallel.runtime import build_schedule
    from titan_exp.plan.search.layout_columns import in_flight

    own = (3, 4)
    for ranks, times in ((2, 2), (2, 3), (4, 2)):
        for rank, order in enumerate(build_schedule(schedule, ranks, 2 * ranks, ranks * times)):
            layers = dict(zip(sorted({action.stage for action in order}), own, strict=True))
            passed: dict[tuple[int, int], int] = {}
            most = 0
            for stage, kind, microbatch in order:
                if kind == "F":
                    passed[stage, microbatch] = layers[stage]
                elif kind != "I":
                    del passed[stage, microbatch]
                most = max(most, sum(passed.values()))
            assert in_flight(schedule, ranks, rank, own, ranks * times) == most < sum(own) * ranks * times


MEMO = "model.layers=3 parallelism.dp_shard=2 parallelism.tp=2 parallelism.cp=2 activation_checkpoint=selective " + BF16


@pytest.mark.night
def test_cached_operators_equal_torch(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(to_yaml(experiment_of(MEMO)))
    ((plain, cached, size),) = run_ranks(1, both_ways, str(tmp_path / "config.yaml"))
    assert size > 100
    assert cached == plain


def both_ways(path: str) -> tuple[dict[str, object], dict[str, object], int]:
    """A trace by torch alone, one from the operator cache, and the number of cached operators."""
    from titan_exp.plan.trace import dispatch_mode
    from titan_exp.plan.trace.fake_world import fake_rank
    from titan_exp.plan.trace.op_cache import OpCache
    from titan_exp.plan.trace.trace_step import trace_step

    class EmptyCache(OpCache):
        def get(self, key: object) -> None:
            return None

    experiment, found = load_experiment(path), []
    memo = OpCache()
    for cache in (EmptyCache(), memo, memo):
        dispatch_mode._OP_CACHE = cache
        with fake_rank(experiment, 0) as fake:
            trace = trace_step(fake.state, fake.step)
        found.append({"costs": trace.costs, "kept": trace.persistent, "moments": trace.timeline})
    return found[0], found[2], sum(cached is not None for cached in memo._cached.values())


WORDS = [
    "parallelism.dp_replicate=1",
    "training.micro_batch_size=2",
    "training.global_batch_size=16",
    "model.layers=8",
]
ONE = ["parallelism.dp_replicate=1", "parallelism.cp=1", "activation_checkpoint=full"]
SEARCHED = {
    "whole units": (8, WORDS),
    "replicated units": (8, [*WORDS, "model.ffn_dim=160"]),
    "windows in every second layer": (
        4,
        ["model=gpt_oss_debug", *WORDS, "parallelism.cp=1", "parallelism.tp=1", "activation_checkpoint=full"],
    ),
    "experts": (4, ["model=qwen3_moe_debug", *WORDS, "parallelism.cp=1", "activation_checkpoint=full"]),
    "8B": (8, ["model=llama3_8b", "model.layers=16", "training.seq_len=8192", "training.global_batch_size=16", *ONE]),
    "30B with experts": (
        8,
        ["model=qwen3_30b_a3b", "model.layers=12", "training.seq_len=4096", "training.global_batch_size=64", *ONE],
    ),
}
"""GPUs and overrides of searches by name."""


@pytest.mark.night
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", SEARCHED)
def test_bounded_search_equals_exhaustive_search(name: str):
    """On devices where all, half and few layouts fit, the rows equal those of an exhaustive search."""
    done = subprocess.run(
        [sys.executable, "-c", f"from tests.plan.test_estimates import print_both; print_both({name!r})"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["all"] > (2 if "units" in name else 1) * found["planned"]
    for everything, bounded in found["rows"]:
        assert bounded == everything


@pytest.mark.night
def test_estimates_are_near_the_planned_costs():
    """From samples of the layout itself, and of one with another tp and micro-batch."""
    from titan_exp.plan.cuda.devices import device_named
    from titan_exp.plan.search.estimates import Estimates
    from titan_exp.plan.search.layouts import fixed_keys, search_space
    from titan_exp.plan.search.search import _plan

    device = device_named("h100")
    # What a pipeline of many micro-batches has sent is a part of its peak.
    pipeline = ["parallelism.pp=4", "parallelism.pp_schedule=1F1B", "training.global_batch_size=128"]
    for more, degrees, error in ((["parallelism.pp=1"], (2, 4), 0.08), (pipeline, (1, 2), 0.11)):
        words = [*SEARCHED["8B"][1], *more]
        found = search_space(composed(*words), 8, fixed_keys(words)).candidates
        found = [each for each in found if each.parallelism.tp in degrees and each.layout.micro_batch_size <= 2]
        space = [replace(each, number=number) for number, each in enumerate(found)]
        evaluated = [_plan(each, device) for each in space]
        seconds, peaks = zip(
            *((cost.step_seconds, cost.peak_bytes) for _, _, cost, _ in evaluated if cost), strict=True
        )
        assert len(space) == len(seconds) >= 4
        for own, (_, profile, cost, _) in enumerate(evaluated):
            assert profile is not None
            estimates = Estimates(space, device)
            estimates.add(profile, None)
            assert estimates.seconds[own] == pytest.approx(seconds[own], rel=0.02)
            assert estimates.bytes[own] == pytest.approx(peaks[own], rel=0.08)
            estimates = Estimates(space, device)
            estimates.add(profile, cost)
            assert estimates.seconds[own] == pytest.approx(seconds[own], rel=1e-9)
            assert estimates.seconds == pytest.approx(seconds, rel=error)
            assert estimates.bytes == pytest.approx(peaks, rel=0.08)


def described(row: "LayoutCost") -> tuple[object, ...]:
    """Layout and cost of a row."""
    parallelism, layout = row.candidate.parallelism, row.candidate.layout
    degrees = [getattr(parallelism, degree) for degree in (*DEGREES, "ep", "etp", "pp_schedule")]
    return *degrees, layout.micro_batch_size, row.candidate.mode, row.step_seconds, row.reserved


def print_both(name: str) -> None:
    """Rows of an exhaustive and of bounded searches on three devices, as JSON. Both have enumerated layouts only."""
    from titan_exp.plan.cuda.devices import device_named
    from titan_exp.plan.planner_processes import start_forkserver
    from titan_exp.plan.search.layout_cost import planned_cost
    from titan_exp.plan.search.layouts import fixed_keys, search_space
    from titan_exp.plan.search.search import LayoutSearch, _plan, _start_worker

    def quiet(_: str) -> None:
        return

    gpus, words = SEARCHED[name]
    space = search_space(composed(*words), gpus, fixed_keys(words))
    device = device_named("h100")
    candidates = LayoutSearch(space, device, 0, quiet)._candidates
    with ProcessPoolExecutor(2, start_forkserver(), _start_worker) as pool:
        evaluated = list(pool.map(_plan, candidates, repeat(device)))
    costs = sorted((cost for _, _, cost, _ in evaluated if cost is not None), key=lambda cost: cost.step_seconds)
    peaks = sorted(cost.peak_bytes + device.memory - cost.room for cost in costs)
    rows, planned = [], []
    for place, limit in ((-1, 2), (len(peaks) // 2, 3), (len(peaks) // 8, 3)):
        small = replace(device, memory=round(peaks[place] * 1.05))  # the allocator reserves more
        search = LayoutSearch(space, small, limit, quiet)
        near = search._near
        search._near = lambda start, near=near: (moved for moved in near(start) if moved.number >= 0)  # type: ignore[method-assign]
        result = search.run()
        tried = (planned_cost(cost.candidate, small)[0] for cost in costs if cost.peak_bytes <= small.memory)
        fastest = islice((cost for cost in tried if cost.fits), limit)
        rows.append([[described(row) for row in found] for found in (fastest, result.rows)])
        planned.append(result.planned)
    print(json.dumps({"rows": rows, "all": len(costs), "planned": min(planned)}))
