"""Step observer: order of its callbacks in a step."""

import pytest
from torch import Tensor

from tests.plan.layouts import experiment_of
from titan_exp.config.layout.pipeline_schedules import Action
from titan_exp.parallel.step_observer import StepObserver, observe_steps, step_observer
from titan_exp.plan.trace.trace_step import fake_rank


class Recorder(StepObserver):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def microbatch_begin(self, index: int) -> None:
        self.calls.append(f"micro-batch {index}")

    def action_begin(self, action: Action) -> None:
        self.calls.append(f"begin {action}")

    def action_end(self, action: Action, result: Tensor | None) -> None:
        self.calls.append(f"end {action}")

    def stage_reduction_begin(self, stage: int) -> None:
        self.calls.append(f"reduce {stage}")

    def group_reduction_begin(self) -> None:
        self.calls.append("group")

    def stage_reduction_end(self) -> None:
        self.calls.append("reduced")

    def gradients_ready(self, parts: object) -> None:
        self.calls.append("gradients")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("training.micro_batch_size=1 training.global_batch_size=2", ["micro-batch 0", "micro-batch 1", "gradients"]),
        (
            "parallelism.pp=2 parallelism.dp_shard=2 parallelism.pp_microbatches=2 training.global_batch_size=4 "
            "training.micro_batch_size=1 model.layers=2",
            [f"{edge} {action}" for action in ("0F0", "0F1", "0B0", "0B1") for edge in ("begin", "end")]
            + ["reduce 0", "group", "group", "reduced", "gradients"],
        ),
    ],
)
def test_callbacks_are_in_the_order_of_the_step(overrides: str, expected: list[str]):
    recorder = Recorder()
    with fake_rank(experiment_of(overrides), 0) as fake, observe_steps(recorder):
        fake.step()
    assert recorder.calls == expected
    assert step_observer() is not recorder
