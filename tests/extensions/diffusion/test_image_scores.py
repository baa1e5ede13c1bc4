"""CLIP score and Fréchet inception distance, with tiny random networks and with Gaussians whose distance is known."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tests.extensions.diffusion.made_images import COLOURS, Flags, write_flags
from tests.extensions.diffusion.made_pipeline import word_tokenizer
from tests.extensions.diffusion.test_generate_images import SIZES, read
from tests.trainer.test_trainer import experiment, run
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.schema.typed_config import to_yaml
from titan_exp.extensions.diffusion.generate_images import CLIPScore, frechet_distance, inception_features
from titan_exp.inference.generate import generate_command

IMAGES = [Flags().image(index) for index in range(len(COLOURS))]
TEXTS = ["greek small letter", "latin capital a", "alpha", "greek alpha"]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on four images."""
    folder = tmp_path_factory.mktemp("drawn")
    write_flags(folder / "store")
    path = folder / "runs" / "flags" / "id"
    words = [
        *("model=flux_debug", "model.guidance_embedding=false", "data=latents", f"data.paths=[{folder / 'store'}]"),
        *("training.objective=rectified_flow", "training.steps=2", "evaluation.every=0", *SIZES),
        *("training.global_batch_size=4", "checkpoint.mode=sync"),
    ]
    run(path, *words)
    (path / "config.yaml").write_text(to_yaml(experiment(*words)))
    return path


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny random CLIP with its tokenizer and image processor."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    folder, sizes = tmp_path_factory.mktemp("clip"), {"num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"hidden_size": 16, "intermediate_size": 32}
    torch.manual_seed(2)
    words = word_tokenizer(folder, 8)
    text = {**sizes, "vocab_size": len(words), "max_position_embeddings": 8, "eos_token_id": 2, "pad_token_id": 0}
    config = CLIPConfig(text_config=text, vision_config={**sizes, "image_size": 8, "patch_size": 4}, projection_dim=8)
    CLIPModel(config).save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}).save_pretrained(folder)
    return folder


class Moments(nn.Module):
    """Features whose distance can be computed by hand: means of the three colours."""

    def forward(self, images: Tensor, return_features: bool = False) -> Tensor:
        """Means of the colours, or one number."""
        if return_features:
            return images.double().mean(dim=(2, 3))
        return images.double().mean().reshape(1, 1)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inception") / "moments.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(Moments()).save(str(path))
    return path


def test_the_distance_of_gaussians_is_the_closed_form():
    """Samples with exactly these means and covariances; those of one set do not commute with the other's."""
    random = np.random.default_rng(0)
    moments = []
    for _ in range(2):
        factor = random.standard_normal((5, 5))
        white = random.standard_normal((400, 5))
        white -= white.mean(axis=0)
        white = white @ np.linalg.inv(np.linalg.cholesky(np.cov(white, rowvar=False))).T
        mean = random.standard_normal(5)
        moments.append((mean, factor @ factor.T, white @ factor.T + mean))
    (mean_a, cov_a, a), (mean_b, cov_b, b) = moments
    from scipy.linalg import sqrtm

    expected = ((mean_a - mean_b) ** 2).sum() + np.trace(cov_a + cov_b - 2 * np.real(sqrtm(cov_a @ cov_b)))
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(b, a) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)
    one = np.array([[0.0], [2.0], [4.0]])  # variance 4
    assert frechet_distance(one, 2 * one + 1) == pytest.approx(3**2 + (4 - 2) ** 2)
    with pytest.raises(UserError, match="two real images"):
        frechet_distance(a[:1], b)


def test_features_are_those_of_the_file_for_images_of_any_shape(network: Path):
    images = [*IMAGES, np.full((6, 2, 3), (1, 2, 3), dtype=np.uint8), *IMAGES[:1]]
    found = inception_features(str(network))(images)
    np.testing.assert_allclose(found, [image.mean(axis=(0, 1)) for image in images])


