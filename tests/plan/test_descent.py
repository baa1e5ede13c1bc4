"""Search on costs that are formulas, without traces: the descent, the rule of the allocator, and few plans."""

import os
import signal
import time
from concurrent.futures import Future
from dataclasses import replace
from itertools import product
from math import log2

import pytest

from tests.plan.test_search import LONG, composed
from titan_exp.plan import layout_search
from titan_exp.plan.devices import Device, device_named, room_of
from titan_exp.plan.layout_search import LayoutCost
from titan_exp.plan.layouts import (
    MICRO_BATCH,
    MODE,
    MODES,
    Candidate,
    SearchSpace,
    _degrees,
    fixed_keys,
    micro_batches,
    moves,
    with_values,
)
from titan_exp.rules import violations
from titan_exp.tracking.display import GIB

OVERHEAD = 1.06
"""Reserved memory over that of tensors."""
RESHARDING = {"always": 0, "all_but_last": 1, "never": 2}


def _say_nothing(line: str) -> None:
    pass


def planned(candidate: Candidate, device: Device) -> LayoutCost:
    """Cost of a layout: more memory is faster, messages and small micro-batches are slower."""
    own, layout, parallelism = candidate.experiment.activation_checkpoint, candidate.layout, candidate.parallelism
    partly = 0.2 + 0.7 * own.budget
    saved = {"none": 1.0, "full": 0.1, "every_n": 1 - 0.9 / own.every, "selective": partly, "budget": partly}[own.mode]
    tokens = layout.micro_batch_size * layout.training.seq_len // parallelism.cp
    chunk, kept = min(tokens, layout.loss_chunk_tokens or tokens), RESHARDING[layout.reshard_policy]
    seconds = (1.3 - 0.3 * saved) * (1 + 0.3 / layout.micro_batch_size) * (1 + 200 / chunk) * (1.03 - kept / 100)
    seconds *= 1 + 0.06 * log2(parallelism.tp) + 0.1 * log2(parallelism.cp) + 0.2 * log2(parallelism.pp)
    seconds *= {"ring": 1.0, "allgather": 0.99, "ulysses": 0.97}[parallelism.cp_method] if parallelism.cp > 1 else 1.0
    shards = parallelism.dp_shard * parallelism.cp
    size = 60 / shards / parallelism.tp / parallelism.pp + (1 + kept) / parallelism.tp
    size += 20 * saved * tokens / 16384 / parallelism.tp / parallelism.pp + 6 * chunk / 16384 / parallelism.tp
    peak, room = round(size * GIB), room_of(layout, candidate.spec, device)
    return LayoutCost(candidate, seconds, 0.0, peak, 0, "", room, round(OVERHEAD * peak), 0)


class Here(layout_search.PlannerProcesses):
    """Calls functions in this process."""

    def submit(self, function, *args):  # type: ignore[no-untyped-def]
        future = Future()
        future.set_result(function(*args))
        return future


def use_formulas(monkeypatch: pytest.MonkeyPatch) -> list[Candidate]:
    """Costs by formulas; returns the list of planned layouts."""
    plans = list[Candidate]()

    def plan(candidate: Candidate, device: Device) -> LayoutCost:
        plans.append(candidate)
        return planned(candidate, device)

    monkeypatch.setattr(layout_search, "PlannerProcesses", Here)
    monkeypatch.setattr(layout_search, "_plan", plan)
    return plans


@pytest.fixture(autouse=True)
def formulas(monkeypatch: pytest.MonkeyPatch) -> list[Candidate]:
    return use_formulas(monkeypatch)


