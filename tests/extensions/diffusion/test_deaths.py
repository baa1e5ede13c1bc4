"""Killed at any moment and started again, alone or in replica groups, a diffusion model trains as if undisturbed."""

import random
from pathlib import Path

import pytest

from tests.extensions.diffusion.test_latent_store import SIZES, write
from tests.extensions.replica_groups.fleet import Dies
from tests.extensions.replica_groups.test_replica_groups import SETTINGS, assert_exact, run_with_death
from tests.extensions.replica_groups.test_semi_sync import DILOCO, assert_same, reference, train_groups
from tests.parity.runs import LINES, train
from tests.trainer.test_death import assert_same_run, committed_run, finished, kill_thrice
from titan_exp.extensions.replica_groups.lighthouse import TORCHFT, torchft_version

pytestmark = pytest.mark.night
needs_torchft = pytest.mark.skipif(torchft_version() != TORCHFT, reason=f"needs torchft {TORCHFT}")


def glyphs(store: Path) -> list[str]:
    """Overrides that train on a new store."""
    write(store)
    data = ["model=flux_debug", "data=latents", f"data.paths=[{store}]", "training.objective=rectified_flow"]
    return [*data, *SIZES, "training.seq_len=24"]


def test_killed_at_random_moments(tmp_path: Path):
    words = [*glyphs(tmp_path / "glyphs"), "evaluation.every=6"]
    seed = random.randrange(10**6)
    print(f"seed of the kills: {seed}")
    disturbed = committed_run(tmp_path / "disturbed", words, 2, "async_process")
    kill_thrice(disturbed, 2, random.Random(seed))
    assert_same_run(disturbed, finished(committed_run(tmp_path / "undisturbed", words, 2, "sync"), 2))


@needs_torchft
def test_a_replica_group_dies(tmp_path: Path):
    words = [*SETTINGS[len(LINES) :], *glyphs(tmp_path / "glyphs"), "optimizer.lr=1e-2"]
    found, fleet = run_with_death(tmp_path / "run", words, Dies(3, "sum_gradients"))
    assert_exact(found, fleet, train(tmp_path / "one", *words, "cluster.replica_groups=1"))


@needs_torchft
def test_semi_synchronous_training_is_the_reference(tmp_path: Path):
    words = [*DILOCO[len(LINES) :], *glyphs(tmp_path / "glyphs"), "optimizer.lr=1e-2"]
    assert_same(train_groups(tmp_path / "run", words), reference(tmp_path / "reference", *words))
