"""Mutations of the planner's times and of the search's estimates, each of which a test must notice.

python -m pytest tests/parity/planner_mutations.py
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.plan import test_descent, test_estimates, test_kernel_classes, test_rates
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.search.layout_columns import LayoutColumns
from titan_exp.plan.search.search import LayoutSearch
from titan_exp.plan.time import roofline
from titan_exp.plan.trace.dispatch_mode import CostMode


def attention_has_the_rate_of_the_other_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Any = Device.attention_rates.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Device, "attention_rates", property(lambda self: plain(self)[::-1]))


def rowwise_has_the_rate_of_tensorwise(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = property(lambda self: self.gemm.get("float8_tensorwise", self.gemm["bf16"]) * 1e12)
    monkeypatch.setattr(Device, "fp8_rate", rate)


def launches_wait_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "launch_seconds", lambda self, operators, compute: operators * self.launch_us / 1e6)


def a_ring_has_one_hop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "ROUNDS", {})


def messages_have_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayoutColumns, "message_seconds", lambda self, *_: 0 * self.tp)


def the_descent_moves_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayoutSearch, "_near", lambda *_: iter(()))


def views_are_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    count = CostMode._count

    def count_all(self: CostMode, costs: Any, func: Any, flops: int, bytes_moved: int) -> None:
        costs.operators += not (flops or bytes_moved)
        count(self, costs, func, flops, bytes_moved)

    monkeypatch.setattr(CostMode, "_count", count_all)


def descent() -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_descent.test_no_neighbour_of_the_best_row_is_better(24, test_descent.use_formulas(patch))


def bytes_of_kernels() -> None:
    test_kernel_classes._bytes_of_kernels()


NOTICED: list[tuple[Callable[[], None], Callable[[pytest.MonkeyPatch], None]]] = [
    (test_rates.test_attention_has_the_rates_of_the_nearest_head_size, attention_has_the_rate_of_the_other_direction),
    (test_rates.test_fp8_matmuls_have_the_rate_of_their_recipe, rowwise_has_the_rate_of_tensorwise),
    (test_rates.test_the_slower_of_host_and_device_counts, launches_wait_for_kernels),
    (test_rates.test_messages_have_latency, a_ring_has_one_hop),
    (bytes_of_kernels, views_are_launches),
    (test_estimates.test_estimates_are_near_the_exact_costs, messages_have_no_rate),
    (descent, the_descent_moves_nowhere),
]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(("test", "mutate"), NOTICED, ids=lambda case: getattr(case, "__name__", ""))
def test_mutation_is_noticed(monkeypatch: pytest.MonkeyPatch, test: Any, mutate: Any):
    test()
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        test()