def enumerated(space: SearchSpace) -> list[Candidate]:
    """Every product of degrees, modes of recomputation and micro-batches that breaks no rule."""
    found = []
    for degrees in _degrees(space.run.parallelism, space.gpus, space.fixed):
        rows = space.run.training.global_batch_size // (degrees["dp_replicate"] * degrees["dp_shard"])
        values = {f"parallelism.{key}": value for key, value in degrees.items()}
        typed = space.run.training.micro_batch_size, space.run.activation_checkpoint.mode
        sizes = [typed[0]] if MICRO_BATCH in space.fixed else micro_batches(rows)
        for mode, size in product([typed[1]] if MODE in space.fixed else MODES, sizes):
            more = {MODE: mode, MICRO_BATCH: size}
            found.append(space.candidate(with_values(space.run, values | more)))
    return [each for each in found if not violations(each.experiment)]


@pytest.mark.parametrize("gib", [16, 24, 40, 79])
def test_no_neighbour_of_the_best_row_is_better(gib: int, formulas: list[Candidate]):
    words = [*LONG, "parallelism.dp_replicate=1"]
    space = SearchSpace(composed(*words), 8, fixed_keys(words))
    device = replace(device_named("h100"), memory=gib * GIB)
    result = layout_search.LayoutSearch(space, device, 4, _say_nothing).run()
    best = result.rows[0]
    assert [row.step_seconds for row in result.rows] == sorted(row.step_seconds for row in result.rows)
    assert all(row.reserved is not None and row.reserved <= row.room for row in result.rows)
    found = moves(best.candidate.experiment, space.fixed, typed=space.run)
    near = [space.candidate(move.experiment) for move in found if not violations(move.experiment)]
    costs = [planned(each, device) for each in near]
    assert len(costs) > 5
    assert best.step_seconds <= min(cost.step_seconds for cost in costs if cost.fits) * (1 + 1e-9)
    # No layout of the first keys that the allocator admits is much faster.
    layouts = enumerated(space)
    admitted = [cost.step_seconds for each in layouts if (cost := planned(each, device)).fits]
    assert best.step_seconds <= 1.03 * min(admitted)
    assert result.planned == len(formulas) == len({candidate.identity for candidate in formulas})
    assert len(formulas) < len(layouts) / 2


def test_what_the_allocator_refuses_leads_to_less_memory():
    """Where only a layout's loss is too large for the allocator, half the chunk of the loss makes it fit."""
    words = [
        *LONG,
        "training.micro_batch_size=1",
        "activation_checkpoint=none",
        "parallelism.reshard_after_forward=never",
    ]
    words += [f"parallelism.{degree}=1" for degree in ("dp_replicate", "tp", "cp", "pp")]
    space, device = SearchSpace(composed(*words), 8, fixed_keys(words)), device_named("h100")
    (only,) = enumerated(space)
    cost = planned(only, device)
    room = cost.peak_bytes * 1.03  # tensors fit, and what is reserved does not
    device = replace(device, memory=round(room) + device.memory - cost.room)
    (row,) = layout_search.LayoutSearch(space, device, 4, _say_nothing).run().rows
    assert dict(row.candidate.refined) == {"training.loss_chunk_tokens": 8192}


@pytest.mark.parametrize("way", ["limit", "signal"])
def test_a_stopped_search_has_the_rows_planned_so_far(way: str, monkeypatch: pytest.MonkeyPatch):
    """The limit counts from the start of the command; SIGTERM ends a search as Ctrl-C does."""
    plans = list[Candidate]()

    def plan(candidate: Candidate, device: Device) -> LayoutCost:
        plans.append(candidate)
        if way == "limit":
            time.sleep(0.2)
        elif len(plans) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return planned(candidate, device)

    monkeypatch.setattr(layout_search, "_plan", plan)
    space, before = SearchSpace(composed(*LONG), 8), signal.getsignal(signal.SIGTERM)
    began = time.perf_counter()
    limits = (60.0, began - 59) if way == "limit" else (None, None)
    result = layout_search.LayoutSearch(space, device_named("h100"), 4, _say_nothing).run(*limits)
    assert result.stopped
    assert result.rows
    assert len(plans) < 10
    assert time.perf_counter() - began < 10
    assert signal.getsignal(signal.SIGTERM) is before
