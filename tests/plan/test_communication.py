"""Lifetime of sent hidden states in a pipeline: until the send is seen to be complete."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from titan_exp.config.devices import offered_devices
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.pipeline_schedules import Action
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.parallel.pipeline_runtime import ActivationSpec, P2POp, P2PQueue, P2PTransport
from titan_exp.plan.devices import device_named
from titan_exp.plan.extrapolate.schedule import KINDS, _simulate
from titan_exp.plan.predict import Plan, predict
from titan_exp.plan.tables import print_plan
from titan_exp.rules import check

MICROBATCHES = 8
HIDDEN = 2 * 128 * 64 * 2
"""Bytes of hidden states: two rows of 128 tokens, 64 numbers in bf16."""


def planned(microbatches: int) -> Plan:
    words = [
        "model=llama_debug",
        "cluster=slurm_h100",
        "compile=none",
        "training.seq_len=128",
        "training.mixed_precision=bf16",
        "training.micro_batch_size=2",
        f"training.global_batch_size={2 * microbatches}",
        "parallelism.dp_shard=1",
        "parallelism.pp=2",
        f"parallelism.pp_microbatches={microbatches}",
    ]
    experiment = to_experiment(compose(words))
    return predict(resolve_layout(check(experiment), offered_devices(experiment.cluster)), device_named("h100"))


@pytest.mark.parametrize(("sends_complete", "expected"), [(False, MICROBATCHES), (True, 1)])
def test_first_rank_holds_sent_activations(sends_complete: bool, expected: int):
    schedule = "1F1B", 2, 2, MICROBATCHES
    simulation = _simulate(schedule, (0, 1), 0, 1, sends_complete=sends_complete, resharded=False)
    assert simulation.sent == MICROBATCHES
    # When the last backward pass begins, its own forward pass is the only one that is still needed.
    made, last = set[int](), len(simulation.actions) - 1
    for event in simulation.events:
        if (event.what, event.which) == ("begin", last):
            break
        if event.what == "allocate" and KINDS[event.kind] == "made":
            made.add(event.which)
        elif event.what == "release":
            made.discard(event.which)
    assert simulation.actions[last].action.kind == "B"
    assert len(made) == expected


@pytest.mark.night
def test_plan_counts_all_sends_of_a_pass(capsys: pytest.CaptureFixture[str]):
    few, many = planned(4), planned(MICROBATCHES)
    rank, other = many.ranks[0], few.ranks[0]
    assert rank.sent == MICROBATCHES * HIDDEN
    # A micro-batch more is one hidden state more, and its tokens and labels; 1F1B holds no more of anything else.
    batch = 2 * 2 * 128 * 8
    grown = rank.trace.peak.bytes - other.trace.peak.bytes
    assert (MICROBATCHES - 4) * HIDDEN <= grown <= (MICROBATCHES - 4) * (HIDDEN + HIDDEN + batch)
    print_plan(many)
    said = capsys.readouterr().out
    assert "are sent activations" in said
    assert "256 KiB" in said


def test_complete_sends_are_waited_for_at_once(monkeypatch: pytest.MonkeyPatch):
    """NCCL's work releases the tensor when it is waited for, so a complete send must not keep it."""
    waited: list[int] = []

    def send(*_: Any, **__: Any) -> Any:
        number = len(works)
        works.append(SimpleNamespace(is_completed=lambda: number == 0, wait=lambda: waited.append(number)))
        return works[-1]

    works: list[Any] = []
    monkeypatch.setattr(dist, "isend", send)
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    group: Any = None
    mail = P2PQueue(P2PTransport(group, ActivationSpec((1,), torch.float32, torch.device("cpu"))))
    for number in range(3):
        action = Action(0, "F", number)
        mail.put(action, torch.zeros(1))
        mail.exchange(P2POp(True, 1, action))
    assert waited == [0]
    mail.close()
    assert waited == [0, 1, 2]
