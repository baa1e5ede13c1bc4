"""Grids of images during training are those of one device in every layout, for the same weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.extensions.diffusion.test_latent_store import SIZES, write
from tests.extensions.diffusion.test_parity import broken
from tests.parity.runs import train
from tests.patching import patch

LAYOUTS = [
    # 32 rows of both conditions in micro-batches of 3: the last one is filled up.
    "parallelism.pp=2 parallelism.cp=2 training.global_batch_size=12 training.micro_batch_size=3",
    "parallelism.tp=2 parallelism.dp_shard=2",
    "parallelism.cp=4 parallelism.cp_ulysses=2",
    "parallelism.pp=2 parallelism.pp_schedule=ZBVZeroBubble parallelism.tp=2 training.micro_batch_size=1",
    "parallelism.dp_replicate=2 weight_average=ema",
]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    write(store := tmp_path_factory.mktemp("stores") / "glyphs")
    given = ("model=flux_debug", "data=latents", f"data.paths=[{store}]", "training.objective=rectified_flow")
    few = ("training.steps=1", "training.seq_len=24", "evaluation.every=0", "tracking.images_every=1")
    return [*given, *SIZES, *few, "optimizer.lr=1e-3"]


def grid(path: Path, words: list[str], layout: str = "", mutate: Callable[[], None] | None = None) -> np.ndarray:
    """Pixels of the only grid; no initial weight is zero, or images would be the noise."""
    train(path, *words, *layout.split(), mutate=partial(broken, mutate))
    with Image.open(path / "images" / "step-00000001.png") as image:
        return np.asarray(image).astype(int)


@pytest.fixture(scope="module")
def on_one_device(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return grid(tmp_path_factory.mktemp("one"), words)


def assert_same_grid(found: np.ndarray, expected: np.ndarray) -> None:
    assert expected.std() > 10
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1


@pytest.mark.parametrize(
    "layout", [LAYOUTS[0], *(pytest.param(layout, marks=pytest.mark.night) for layout in LAYOUTS[1:])]
)
def test_the_grid_is_that_of_one_device(layout: str, words: list[str], on_one_device: np.ndarray, tmp_path: Path):
    batch = ["training.global_batch_size=12"] if "global_batch_size=12" in layout else []
    expected = grid(tmp_path / "one", [*words, *batch]) if batch else on_one_device
    assert_same_grid(grid(tmp_path / "many", words, layout), expected)


def parts_are_gathered_in_the_order_of_ranks() -> None:
    """Right for one group of ranks, wrong for a group in a group."""

    def gather(part: torch.Tensor, mesh: Any) -> torch.Tensor:
        from titan_exp.parallel.mesh import all_gather

        for axis in ("cp_across", "cp_within"):
            group = mesh.world[axis].get_group()
            part = all_gather(part.movedim(1, 0), group.size(), group.group_name).movedim(0, 1)
        return part

    patch("titan_exp.trainer.forward_backward.gather_sequence", lambda _: gather)


def every_rank_keeps_its_part_of_the_noise() -> None:
    def make(original: Callable[..., torch.Tensor]) -> object:
        import os

        return lambda seed, *given: original(seed + int(os.environ["RANK"]), *given)

    patch("titan_exp.extensions.diffusion.rectified_flow.sampling_noise", make)


def the_first_stage_s_result_is_sent() -> None:
    def make(original: Callable[..., torch.Tensor]) -> object:
        def broadcast(self: Any, tensor: torch.Tensor | None, source: int) -> torch.Tensor:
            return (
                torch.zeros_like(original(self, tensor, source)) if tensor is None else original(self, tensor, source)
            )

        return broadcast

    patch("titan_exp.parallel.pipeline_runtime.P2PTransport.broadcast", make)


@pytest.mark.parametrize(
    ("layout", "mutate"),
    [
        (LAYOUTS[2], parts_are_gathered_in_the_order_of_ranks),
        ("parallelism.cp=2", every_rank_keeps_its_part_of_the_noise),
        ("parallelism.pp=2 training.micro_batch_size=4", the_first_stage_s_result_is_sent),
    ],
)
@pytest.mark.night
def test_mutations_are_noticed(
    layout: str, mutate: Callable[[], None], words: list[str], on_one_device: np.ndarray, tmp_path: Path
):
    found = grid(tmp_path, words, layout, mutate)
    with pytest.raises(AssertionError):
        assert_same_grid(found, on_one_device)
