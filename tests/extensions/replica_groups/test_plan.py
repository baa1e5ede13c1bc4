"""Plan of replica groups: one group's share of a step, and what the groups send each other."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.extensions.replica_groups.fleet import Fleet
from tests.extensions.replica_groups.test_replica_groups import SETTINGS, SHARDED, STEPS
from tests.plan.layouts import experiment_of
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import share_of_world
from titan_exp.config.schema.typed_config import load_experiment
from titan_exp.extensions.replica_groups.events import ReplicaGroup
from titan_exp.extensions.replica_groups.lighthouse import TORCHFT, torchft_version
from titan_exp.models.spec.lookup import model_spec
from titan_exp.plan.devices import DEVICES
from titan_exp.plan.gate import check_memory
from titan_exp.plan.layout_search import LayoutCost
from titan_exp.plan.layouts import Candidate
from titan_exp.plan.predict import Plan, predict
from titan_exp.plan.predictions import cache_key

pytestmark = pytest.mark.skipif(torchft_version() != TORCHFT, reason=f"needs torchft {TORCHFT}")
WORDS = "training.micro_batch_size=1 "
GROUPS = WORDS + "cluster.replica_groups={} "
DEVICE = replace(DEVICES["h100"], network_gbs=0.5, host_gbs=1.0)


def flops(plan: Plan) -> float:
    return plan.ranks[0].trace.costs.flops


@cache
def alone() -> Plan:
    return predict(experiment_of(WORDS), None)


@pytest.mark.parametrize(("groups", "micro_batches"), [(3, 3), pytest.param(8, 1, marks=pytest.mark.night)])
def test_a_group_computes_its_share(groups: int, micro_batches: int):
    whole, plan = alone(), predict(experiment_of(GROUPS.format(groups)), None)
    assert flops(plan) == pytest.approx(flops(whole) * micro_batches / 8, rel=0.01)
    assert plan.layout.gradient_accumulation == micro_batches
    assert (plan.layout.devices, plan.tokens_per_step) == (groups, whole.tokens_per_step)
    held, expected = (found.ranks[0].trace.persistent for found in (plan, whole))
    assert (held["parameters"], held["optimizer"]) == (expected["parameters"], expected["optimizer"])


def test_a_search_ranks_layouts_of_one_group():
    experiment = experiment_of(GROUPS.format(2))
    candidate = Candidate(experiment, model_spec(experiment.model))
    assert (candidate.layout.gradient_accumulation, candidate.layout.devices) == (4, 2)
    cost = LayoutCost(candidate, 2.0, 0.0, 0, 0, "", 1, 0, 0)
    assert cost.tokens_per_second == alone().tokens_per_step / 2.0 / 2


def test_whole_passes_of_a_pipeline_are_divided():
    words = GROUPS.format(2) + "parallelism.pp=2 parallelism.pp_microbatches=2 training.global_batch_size=12"
    group = share_of_world(experiment_of(words)).training
    assert (group.global_batch_size, group.micro_batch_size) == (6, 1)
    (smaller,) = {share_of_world(experiment_of(f"{words} training.batch_ramp=[[3,8]]")).training.global_batch_size}
    assert smaller == 6


def _writes_sent_bytes(_: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups.groups import ReplicaGroups

    commit, all_reduce, sent = ReplicaGroups.commit, ReplicaGroups.all_reduce, list[float]()

    def counted(groups: ReplicaGroups, tensors: list) -> float:
        sent.append(all_reduce(groups, tensors))
        return sent[-1]

    def committed(groups: ReplicaGroups, step: int) -> bool:
        path = groups._folder.path / f"sent-{groups.group.number}-{dist.get_rank()}"
        path.write_text(json.dumps(sent))
        return commit(groups, step)

    ReplicaGroups.all_reduce, ReplicaGroups.commit = counted, committed  # type: ignore[method-assign]


@pytest.mark.parametrize("words", [SETTINGS, pytest.param(SHARDED, marks=pytest.mark.night)], ids=["one", "two ranks"])
def test_sent_bytes_are_those_of_a_run(tmp_path: Path, words: list[str]):
    fleet = Fleet(tmp_path, *words, "cluster.min_groups=2")
    try:
        fleet.curve(fleet.start_all(_writes_sent_bytes))
    finally:
        fleet.close()
    plan = predict(load_experiment(tmp_path / "config.yaml", trust=True), None)
    found = [sum(json.loads(path.read_text())) for path in tmp_path.glob("sent-*")]
    assert len(found) == plan.layout.devices
    assert sum(found) == plan.exchange.values(plan.weights)["sent_bytes_per_token"] * plan.tokens_per_step * STEPS


def cuda(words: str) -> Experiment:
    slurm = "cluster=slurm cluster.device=cuda compile=none cluster.gpus_per_node=8 cluster.gpu_type=h100 "
    slurm += "training.mixed_precision=bf16 "
    return experiment_of(slurm + words)


@pytest.mark.parametrize(
    ("method", "steps"),
    [("", 1), ("semi_sync=diloco training.steps=100 semi_sync.interval=10", 10)],
)
def test_a_step_waits_for_the_sums(method: str, steps: int):
    alone, plan = predict(cuda(WORDS), DEVICE), predict(cuda(GROUPS.format(2) + method), DEVICE)
    sent, time = plan.ranks[0].trace.persistent["parameters"], plan.ranks[0].time
    assert time is not None
    assert alone.ranks[0].time is not None
    assert alone.ranks[0].time.exchange == 0
    # One of two groups sends as much as it sums, and copies it to the host and back.
    seconds = sent / DEVICE.link_share * (1 / 0.5e9 + 2 / (DEVICE.host_gbs * 1e9)) / steps
    assert time.exchange == pytest.approx(seconds, rel=0.2)
    assert time.exchange > 0.9 * seconds  # and latency
    assert plan.step_seconds == time.total
    assert time.total == pytest.approx(replace(time, exchange=0.0).total + time.exchange)
    assert plan.tokens_per_second == pytest.approx(plan.tokens_per_step / time.total / 2)


def test_a_fragment_in_flight_is_hidden_by_the_steps_behind():
    words = (
        GROUPS.format(2) + "semi_sync=streaming_diloco training.steps=100 semi_sync.interval=10 semi_sync.fragments=2 "
    )
    waits, hidden = (predict(cuda(f"{words} semi_sync.delay={delay}"), DEVICE).ranks[0].time for delay in (0, 4))
    assert waits is not None
    assert hidden is not None
    assert waits.exchange > 0
    assert hidden.exchange == 0


def test_the_sum_may_be_the_peak_on_a_cpu():
    words = WORDS + "training.seq_len=8 cluster.replica_groups={} training.max_grad_norm=null"
    alone, plan = (predict(experiment_of(words.format(groups)), None).ranks[0].trace for groups in (1, 2))
    held = sum(plan.persistent.values())
    assert plan.peak.bytes == pytest.approx(held + 2 * plan.gradients, rel=1e-6)
    assert plan.peak.where == "sum over the groups"
    assert plan.peak.bytes > alone.peak.bytes


def test_predictions_of_other_groups_are_not_taken_for_these():
    assert len({cache_key(experiment_of(GROUPS.format(groups)), None) for groups in (1, 2, 3)}) == 3


def test_all_groups_share_the_memory_of_this_machine(tmp_path: Path):
    one, two = (
        check_memory([experiment_of(f"{GROUPS.format(groups)} plan.predict=always")], tmp_path)[0].needed
        for groups in (1, 2)
    )
    assert one is not None
    assert two is not None
    assert two > 1.7 * one