@torch.no_grad()
def test_the_clip_score_is_the_mean_of_positive_cosines(clip: Path):
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

    model: Any = CLIPModel.from_pretrained(clip)
    words, processor = AutoTokenizer.from_pretrained(clip), CLIPImageProcessor.from_pretrained(clip)
    cosines = []
    for image, text in zip(IMAGES, TEXTS, strict=True):
        pixels = processor([image], input_data_format="channels_last", return_tensors="pt").pixel_values
        found = model(pixel_values=pixels, **words([text], return_tensors="pt"))
        cosines.append(float(nn.functional.cosine_similarity(found.image_embeds, found.text_embeds)))
    assert min(cosines) < 0 < max(cosines), "otherwise the test shows too little"
    score = CLIPScore(str(clip))
    assert score(IMAGES, TEXTS) == pytest.approx(sum(100 * max(0, value) for value in cosines) / 4, rel=1e-5)
    assert score(IMAGES[:1], ["greek " * 30]) >= 0  # longer than the model reads


def prompt_of(file: Path) -> str:
    with Image.open(file) as image:
        return str(image.info["prompt"])


def test_a_run_is_scored_on_its_captions(
    drawn: Path, clip: Path, network: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = [str(drawn), "captions=training", "steps=12", "guidance=1", f"out={tmp_path}"]
    assert generate_command([*words, f"clip={clip}", f"fid={network}"]) == 0
    printed = capsys.readouterr().out.splitlines()
    (score,) = (line for line in printed if line.startswith("CLIP score: "))
    files = sorted(tmp_path.glob("0*.png"))
    images, prompts = [read(file) for file in files], [prompt_of(file) for file in files]
    assert sorted(prompts) == sorted(map(Flags().caption, range(len(COLOURS))))
    assert score == f"CLIP score: {CLIPScore(str(clip))(images, prompts):.3f} over 4 images"
    features = inception_features(str(network))
    (distance,) = (line for line in printed if line.startswith("FID: "))
    expected = f"FID: {frechet_distance(features(images), features(IMAGES)):.3f} between 4 images and 4 real ones"
    assert distance == expected
    assert generate_command([*words, "limit=2"]) == 0
    printed = capsys.readouterr().out
    assert "CLIP score: not computed. Give a CLIPModel" in printed
    assert "FID: not computed. Give a TorchScript" in printed
    assert generate_command([str(drawn), "prompt=a red flag", "steps=2", f"out={tmp_path}"]) == 0
    assert "not computed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["clip=nowhere"], r"clip=nowhere: there is no such folder\n.*CLIPModel with its tokenizer"),
        (["clip=empty"], r"clip=empty: there is no config\.json"),
        (["fid=empty"], r"fid=empty: it is a folder"),
        (["clip=."], r"clip=\.: it does not load"),
        (["fid=nowhere.pt"], r"fid=nowhere\.pt: there is no such file"),
        (["fid=config.json"], r"fid=config\.json: it is not a TorchScript"),
        (["captions=held_out"], r"the run held out no image\n.*captions=training"),
    ],
)
def test_missing_networks_are_said(
    words: list[str], message: str, drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(UserError, match=message):
        generate_command([str(drawn), *words])


def test_images_of_captions_begin_with_noise_of_their_own(drawn: Path, tmp_path: Path):
    """One noise for all would make a set of images narrower than the model is."""

    from titan_exp.extensions.diffusion import rectified_flow

    seen = list[int]()
    noise = rectified_flow.sampling_noise

    def noted(seed: int, samples: Any, *given: int) -> Tensor:
        seen.extend(samples)
        return noise(seed, samples, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rectified_flow, "sampling_noise", noted)
        assert generate_command([str(drawn), "captions=training", "steps=1", f"out={tmp_path}"]) == 0
    assert seen == [0, 1, 2, 3]
