"""Semi-synchronous training: curve and weights of a plain reference in one process, in any layout of the groups."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.extensions.replica_groups.fleet import Fleet, Mutation
from tests.extensions.replica_groups.lone_group import LoneGroup
from tests.extensions.replica_groups.semi_sync_reference import Reference, reference
from tests.parity.runs import LINES, Curve, assert_same_curve
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.typed_config import load_experiment
from titan_exp.extensions.replica_groups.config import SemiSyncConfig, semi_sync_of
from titan_exp.extensions.replica_groups.events import ReplicaGroup
from titan_exp.extensions.replica_groups.lighthouse import TORCHFT, torchft_version
from titan_exp.extensions.replica_groups.outer_optimizer import OuterOptimizer
from titan_exp.extensions.replica_groups.semi_sync import SemiSync
from titan_exp.plan.predict import predict

pytestmark = pytest.mark.skipif(torchft_version() != TORCHFT, reason=f"needs torchft {TORCHFT}")
# Rows hold several documents, so that groups predict different numbers of tokens. Three synchronizations.
SETTINGS = [*LINES, "training.steps=6", "training.global_batch_size=4", "training.micro_batch_size=1"]
SETTINGS += ["optimizer.weight_decay=0", "cluster.replica_groups=2", "semi_sync.interval=2"]
DILOCO, LOCAL_SGD = [*SETTINGS, "semi_sync=diloco"], [*SETTINGS, "semi_sync=local_sgd"]
STREAMING = [*SETTINGS, "semi_sync=streaming_diloco", "semi_sync.interval=4", "training.steps=8"]
STREAMING += ["semi_sync.fragments=2", "semi_sync.delay=1", "semi_sync.mixing=0.25"]
PLAIN = [*DILOCO, "semi_sync.outer_nesterov=false", "semi_sync.outer_lr=0.3"]
FOUR = [*DILOCO, "cluster.replica_groups=4", "semi_sync.groups=4"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reference]:
    return cache(lambda *words: reference(tmp_path_factory.mktemp("reference") / "run", *words))


def train_groups(path: Path, words: list[str], mutate: Mutation | None = None) -> Curve:
    fleet = Fleet(path, *words)
    try:
        return fleet.curve(fleet.start_all(mutate))
    finally:
        fleet.close()


def assert_same(found: Curve, expected: Reference) -> None:
    assert found.disputed == []
    assert found.loss == pytest.approx(expected.loss, rel=2e-6)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=2e-5)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("words", "layout"),
    [
        (DILOCO, ["parallelism.dp_shard=2"]),
        pytest.param(LOCAL_SGD, [], marks=pytest.mark.night),
        pytest.param(DILOCO, [], marks=pytest.mark.night),
        pytest.param(DILOCO, ["parallelism.tp=2"], marks=pytest.mark.night),
        pytest.param(DILOCO, ["parallelism.dp_shard=2", "parallelism.tp=2"], marks=pytest.mark.night),
        pytest.param(PLAIN, ["training.micro_batch_size=2"], marks=pytest.mark.night),
        pytest.param(FOUR, [], marks=pytest.mark.night),
    ],
)
def test_groups_are_the_reference(tmp_path, expected, words, layout):
    found = train_groups(tmp_path / "run", [*words, *layout])
    assert_same(found, expected(*words))
    assert len({row["participants"] for row in found.rows}) == 1
    plan = predict(load_experiment(tmp_path / "run" / "config.yaml", trust=True), None)
    # Planned per token of whole sequences, of which some predict none here.
    planned = plan.exchange.values(plan.weights)["sent_bytes_per_token"] * 2 * plan.tokens_per_step
    counts = [row["tokens"] for row in found.rows[1::2]]
    sent = [
        row["sent_bytes_per_token"] * (row["tokens"] - before)
        for row, before in zip(found.rows[1::2], [0, *counts], strict=False)
    ]
    assert sent == pytest.approx([planned] * 3, rel=1e-12)


def test_streaming_groups_are_the_reference(tmp_path, expected):
    found = train_groups(tmp_path / "run", [*STREAMING, "parallelism.dp_shard=2"])
    assert_same(found, expected(*STREAMING))
    plan = predict(load_experiment(tmp_path / "run" / "config.yaml", trust=True), None)
    sent, before = [], 0
    for row in found.rows:
        if "sent_bytes_per_token" in row:  # after the outer steps of a fragment: 2, 4, 6 and 8
            sent.append(row["sent_bytes_per_token"] * (row["tokens"] - before))
            before = row["tokens"]
    planned = plan.exchange.values(plan.weights)["sent_bytes_per_token"] * 4 * plan.tokens_per_step
    assert sent[0] + sent[1] == pytest.approx(planned, rel=1e-12)
    assert sent[2:] == pytest.approx(sent[:2], rel=1e-12)
    assert max(sent) / 4 == pytest.approx(
        plan.exchange.values(plan.weights)["sent_bytes_at_once"], rel=1e-12
    )  # of four ranks


PASSES = ["training.global_batch_size=8", "parallelism.pp=2", "parallelism.pp_microbatches=2"]
EXPERTS = [*DILOCO, "model=deepseek_debug", "model.moe.balance.bias_rate=0.01"]


@pytest.mark.parametrize(
    ("words", "layout"),
    [
        (DILOCO, PASSES),
        pytest.param(EXPERTS, ["parallelism.dp_shard=2", "parallelism.ep=2"], marks=pytest.mark.night),
        pytest.param(EXPERTS, [], marks=pytest.mark.night),
        pytest.param([*EXPERTS, "model.moe.balance.loss=global_batch"], [], marks=pytest.mark.night),
        pytest.param(EXPERTS, PASSES, marks=pytest.mark.night),
        pytest.param(STREAMING, [*PASSES, "model.tied_embeddings=true"], marks=pytest.mark.night),
        pytest.param(
            STREAMING,
            [*PASSES, "model.tied_embeddings=true", "parallelism.pp_schedule=ZBVZeroBubble"],
            marks=pytest.mark.night,
        ),
        pytest.param([*STREAMING, "model=qwen3_moe_debug"], ["parallelism.tp=2"], marks=pytest.mark.night),
    ],
)
def test_pipelines_and_experts_are_the_reference(tmp_path, expected, words, layout):
    """Groups pass their own micro-batches through a pipeline, and average the biases of routers."""
    found = train_groups(tmp_path / "run", [*words, *layout])
    assert_same(found, expected(*words, *[word for word in layout if not word.startswith("parallelism.")]))
    assert_sent_bytes_are_planned(tmp_path / "run", found)


@pytest.mark.night
def test_groups_clip_by_their_own_logits_in_every_layout(tmp_path):
    words = [*DILOCO, "optimizer=muon", "optimizer.lr=2e-3", "optimizer.eps=1e-4", "optimizer.qk_clip=0.1"]
    one = train_groups(tmp_path / "one", words)
    assert_same_curve(train_groups(tmp_path / "many", [*words, "parallelism.dp_shard=2"]), one)
    assert max(row["model/max_logit"] for row in one.rows) > 0.1


def assert_sent_bytes_are_planned(path: Path, found: Curve) -> None:
    """Bytes of the last interval, and of its largest fragment."""
    plan = predict(load_experiment(path / "config.yaml", trust=True), None)
    config, sent, before = semi_sync_of(plan.experiment), [], 0
    for row in found.rows:
        if "sent_bytes_per_token" in row:
            sent.append(row["sent_bytes_per_token"] * (row["tokens"] - before))
            before = row["tokens"]
    planned = plan.exchange.values(plan.weights)["sent_bytes_per_token"] * config.interval * plan.tokens_per_step
    assert sum(sent[-config.fragments :]) == pytest.approx(planned, rel=1e-12)


@pytest.mark.night
@pytest.mark.parametrize(
    "words",
    [
        ["parallelism.tp=2"],
        ["semi_sync.mixing=0", "semi_sync.delay=0"],
        ["semi_sync.fragments=1", "semi_sync.delay=3"],
        ["semi_sync.fragments=4", "semi_sync.delay=0", "semi_sync.mixing=0.75"],
        ["semi_sync.fragment_pattern=sequential", "semi_sync.outer_momentum=0"],
        ["cluster.replica_groups=4", "semi_sync.groups=4"],
    ],
    ids=" ".join,
)
def test_other_streams_are_the_reference(tmp_path, expected, words):
    found = train_groups(tmp_path / "run", [*STREAMING, *words])
    assert_same(found, expected(*STREAMING, *[word for word in words if not word.startswith("parallelism")]))


@pytest.mark.night
def test_one_fragment_without_delay_is_diloco_bitwise(tmp_path):
    one = ["semi_sync=streaming_diloco", "semi_sync.fragments=1", "semi_sync.delay=0", "semi_sync.mixing=0"]
    found, expected = train_groups(tmp_path / "one", [*SETTINGS, *one]), train_groups(tmp_path / "diloco", DILOCO)
    assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)
    assert all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.nn.Parameter, LoneGroup, SemiSync]:
    """Weight that has been stepped once, group, and its synchronizations."""
    monkeypatch.setattr(SemiSync, "_sum_over_ranks", lambda _, value: value)
    weight = torch.nn.Parameter(torch.randn(3))
    optimizer, group = torch.optim.SGD([weight], lr=0.1), LoneGroup()
    config = SemiSyncConfig("local_sgd", interval=2)
    mesh = SimpleNamespace(batch_replicas=1)
    sync = SemiSync(config, group, OuterOptimizer(optimizer, config), mesh, {})  # type: ignore[arg-type]
    weight.grad = torch.ones(3)
    sync.outer.before_inner_step()
    optimizer.step()
    sync.outer.after_inner_step()
    return weight, group, sync


def test_a_synchronization_without_connection_is_repeated(alone):
    weight, group, sync = alone
    before, group.connected = weight.detach().clone(), False
    sync.send(2)
    assert sync.apply(2) is None
    assert not sync.in_flight
    assert torch.equal(weight, before)
    group.connected = True
    sync.send(2)
    assert sync.apply(2) is not None
    torch.testing.assert_close(weight, before)  # the mean of one group
    assert sync.synchronized == 2


def test_a_group_that_has_healed_and_is_alone_moves_nothing(alone):
    weight, _, sync = alone
    row = {"trained": True, "values": {"loss": 3.0}, "tokens": 5, "total": 5, "row": {}}
    progress = {"synchronized": 2, "tokens": 7, "round_tokens": 5, "rows": [row]}
    sync.heal(4, progress | {"sent": 0.0, "sent_for": 0, "swapped": False})
    before = weight.detach().clone()
    sync.send(4)
    assert sync.apply(4) is not None
    assert torch.equal(weight, before)
    assert sync.rows[0].row == {"loss": 3.0, "tokens": 12}
    assert sync.tokens == 12, "the tokens of the round, which no living group has trained"


def _wrong_sign(_: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups.outer_optimizer import OuterOptimizer

    found = OuterOptimizer.pseudo_gradients
    OuterOptimizer.pseudo_gradients = lambda *words: [-gradient for gradient in found(*words)]  # type: ignore[method-assign]


def _sum_in_place_of_the_mean(_: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups.outer_optimizer import OuterOptimizer

    step = OuterOptimizer.step
    OuterOptimizer.step = lambda outer, gradients, *fragment: step(  # type: ignore[method-assign]
        outer, [2 * gradient for gradient in gradients], *fragment
    )


def _momentum_is_not_carried(_: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups.outer_optimizer import MOMENTUM, OuterOptimizer

    step = OuterOptimizer.step

    def forgetful(outer: OuterOptimizer, gradients: list[torch.Tensor], *fragment: int) -> None:
        torch._foreach_zero_(outer._state(MOMENTUM, outer.parameters()))
        step(outer, gradients, *fragment)

    OuterOptimizer.step = forgetful  # type: ignore[method-assign]


def _inner_state_is_reset(_: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups.outer_optimizer import OuterOptimizer

    step = OuterOptimizer.step

    def resetting(outer: OuterOptimizer, gradients: list[torch.Tensor], *fragment: int) -> None:
        step(outer, gradients, *fragment)
        for state in outer._optimizer.state.values():
            state["exp_avg"].zero_()

    OuterOptimizer.step = resetting  # type: ignore[method-assign]


def _local_weights_go_on(_: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups.outer_optimizer import OuterOptimizer

    OuterOptimizer.mix = lambda outer, parameters: None  # type: ignore[method-assign]


def _groups_take_the_same_share(group: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups.semi_sync import SemiSync

    SemiSync.share = lambda sync, items: items[: len(items) // 2]  # type: ignore[method-assign]


def _offsets_of_fragments_are_exchanged(_: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups.config import SemiSyncConfig

    applied = SemiSyncConfig.applied_fragment
    SemiSyncConfig.applied_fragment = lambda config, step: (  # type: ignore[method-assign]
        None if (found := applied(config, step)) is None else config.fragments - 1 - found
    )


def _applied_a_step_early(_: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups.config import SemiSyncConfig

    applied = SemiSyncConfig.applied_fragment
    SemiSyncConfig.sent_fragment = lambda config, step: applied(config, step + config.delay - 1)  # type: ignore[method-assign]


def _mixing_is_exchanged(_: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups.outer_optimizer import OuterOptimizer

    mix = OuterOptimizer.mix

    def exchanged(outer: OuterOptimizer, parameters: list[torch.Tensor]) -> None:
        mixing, outer._mixing = outer._mixing, 1 - outer._mixing
        mix(outer, parameters)
        outer._mixing = mixing

    OuterOptimizer.mix = exchanged  # type: ignore[method-assign]


def _pseudo_gradient_is_of_the_step_that_applies_it(_: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups.semi_sync import SemiSync

    apply = SemiSync.apply

    def late(sync: SemiSync, step: int) -> object:
        sync._fragment.own = None  # type: ignore[union-attr]
        sync.send(step)
        return apply(sync, step)

    SemiSync.apply = late  # type: ignore[method-assign]


@pytest.mark.night
@pytest.mark.parametrize(
    "mutate",
    [
        _offsets_of_fragments_are_exchanged,
        _applied_a_step_early,
        _mixing_is_exchanged,
        _pseudo_gradient_is_of_the_step_that_applies_it,
    ],
)
def test_a_mutation_of_the_stream_is_noticed(tmp_path, expected, mutate):
    found = train_groups(tmp_path / "run", STREAMING, mutate)
    with pytest.raises(AssertionError):
        assert_same(found, expected(*STREAMING))


def _biases_of_routers_stay_apart(_: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups import commits

    commits.persistent_buffers = lambda _: []


def _experts_are_balanced_over_the_whole_batch(_: ReplicaGroup) -> None:
    from titan_exp.trainer.updates import Routing

    Routing.shares = property(lambda _: 1, lambda *_: None)  # type: ignore[assignment]  # on purpose


def _fragments_are_counted_from_every_stage(_: ReplicaGroup) -> None:
    from titan_exp.extensions.replica_groups import outer_optimizer

    def by_stage(_: Experiment, state: Any) -> dict:
        named = [parameter for part in state.model.parts for _, parameter in part.named_parameters()]
        return {parameter: int(number > len(named) // 2) for number, parameter in enumerate(named)}

    outer_optimizer._fragments = by_stage


@pytest.mark.night
@pytest.mark.parametrize(
    ("mutate", "words", "layout"),
    [
        (_biases_of_routers_stay_apart, EXPERTS, []),
        (_experts_are_balanced_over_the_whole_batch, [*EXPERTS, "model.moe.balance.coefficient=0.1"], []),
        (_fragments_are_counted_from_every_stage, STREAMING, PASSES),
    ],
)
def test_a_mutation_of_pipelines_and_experts_is_noticed(tmp_path, expected, mutate, words, layout):
    found = train_groups(tmp_path / "run", [*words, *layout], mutate)
    with pytest.raises(AssertionError):
        assert_same(found, expected(*words, *[word for word in layout if not word.startswith("parallelism.")]))


@pytest.mark.night
def test_load_of_experts_is_that_of_all_groups(tmp_path):
    """The same in every layout of the groups, and over the tokens of the whole batch."""
    one = train_groups(tmp_path / "one", EXPERTS)
    many = train_groups(tmp_path / "many", [*EXPERTS, "parallelism.dp_shard=2", "parallelism.ep=2"])
    loads = [key for key in one.rows[0] if key.startswith("experts/")]
    assert any(key.endswith("bias_range") for key in loads)
    for row, other in zip(one.rows, many.rows, strict=True):
        assert [row[key] for key in loads] == pytest.approx([other[key] for key in loads], rel=1e-3)
    rows = [json.loads(line) for line in (tmp_path / "one" / "expert_load.jsonl").read_text().splitlines()]
    assert {sum(row["layer_1"]) for row in rows} == {4 * 64 * 4}  # sequences, tokens, experts of each
    assert [row["step"] for row in rows] == [row["step"] for row in one.rows]


@pytest.mark.night
@pytest.mark.parametrize(
    "mutate",
    [
        _wrong_sign,
        _sum_in_place_of_the_mean,
        _momentum_is_not_carried,
        _inner_state_is_reset,
        _local_weights_go_on,
        _groups_take_the_same_share,
    ],
)
def test_a_mutation_is_noticed(tmp_path, expected, mutate):
    found = train_groups(tmp_path / "run", [*DILOCO, "training.stop_on_nonfinite=false"], mutate)
    with pytest.raises(AssertionError):
        assert_same(found, expected(*DILOCO))
