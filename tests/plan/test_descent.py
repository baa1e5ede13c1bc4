"""Search on costs that are formulas, without traces: the descent, the rule of the allocator, and few plans."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import log2
from typing import Any

import numpy as np
import pytest

from tests.plan.test_search import LONG, composed
from titan_exp.plan.cuda.devices import Device, device_named
from titan_exp.plan.device_memory import room_of
from titan_exp.plan.search import search
from titan_exp.plan.search.estimates import Estimates
from titan_exp.plan.search.layout_cost import LayoutCost
from titan_exp.plan.search.layouts import Candidate, fixed_keys, search_space
from titan_exp.plan.search.moves import moves
from titan_exp.tracking.number_format import GIB

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
    size = 60 / candidate.shards / parallelism.tp / parallelism.pp + (1 + kept) / parallelism.tp
    size += 20 * saved * tokens / 16384 / parallelism.tp / parallelism.pp + 6 * chunk / 16384 / parallelism.tp
    peak = round(size * GIB)
    return LayoutCost(
        candidate, seconds, 0.0, peak, 0, "", room_of(layout, candidate.spec, device), round(OVERHEAD * peak), 0
    )


class ExactEstimates:
    """Estimates without errors."""

    def __init__(self, candidates: Sequence[Candidate], device: Device) -> None:
        costs = [planned(each, device) for each in candidates]
        self.seconds = self.least_seconds = np.array([cost.step_seconds for cost in costs])
        self.bytes = self.least_bytes = np.array([cost.peak_bytes for cost in costs])

    @property
    def near(self) -> np.ndarray:
        """Every estimate is good enough."""
        return np.ones(len(self.seconds), dtype=bool)

    def awaiting(self, numbers: Iterable[int]) -> np.ndarray:
        """A layout awaits its own plan; others' tell nothing more."""
        return np.isin(np.arange(len(self.seconds)), list(numbers))


def use_formulas(monkeypatch: pytest.MonkeyPatch) -> list[Candidate]:
    """Costs by formulas; returns the list of planned layouts."""
    plans = list[Candidate]()

    def plan(candidate: Candidate, device: Device) -> tuple[Candidate, Any, LayoutCost, str]:
        plans.append(candidate)
        return candidate, None, planned(candidate, device), ""

    monkeypatch.setattr(search, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(2))
    monkeypatch.setattr(search, "Estimates", ExactEstimates)
    monkeypatch.setattr(search, "_plan", plan)
    return plans


@pytest.fixture(autouse=True)
def formulas(monkeypatch: pytest.MonkeyPatch) -> list[Candidate]:
    return use_formulas(monkeypatch)


@pytest.mark.parametrize("gib", [16, 24, 40, 79])
def test_no_neighbour_of_the_best_row_is_better(gib: int, formulas: list[Candidate]):
    words = [*LONG, "parallelism.dp_replicate=1"]
    space = search_space(composed(*words), 8, fixed_keys(words))
    device = replace(device_named("h100"), memory=gib * GIB)
    result = search.LayoutSearch(space, device, 4, _say_nothing).run()
    best, *others = result.rows
    assert [row.step_seconds for row in result.rows] == sorted(row.step_seconds for row in result.rows)
    assert all(row.reserved is not None and row.reserved <= row.room for row in result.rows)
    near = [planned(moved, device) for _, moved in moves(best.candidate, space, device)]
    assert len(near) > 5
    assert best.step_seconds <= min(cost.step_seconds for cost in near if cost.fits) * (1 + 1e-9)
    # No enumerated layout that the allocator admits is faster than a row, or missing among them.
    enumerated = [planned(each, device) for each in space.candidates]
    admitted = sorted(cost.step_seconds for cost in enumerated if cost.fits)
    assert all(row.step_seconds <= other + 1e-12 for row, other in zip([best, *others], admitted, strict=False))
    assert len(formulas) < len(enumerated) / 4
    assert len(formulas) == len({candidate.identity for candidate in formulas})


def test_a_layout_awaits_a_running_trace_that_is_nearer_than_finished_ones():
    words = [*LONG, "parallelism.dp_replicate=1", "parallelism.cp=1", "parallelism.pp=1"]
    found = search_space(composed(*words), 8, fixed_keys([*words, "activation_checkpoint=full"])).candidates
    space = [replace(each, number=number) for number, each in enumerate(found)]
    estimates = Estimates(space, device_named("h100"))
    assert estimates.awaiting([0]).all(), "nothing is known without a trace"
    of_tp = {each.parallelism.tp: each.number for each in space}
    estimates._far = estimates._columns.distances(of_tp[1])
    awaiting = estimates.awaiting([of_tp[2]])
    assert awaiting[of_tp[2]]
    assert awaiting[of_tp[4]]
    assert not awaiting[of_tp[1]]
    assert not estimates.awaiting([]).any()


def test_what_the_allocator_refuses_leads_to_less_memory():
    """Where only a layout's loss is too large for the allocator, half the chunk of the loss makes it fit."""
    words = [
        *LONG,
        "training.micro_batch_size=1",
        "activation_checkpoint=none",
        "parallelism.reshard_after_forward=never",
    ]
    words += [f"parallelism.{degree}=1" for degree in ("dp_replicate", "tp", "cp", "pp")]
    space = search_space(composed(*words), 8, fixed_keys(words))
    (only,) = space.candidates
    cost = planned(only, device_named("h100"))
    room = cost.peak_bytes * 1.03  # tensors fit, and what is reserved does not
    device = replace(device_named("h100"), memory=round(room) + device_named("h100").memory - cost.room)
    (row,) = search.LayoutSearch(space, device, 4, _say_nothing).run().rows
    assert dict(row.candidate.refined) == {"training.loss_chunk_tokens": 8192}
