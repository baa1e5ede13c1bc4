"""Promise 1 for a diffusion model on layouts that nobody chose."""

import random
from pathlib import Path

import pytest

from tests.extensions.diffusion.test_latent_store import SIZES, write
from tests.parity.drawn import Keys, draw
from tests.parity.runs import assert_same_curve, train
from tests.parity.test_drawn import MOST_RANKS, MOST_RANKS_BY_DAY, seeds

FAMILY: dict[str, Keys] = {
    "flux_debug": {
        "model.heads": (2, 3, 4),
        "model.layers": (2, 4, 6),
        "model.double_layers": (1, 2),
        "training.global_batch_size": (8, 8, 12),
    }
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("drawn_by", seeds(metafunc.config))


def test_a_drawn_layout_does_not_change_the_curve(tmp_path: Path, request: pytest.FixtureRequest, drawn_by: str):
    many = int(str(request.config.getoption("--layouts"))) > 1
    write(tmp_path / "glyphs")
    data = ["data=latents", f"data.paths=[{tmp_path / 'glyphs'}]", "training.objective=rectified_flow", *SIZES]
    data += ["training.seq_len=24", "optimizer.lr=1e-2"]
    drawn = draw(
        random.Random(drawn_by),
        MOST_RANKS if many else MOST_RANKS_BY_DAY,
        FAMILY,
        lambda chance, shape: [f"model.dim={32 * int(shape[1].rpartition('=')[2])}", *data],
    )
    print(f"the run: {drawn}")
    alone = train(tmp_path / "one", *drawn.experiment)
    assert_same_curve(train(tmp_path / "many", *drawn.experiment, *drawn.layout, timeout=240), alone)
