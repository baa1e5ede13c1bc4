"""Images encoded while training: the samples, order, splits and random numbers of a latent store of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.config.composing import experiment
from tests.extensions.diffusion.test_latent_store import SEED, loader, take
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.data.validation_loader import ValidationLoader
from titan_exp.extensions.diffusion import samples
from titan_exp.extensions.diffusion.latents import LatentSampler, open_latents
from titan_exp.extensions.diffusion.verbs import encode as run
from titan_exp.rules import violations
from titan_exp.trainer.profiling.slow_options import slower_options

SHAPES = ((12, 12), (8, 18), (20, 9), (6, 24), (12, 13))
OPTIONS = {"size": 12, "patch": 2, "max_aspect": 9, "text_tokens": 8, "text_dim": 32, "pooled_dim": 24, "seed": 5}
SIZES = ["model.patch_dim=12", "model.text_tokens=8", "model.text_dim=32", "model.pooled_dim=24", "training.seq_len=44"]
OBJECTIVE = ["model=flux_debug", "training.objective=rectified_flow", "training.global_batch_size=8", *SIZES]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty images of several shapes with captions."""
    folder = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for number in range(40):
        pixels = random.integers(0, 256, (*SHAPES[number % len(SHAPES)], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02d}.png")
        (folder / f"{number:02d}.txt").write_text(f"picture {number} of {number % 3}")
    return folder


@pytest.fixture(scope="module")
def stored(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    out = tmp_path_factory.mktemp("stores") / "photos"
    options = [f"{key}={value}" for key, value in OPTIONS.items()]
    words = [*options, "validation_fraction=0.2", "shard_samples=7"]
    assert run(["images=folder", f"paths={photos}", f"out={out}", *words]) == 0
    return experiment(*OBJECTIVE, "data=latents", f"data.paths=[{out}]")


def encoding(photos: Path, *words: str) -> Experiment:
    options = [f"data.options.{key}={value}" for key, value in OPTIONS.items()]
    given = ["data=images", "data.images=folder", f"data.paths=[{photos}]", "data.validation_fraction=0.2"]
    return experiment(*OBJECTIVE, *given, *options, *words)


def same(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> bool:
    return len(found) == len(expected) and all(
        len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(("rank", "degree", "rows"), [(0, 1, 8), (1, 2, 2)])
def test_batches_are_those_of_the_store_on_every_rank_in_all_epochs(
    rank: int, degree: int, rows: int, stored: Experiment, photos: Path
):
    config, steps = encoding(photos), 12
    expected = take(loader(stored.data, stored.training, rank, degree, rows), steps)
    assert same(take(loader(config.data, config.training, rank, degree, rows), steps), expected)
    positions = torch.cat([batch[5] for batch in expected])
    assert len(positions.unique(dim=0)) == 4, "shapes of 6 x 6, 4 x 9, 9 x 4 and 3 x 12 tokens"


def test_a_resumed_run_has_the_batches_of_one_that_was_not_stopped(photos: Path):
    config = encoding(photos)
    whole = take(loader(config.data, config.training), 6)
    first = loader(config.data, config.training)
    for _ in range(2):
        next(first)
    state = first.state_dict()
    first.close()
    resumed = loader(config.data, config.training)
    resumed.load_state_dict(state)
    assert same(take(resumed, 4), whole[2:])
    others = encoding(photos, "data.options.size=16", "training.seq_len=72")
    with pytest.raises(UserError, match="cannot continue on other data"):
        loader(others.data, others.training).load_state_dict(state)


def test_validation_is_that_of_the_store_and_encodes_each_sample_once(
    stored: Experiment, photos: Path, monkeypatch: pytest.MonkeyPatch
):
    config, calls = encoding(photos), list[int]()
    encode = samples.Encoders.encode

    def counted(self: samples.Encoders, images: Any, indices: list[int], bucket: Any) -> tuple[np.ndarray, ...]:
        calls.extend(indices)
        return encode(self, images, indices, bucket)

    monkeypatch.setattr(samples.Encoders, "encode", counted)
    loaders = [ValidationLoader(each.data, 44, dp_rank=0, dp_degree=1, micro_batch_size=3) for each in (config, stored)]
    found, expected = ([batch.tensors for batch in batches] for batches in loaders)
    assert same(found, expected)
    assert len(calls) == len(set(calls)) == len(open_latents(config.data).splits["validation"]) > 2


def test_samples_beyond_the_kept_bytes_are_encoded_again(photos: Path, monkeypatch: pytest.MonkeyPatch):
    config = encoding(photos, "data.options.seed=6")
    monkeypatch.setattr(samples, "KEPT_BYTES", 6_000)
    split = open_latents(config.data).splits["validation"]
    batches = [[batch.tensors for batch in [split.batch([0, 3, 1, 0], [0, 1, 2, 3], [1.0] * 4)]] for _ in range(2)]
    assert same(*batches)
    assert isinstance(split, samples.EncodedImages)
    assert 0 < len(split._kept) < 3


def test_captions_decide_what_is_held_out_and_everything_may_be(photos: Path):
    config = encoding(photos, "data.validation_fraction=0.999")
    with pytest.raises(UserError, match="nothing to train on"):
        LatentSampler(config.data, 44, SEED, dp_rank=0, dp_degree=1)
    config = encoding(photos, "data.validation_fraction=0.001")
    with pytest.raises(UserError, match=r"data\.validation_fraction=0\.001: it holds out no image"):
        ValidationLoader(config.data, 44, dp_rank=0, dp_degree=1, micro_batch_size=2)


def test_a_damaged_image_ends_training_in_words(photos: Path, tmp_path: Path):
    (tmp_path / "a.png").write_bytes((photos / "00.png").read_bytes()[:60])
    (tmp_path / "a.txt").write_text("a")
    config = encoding(tmp_path, "data.validation_fraction=0", "data.options.max_aspect=1")
    with pytest.raises(UserError, match=r"data\.paths=.*a\.png: we cannot read the image"):
        next(loader(config.data, config.training))


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ([], []),
        (["data.images=null"], ["data.images"]),
        (["data.paths=[]"], ["data.paths"]),
        (["data.paths=[/nowhere]"], ["data.paths"]),
        (["data.images=webdataset", "data.paths=['/nowhere/*.tar']"], ["data.paths"]),
        (["data.images=huggingface", "data.paths=[./nowhere]"], ["data.paths"]),
        (["data.images=huggingface", "data.paths=[my-team/pictures]"], []),
        (["data.images=glyphs"], ["data.paths"]),
        (["data.images=glyphs", "data.paths=[]"], []),
        (["data.options.text_dim=16"], ["model.text_dim"]),
        (["data.options.patch=4"], ["model.patch_dim", "training.seq_len"]),
        (["data.options.size=13"], ["data.options.size"]),
        (["data.options.latents=/nowhere"], ["data.options.latents"]),
        (["data.options.texts=/nowhere"], ["data.options.texts"]),
        (["+data.options.out=here"], ["data.options.out"]),
        (["data.options.patch=-1"], ["data.options.patch"]),
        (["data.validation_fraction=0"], ["evaluation.every"]),
    ],
)
def test_what_does_not_belong_together_is_refused_before_the_run(words: list[str], fields: list[str], photos: Path):
    found = violations(encoding(photos, "evaluation.every=5", *words))
    assert sorted(violation.field for violation in found) == sorted(fields)


def test_images_are_of_their_source_alone(photos: Path):
    found = violations(experiment(*OBJECTIVE, "data=python_stdlib", "data.images=folder"))
    assert {"data.images", "data.source"} <= {violation.field for violation in found}


def test_remedies_name_keys_of_the_data_group(photos: Path):
    (found,) = violations(encoding(photos, "data.options.size=13"))
    assert "data.options.size=12" in found.remedy


def test_large_encoders_in_training_are_noted(photos: Path):
    plain, large = (resolve_layout(encoding(photos, *words), 1) for words in ([], ["data.options.texts=flux"]))
    assert not [line for line in slower_options(plain) if "encode" in line]
    (line,) = (line for line in slower_options(large) if "encode" in line)
    assert "data.options.texts=flux" in line
    assert "titan-exp encode images=folder" in line
