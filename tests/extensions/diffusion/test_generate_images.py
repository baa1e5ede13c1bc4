"""Images of a trained diffusion model: an overfit one reproduces its images, and the prompt decides which."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.extensions.diffusion.made_images import COLOURS, Flags, write_flags
from tests.trainer.test_trainer import experiment, run
from titan_exp.cli.main import main
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.schema.typed_config import to_yaml
from titan_exp.extensions.diffusion.latent_format import read_latent_manifest
from titan_exp.extensions.diffusion.latents import LatentSplit
from titan_exp.inference.generate import generate_command
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics

PROMPTS = [f"prompt={Flags().caption(index)}" for index in range(len(COLOURS))]
SIZES = ["model.patch_dim=12", "model.text_tokens=4", "model.text_dim=16", "model.pooled_dim=16", "training.seq_len=8"]


@pytest.fixture(scope="module")
def overfit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 200 steps on four images."""
    folder = tmp_path_factory.mktemp("overfit")
    write_flags(folder / "store")
    path = folder / "runs" / "flags" / "id"
    words = [
        *("model=flux_debug", "model.guidance_embedding=false", "data=latents", f"data.paths=[{folder / 'store'}]"),
        *("training.objective=rectified_flow", "training.steps=200", "evaluation.every=0", *SIZES),
        *("training.global_batch_size=16", "optimizer.lr=5e-3", "checkpoint.mode=sync"),
        *("weight_average=ema", "weight_average.decay=0.96", "tracking.images_every=150", "tracking.tensorboard=true"),
    ]
    run(path, *words)
    (path / "config.yaml").write_text(to_yaml(experiment(*words)))
    return path


def draw(run: Path, out: Path, *words: str) -> list[np.ndarray]:
    """Images of the prompts."""
    assert generate_command([str(run), *PROMPTS, f"out={out}", "steps=12", "guidance=1", *words]) == 0
    files = sorted(out.glob("0*.png"))
    return list(map(read, files))


def read(file: Path) -> np.ndarray:
    with Image.open(file) as image:
        return np.asarray(image)


def distances(images: list[np.ndarray]) -> np.ndarray:
    """Root mean square distances of each image from each of the data, in shades of 255."""
    data = [Flags().image(index).astype(float) for index in range(len(COLOURS))]
    return np.array([[((image - other) ** 2).mean() ** 0.5 for other in data] for image in images])


def test_an_overfit_model_reproduces_its_images(overfit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = distances(draw(overfit, tmp_path / "out"))
    assert found.diagonal().max() < 25
    assert found.argmin(axis=1).tolist() == [0, 1, 2, 3]
    assert "averaged weights after step 200" in capsys.readouterr().out
    with Image.open(tmp_path / "out" / "01-a-green-flag-0-0.png") as image:
        assert image.info["prompt"] == "a green flag"  # type: ignore[attr-defined]
        assert image.size == (4, 4)


def test_images_depend_on_seed_and_prompt_and_not_on_other_prompts(overfit: Path, tmp_path: Path):
    images = draw(overfit, tmp_path / "a", "guidance=3")
    again = draw(overfit, tmp_path / "b", "guidance=3")
    assert all(map(np.array_equal, images, again))
    assert not all(map(np.array_equal, images, draw(overfit, tmp_path / "c", "guidance=3", "seed=1")))
    words = ["prompt=a blue flag", "steps=12", "guidance=3", "samples=2", f"out={tmp_path / 'd'}"]
    assert generate_command([str(overfit), *words]) == 0
    alone = [read(file).astype(int) for file in sorted((tmp_path / "d").glob("0*.png"))]
    assert np.abs(alone[0] - images[2]).max() <= 1  # kernels round batches of other sizes differently
    assert np.abs(alone[0] - alone[1]).max() > 0


@pytest.mark.parametrize(
    "degrees", [["cp=2"], *(pytest.param(words, marks=pytest.mark.night) for words in (["tp=2"], ["tp=2", "cp=2"]))]
)
def test_images_of_several_ranks_are_those_of_one(overfit: Path, tmp_path: Path, degrees: list[str]):
    one = draw(overfit, tmp_path / "one", "guidance=3")
    words = [*PROMPTS, f"out={tmp_path / 'two'}", "steps=12", "guidance=3", *degrees]
    assert main(["generate", str(overfit), *words]) == 0
    two = list(map(read, sorted((tmp_path / "two").glob("0*.png"))))
    assert len(one) == len(two) == len(COLOURS)
    assert max(np.abs(a.astype(int) - b).max() for a, b in zip(one, two, strict=True)) <= 1


def test_images_go_into_the_run_folder_and_other_sizes_are_drawn(overfit: Path):
    words = ["prompt=a red flag", "steps=2", "height=8", "width=2", "averaged=false"]
    assert generate_command([str(overfit), *words]) == 0
    (image,) = (overfit / "generated" / "step-00000200").glob("0*.png")
    with Image.open(image) as found:
        assert found.size == (2, 8)
    assert (image.parent / "grid.png").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tokens=5"], "tokens=5: it is for texts"),
        (["height=5"], r"height=5: an image token is 2 pixels wide\n.*height=4"),
        (["store=/nowhere"], "no such folder"),
        (["cp=3"], r"cp=3: a sequence has 4 text and 4 image tokens[\s\S]*cp=1, 2 or 4"),
    ],
)
def test_what_does_not_fit_is_refused(overfit: Path, words: list[str], message: str):
    with pytest.raises(UserError, match=message):
        generate_command([str(overfit), *words])


def test_a_lost_store_is_named(overfit: Path, tmp_path: Path):
    store = overfit.parents[2] / "store"
    shutil.move(store, tmp_path / "store")
    try:
        with pytest.raises(UserError, match=r"is not there\n.*store=FOLDER"):
            generate_command([str(overfit), "steps=1"])
        words = [f"store={tmp_path / 'store'}", f"out={tmp_path / 'out'}", "steps=1"]
        assert generate_command([str(overfit), *words]) == 0
    finally:
        shutil.move(tmp_path / "store", store)


def test_training_draws_grids_with_the_averaged_weights(overfit: Path):
    names = sorted(path.name for path in (overfit / "images").iterdir())
    assert names == ["step-00000150.png", "step-00000200.png"]
    with Image.open(overfit / "images" / names[-1]) as grid:
        assert grid.info["averaged"] == "True"  # type: ignore[attr-defined]
        pixels = np.asarray(grid).astype(int)
    colours = {index: np.array(colour) for index, colour in enumerate(COLOURS.values())}
    captions = LatentSplit(read_latent_manifest(overfit.parents[2] / "store"), "train").captions()
    for place, caption in enumerate(captions):
        drawn = pixels[4 + 12, 4 + 100 * place + 48]  # the upper half of each image
        nearest = min(colours, key=lambda index: float(np.abs(colours[index] - drawn).sum()))
        assert Flags().caption(nearest) == caption
    events = EventAccumulator(str(overfit / "tensorboard")).Reload()
    assert [event.step for event in events.Images("images")] == [150, 200]
    row = read_metrics(overfit / "metrics.jsonl")[-1]
    assert row["step"] == 200
