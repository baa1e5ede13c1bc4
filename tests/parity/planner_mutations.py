"""Mutations of the planner's times and of the search's estimates, each of which a test must notice.

python -m pytest tests/parity/planner_mutations.py
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.plan import (
    test_descent,
    test_extrapolate,
    test_extrapolated_trace,
    test_graph_capture,
    test_grouped_casts,
    test_kernel_classes,
    test_mem_efficient_attention,
    test_rates,
    test_symmetric_messages,
    test_unroll,
)
from tests.plan.layouts import experiment_of
from tests.ranks import run_ranks
from titan_exp.config.schema.typed_config import to_yaml
from titan_exp.plan import predict, roofline
from titan_exp.plan.devices import Device
from titan_exp.plan.extrapolate import eligibility, optimizer_step, schedule
from titan_exp.plan.extrapolate.extrapolated_trace import EventComposer
from titan_exp.plan.extrapolate.schedule import ExtrapolationError, _SampledActions
from titan_exp.plan.layout_search import LayoutCost, LayoutSearch
from titan_exp.plan.trace import dispatch_mode, op_costs
from titan_exp.plan.trace.dispatch_mode import CostMode
from titan_exp.plan.trace.segments import SegmentTracker
from titan_exp.plan.trace.trace_step import FakeRecorder
from titan_exp.quantization import recipes
from titan_exp.tracking.run_folder.files import temporary_folder


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


def memory_has_no_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayoutCost, "priced_rank", LayoutCost.rank)


def periods_need_not_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_step, "_continues", lambda *_: True)


def the_descent_moves_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayoutSearch, "_near", lambda *_: iter(()))


def views_are_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    count = CostMode._count

    def count_all(self: CostMode, func: Any, flops: int, bytes_moved: int, *, on_host: bool) -> None:
        self.costs.operators += not (flops or bytes_moved)
        count(self, func, flops, bytes_moved, on_host=on_host)

    monkeypatch.setattr(CostMode, "_count", count_all)


def modules_in_fp32_are_matched_as_in_the_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    match = eligibility._matching
    monkeypatch.setattr(eligibility, "_REPETITIONS", {})
    monkeypatch.setattr(
        eligibility, "_matching", lambda names, prefix, patterns: match(names, prefix and "blocks.0.", patterns)
    )


def tied_gradients_are_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SegmentTracker, "tied_sum_begin", lambda self: None)


def a_step_has_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Any = schedule._simulate
    monkeypatch.setattr(schedule, "_simulate", lambda *args, **flags: plain(*args[:3], 1, **flags))


def a_second_backward_pass_repeats_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    following: Any = _SampledActions.next

    def repeated(actions: _SampledActions, kind: str) -> int:
        is_second = actions._seen.count(kind) == 1
        return 0 * following(actions, kind) if is_second and kind != "F" else following(actions, kind)

    plain: Any = schedule._simulate
    monkeypatch.setattr(schedule, "_simulate", plain.__wrapped__)
    monkeypatch.setattr(_SampledActions, "next", repeated)


def storages_belong_to_the_micro_batch_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def before(self: EventComposer, sample: Any, site: Any, *at: Any) -> list[int | None]:
        return [self._micro(sample, site.position, *at)]

    monkeypatch.setattr(EventComposer, "_micros", before)


def the_last_stage_has_no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eligibility, "last_blocks", lambda experiment: 0)


def last_layers_repeat_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = eligibility.repetition
    monkeypatch.setattr(eligibility, "repetition", lambda experiment: plain(experiment)._replace(last=0))


def parameter_groups_keep_their_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Any = eligibility.with_layers
    monkeypatch.setattr(
        eligibility, "with_layers", lambda run, layers: replace(plain(run, layers), optimizer=run.optimizer)
    )


def the_first_of_a_kind_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eligibility, "sampled_edge", lambda experiment: 3)


def a_list_names_flash_attention_for_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = predict.with_run_kernels
    monkeypatch.setattr(predict, "with_run_kernels", lambda *run: replace(plain(*run), kernel="flash"))


def tied_pipeline_in_passes() -> None:
    _compare("tied, document mask, embedding alone in a stage, in passes")


def split_pipeline() -> None:
    _compare("DualPipeV")


def resharded_pipeline() -> None:
    _compare("interleaved, resharded but for last blocks")


def pipeline_with_modules() -> None:
    _compare("multi-token prediction, 1F1B x ep on CUDA")


def last_layers_in_high_precision() -> None:
    _compare("MXFP8 but for the last two layers, AdaGC, accumulated")


def frozen_layers() -> None:
    _compare("embedding, first layers and last attention frozen, limited norm of the head, accumulated")


def pipeline_of_kinds_in_turn() -> None:
    _compare("dense layers and layers with experts in turn, 1F1B x ep on CUDA")


def _compare(name: str) -> None:
    """Compare the allocations of every rank in this process."""
    with temporary_folder() as folder:
        (folder / "config.yaml").write_text(to_yaml(experiment_of(test_extrapolated_trace.EVERY[name])))
        try:
            found = test_extrapolated_trace.both_ways(str(folder / "config.yaml"), False)
        except ExtrapolationError as error:
            raise AssertionError from error
    assert all(short[quantity] == value for whole, short in found for quantity, value in whole.items())


def descent() -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_descent.test_no_neighbour_of_the_best_row_is_better(24, test_descent.use_formulas(patch))


def attention_of_a_list() -> None:
    test_mem_efficient_attention.test_a_list_of_saved_operators_names_the_attention_of_the_run("auto", "cudnn", "flash")


def bytes_of_kernels() -> None:
    test_kernel_classes._bytes_of_kernels()


def messages_beside_matmuls_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "seconds_beside", lambda *_: float("inf"))


def waits_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_mode, "_WAIT", None)


def symmetric_messages() -> None:
    # In a process of its own, where shapes are not checked, which no compiler could follow.
    test_symmetric_messages.compare(*run_ranks(1, test_symmetric_messages.plain_and_fused))


def experts_are_padded_to_another_multiple(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(recipes.GROUPED_MULTIPLE, "float8_rowwise", 32)


def experts_in_float8() -> None:
    run = "model.layers=2 quantization=float8_rowwise", True
    test_grouped_casts.check_experts([test_grouped_casts.planned("h100", run)], 16)


def all_room_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_costs, "filled_share", lambda *_: None)


def replays_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = FakeRecorder.record
    monkeypatch.setattr(FakeRecorder, "record", lambda *given: replace(plain(*given), replay=lambda: None))


def exchanges() -> None:
    test_symmetric_messages.compare_exchanges(test_symmetric_messages.exchanged_twice())


def gathered() -> None:
    test_symmetric_messages.check_gathered(test_symmetric_messages.gathered())


NOTICED: list[tuple[Callable[[], None], Callable[[pytest.MonkeyPatch], None]]] = [
    (test_rates.test_attention_has_the_rates_of_the_nearest_head_size, attention_has_the_rate_of_the_other_direction),
    (test_rates.test_fp8_matmuls_have_the_rate_of_their_recipe, rowwise_has_the_rate_of_tensorwise),
    (test_rates.test_the_slower_of_host_and_device_counts, launches_wait_for_kernels),
    (test_rates.test_messages_have_latency, a_ring_has_one_hop),
    (
        test_extrapolate.test_layers_are_alike_if_their_recipe_and_fp32_modules_are,
        modules_in_fp32_are_matched_as_in_the_first_layer,
    ),
    (bytes_of_kernels, views_are_launches),
    (partial(test_unroll.test_a_deep_sequence_follows_from_three_shallow_ones, 50), periods_need_not_continue),
    (tied_pipeline_in_passes, tied_gradients_are_not_summed),
    (tied_pipeline_in_passes, a_step_has_one_pass),
    (split_pipeline, a_second_backward_pass_repeats_the_first),
    (resharded_pipeline, a_second_backward_pass_repeats_the_first),
    (resharded_pipeline, storages_belong_to_the_micro_batch_before),
    (pipeline_with_modules, the_last_stage_has_no_modules),
    (last_layers_in_high_precision, last_layers_repeat_the_others),
    (frozen_layers, parameter_groups_keep_their_patterns),
    (pipeline_of_kinds_in_turn, the_first_of_a_kind_is_repeated),
    (descent, the_descent_moves_nowhere),
    (descent, memory_has_no_price),
    (symmetric_messages, messages_beside_matmuls_are_free),
    (gathered, waits_copy),
    (exchanges, all_room_is_filled),
    (test_graph_capture.test_replays_compute_as_much_as_passes_and_launch_nothing, replays_are_free),
    (experts_in_float8, experts_are_padded_to_another_multiple),
    (attention_of_a_list, a_list_names_flash_attention_for_every_kernel),
]


@pytest.mark.parametrize(("test", "mutate"), NOTICED, ids=lambda case: getattr(case, "__name__", ""))
def test_mutation_is_noticed(monkeypatch: pytest.MonkeyPatch, test: Any, mutate: Any):
    test()
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        test()
