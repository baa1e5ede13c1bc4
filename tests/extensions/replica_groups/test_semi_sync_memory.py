"""Predicted memory of semi-synchronous training equals allocations of real tensors, with a fragment in flight."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.extensions.replica_groups.lone_group import LoneGroup
from tests.patching import patch
from tests.plan.layouts import allocated_peaks, experiment_of, predicted
from tests.plan.test_extrapolated_trace import both_ways
from tests.ranks import run_ranks
from titan_exp.config.schema.typed_config import to_yaml
from titan_exp.extensions.replica_groups.config import semi_sync_of
from titan_exp.extensions.replica_groups.groups import described, own_state
from titan_exp.extensions.replica_groups.lighthouse import TORCHFT, torchft_version
from titan_exp.extensions.replica_groups.outer_optimizer import OuterSteps
from titan_exp.extensions.replica_groups.semi_sync import SemiSync
from titan_exp.ops.autograd import local_tensor
from titan_exp.plan.trace.trace_step import FakeRank

pytestmark = pytest.mark.skipif(torchft_version() != TORCHFT, reason=f"needs torchft {TORCHFT}")
GROUPS = "cluster.replica_groups=2 training.steps=100 training.micro_batch_size=1 "
DILOCO = GROUPS + "semi_sync=diloco "
# Weights are more than activations, so that the peak is the synchronization's.
SHORT = "training.seq_len=8 "
STREAMING = GROUPS + "semi_sync=streaming_diloco semi_sync.delay=1 semi_sync.fragments=3 model.layers=4 "
LAYOUTS = {
    "DiLoCo, peak in the step": DILOCO,
    "DiLoCo, peak in the synchronization": DILOCO + SHORT,
    "LocalSGD, fsdp 2": GROUPS + SHORT + "semi_sync=local_sgd parallelism.dp_shard=2",
    "fragment in flight": STREAMING,
    "fragment in flight, fsdp 2 x tp 2": STREAMING + "parallelism.dp_shard=2 parallelism.tp=2",
    "sequential fragments, short": STREAMING + SHORT + "semi_sync.fragment_pattern=sequential",
    "checkpoint of four groups": SHORT + "semi_sync=diloco semi_sync.groups=4 cluster.replica_groups=4 "
    "training.steps=100 training.micro_batch_size=1 checkpoint=sync checkpoint.every=50",
    "checkpoint of streaming groups": STREAMING + SHORT + "parallelism.dp_shard=2 checkpoint=sync checkpoint.every=50",
    "fragments without delay": STREAMING + SHORT + "semi_sync.delay=0",
}
BY_DAY = ("fragment in flight, fsdp 2 x tp 2", "checkpoint of streaming groups")
"""Layouts that are compared in every run of the tests; the others by `make night`."""


def synchronized(rank: FakeRank) -> Callable[[], None]:
    """A step of this rank with the largest synchronization, as of a group that is alone: after it, or in flight."""
    outer, config = (
        next(part.outer for part in rank.parts if isinstance(part, OuterSteps)),
        semi_sync_of(rank.experiment),
    )
    sync = SemiSync(config, lone := LoneGroup([*range(config.groups)]), outer, rank.state.mesh, {})  # type: ignore[arg-type]
    sizes = [sum(local_tensor(weight).numel() for weight in outer.parameters(n)) for n in range(config.fragments)]
    first = next(step for step in itertools.count(1) if config.sent_fragment(step) == sizes.index(max(sizes)))

    def run() -> None:
        if config.delay:
            sync.send(first)
            rank.step()
        else:
            rank.step()
            sync.send(first)
        sync.apply(first + config.delay)
        if rank.experiment.checkpoint.mode != "off":
            parts, optimizer = rank.state.model.parts, rank.state.optimizer
            lone.description = described(
                parts, optimizer, own_state(parts, optimizer, weights=config.keeps_own_weights)
            )
            sync.collect_states(parts, optimizer)
            sync.states = {}

    return run


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BY_DAY else [pytest.mark.night]) for name in LAYOUTS]
)
def test_synchronizations_are_predicted_as_allocated(name: str, tmp_path: Path):
    experiment = experiment_of(LAYOUTS[name])
    guesses, allocated = (
        predicted(experiment, tmp_path / "plan"),
        allocated_peaks(experiment, tmp_path / "alone", synchronized),
    )
    for guess, most in zip(guesses, allocated, strict=True):
        numbers = 3 + (semi_sync_of(experiment).outer[1] > 0)  # AdamW's two, kept weights, outer momentum
        assert guess.optimizer == pytest.approx(numbers * guess.parameters, rel=1e-3)
        assert guess.passing - guess.between_steps == pytest.approx(most, rel=0.005)


def own_pseudo_gradients_are_forgotten() -> None:
    patch(
        "titan_exp.extensions.replica_groups.semi_sync.FragmentInFlight.gradients",
        lambda original: lambda fragment, outer, *, delayed: original(fragment, outer, delayed=False),
    )


@pytest.mark.night
def test_a_forgotten_copy_is_noticed(tmp_path: Path):
    experiment = experiment_of(STREAMING)
    (guess,) = predicted(experiment, tmp_path / "plan", own_pseudo_gradients_are_forgotten)
    (most,) = allocated_peaks(experiment, tmp_path / "alone", synchronized)
    assert guess.passing - guess.between_steps != pytest.approx(most, rel=0.005)


@pytest.mark.parametrize(
    "words", [pytest.param(DILOCO, marks=pytest.mark.night), STREAMING], ids=["diloco", "streaming"]
)
def test_extrapolated_synchronizations_equal_the_full_trace(words: str, tmp_path: Path):
    experiment = experiment_of(f"{words} model.layers=9 parallelism.dp_shard=2 training.micro_batch_size=1")
    (tmp_path / "config.yaml").write_text(to_yaml(experiment))
    (found,) = run_ranks(1, both_ways, str(tmp_path / "config.yaml"), False)
    for whole, short in found:
        assert short == whole
