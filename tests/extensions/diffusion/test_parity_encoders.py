"""Training through an autoencoder, T5 and CLIP of a folder: the same bits from a store and on the fly."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.config.composing import experiment
from tests.extensions.diffusion.flux_shapes import needs_diffusers
from tests.extensions.diffusion.made_pipeline import write_photos, write_pipeline
from tests.extensions.diffusion.test_latent_store import loader, take
from tests.extensions.diffusion.test_parity_encoded_images import same_bits
from tests.parity.runs import Curve, assert_same_curve, train
from tests.parity.test_continued import continued
from tests.patching import patch
from titan_exp.config.errors.user_error import UserError
from titan_exp.extensions.diffusion.encoders import encoders_of_samples, image_codec
from titan_exp.extensions.diffusion.verbs import encode as run
from titan_exp.inference.generate import generate_command

pytestmark = needs_diffusers
COMMON = [
    *("model=flux_debug", "model.text_tokens=8", "training.objective=rectified_flow", "training.seq_len=24"),
    *("optimizer.lr=1e-2", "evaluation.every=6", "data.validation_documents=3", "tracking.images_every=6"),
]
FSDP2 = "parallelism.dp_shard=2 training.micro_batch_size=2"
TP2 = "parallelism.tp=2 training.micro_batch_size=4"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a pipeline, photos and a store of them."""
    folder = tmp_path_factory.mktemp("encoders")
    write_pipeline(folder / "flux")
    write_photos(folder / "photos")
    words = ["images=folder", f"paths={folder / 'photos'}", "validation_fraction=0.2"]
    assert run([*words, *options(folder), f"out={folder / 'store'}", "shard_samples=7"]) == 0
    return folder


def options(place: Path) -> list[str]:
    return [f"latents={place / 'flux' / 'vae'}", f"texts={place / 'flux'}", "size=16", "text_tokens=8"]


def stored(place: Path) -> list[str]:
    return [*COMMON, "data=latents", f"data.paths=[{place / 'store'}]"]


def encoded(place: Path) -> list[str]:
    source = ["data=images", "data.images=folder", f"data.paths=[{place / 'photos'}]", "data.validation_fraction=0.2"]
    return [*COMMON, *source, *(f"data.options.{option}" for option in options(place))]


@pytest.fixture(scope="module")
def from_the_store(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return train(tmp_path_factory.mktemp("stored") / "run", *stored(place), *FSDP2.split())


def test_batches_on_the_fly_are_those_of_a_store(place: Path):
    both = [experiment(*words, "training.global_batch_size=8") for words in (stored(place), encoded(place))]
    expected, found = (take(loader(config.data, config.training), 6) for config in both)
    assert len(expected) == len(found) == 6
    for batch, other in zip(expected, found, strict=True):
        assert all(map(torch.equal, batch, other))
    assert expected[0][0].std() > 0.1
    assert not torch.equal(expected[0][1][0], expected[0][1][1])


def no_folder(place: Path) -> None:
    shutil.rmtree(place)


def weights_of_another_network(place: Path) -> None:
    shutil.copy(place / "text_encoder" / "model.safetensors", place / "text_encoder_2")


def no_tokenizer(place: Path) -> None:
    shutil.rmtree(place / "tokenizer_2")


def no_words(place: Path) -> None:
    (place / "tokenizer_2" / "tokenizer.json").unlink()


def half_an_autoencoder(place: Path) -> None:
    os.truncate(place / "vae" / "diffusion_pytorch_model.safetensors", 1000)


def no_weights(place: Path) -> None:
    (place / "vae" / "diffusion_pytorch_model.safetensors").unlink()


def another_class(place: Path) -> None:
    shutil.rmtree(place / "vae")
    shutil.copytree(place / "transformer", place / "vae")


@pytest.mark.day
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_folder, r"latents=.*vae: there is no such folder"),
        (weights_of_another_network, r"texts=.*: it does not load: text_encoder_2 has no weights for encoder\."),
        (
            no_tokenizer,
            r"texts=.*: it lacks tokenizer_2\n.*with text_encoder, tokenizer, text_encoder_2 and tokenizer_2",
        ),
        (no_words, r"texts=.*: it does not load: tokenizer_2 has no tokenizer\.json, and no vocabulary in"),
        (half_an_autoencoder, r"latents=.*vae: it does not load: "),
        (no_weights, r"latents=.*vae: it does not load: .*no file named diffusion_pytorch_model"),
        (another_class, r"latents=.*vae: it is a FluxTransformer2DModel, not an AutoencoderKL"),
    ],
)
def test_folders_without_an_encoder_are_refused(
    damage: Callable[[Path], None], message: str, place: Path, tmp_path: Path
):
    shutil.copytree(place / "flux", tmp_path / "flux")
    damage(tmp_path / "flux")
    words = ["images=glyphs", *options(tmp_path), f"out={tmp_path / 'store'}"]
    with pytest.raises(UserError, match=message):
        run(words)
    assert not (tmp_path / "store").exists()


def test_the_whole_pipeline_is_no_autoencoder_and_a_lost_one_is_named(place: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"it is a whole pipeline\n.*latents=.*flux/vae"):
        run(["images=glyphs", f"latents={place / 'flux'}", f"out={tmp_path / 'store'}"])
    description = {"name": "autoencoder_kl", "folder": "/nowhere", "shift": 0.1159, "scale": 0.3611}
    with pytest.raises(UserError, match=r"no such folder\n.*back in this place"), encoders_of_samples():
        image_codec(description)


@pytest.mark.night
def test_bits_on_the_fly_are_those_of_a_store(place: Path, from_the_store: Curve, tmp_path: Path):
    assert same_bits(train(tmp_path / "run", *encoded(place), *FSDP2.split()), from_the_store)


@pytest.mark.night
def test_with_tensor_parallelism_too_and_the_curve_is_that_of_other_ranks(
    place: Path, from_the_store: Curve, tmp_path: Path
):
    expected = train(tmp_path / "stored", *stored(place), *TP2.split())
    assert same_bits(train(tmp_path / "run", *encoded(place), *TP2.split()), expected)
    assert_same_curve(expected, from_the_store)


@pytest.mark.night
@pytest.mark.parametrize("layout", [FSDP2, TP2])
def test_a_stopped_run_goes_on_to_the_bit(layout: str, place: Path, tmp_path: Path):
    words = [*encoded(place), "evaluation.every=10", "tracking.images_every=10", *layout.split()]
    whole, resumed = continued(tmp_path, words, words)
    assert (resumed.loss, resumed.grad_norm) == (whole.loss[5:], whole.grad_norm[5:])
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in whole.weights.items())


@pytest.mark.night
def test_images_are_decoded_by_the_autoencoder_of_the_run(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    words = [*encoded(place), "training.steps=1", "checkpoint.mode=sync"]
    train(tmp_path / "run", *words)
    latents = list[np.ndarray]()
    from titan_exp.extensions.diffusion.encoders import Autoencoder

    plain = Autoencoder.decode

    def noted(self: Autoencoder, tokens: np.ndarray, rows: int, columns: int) -> np.ndarray:
        latents.append(tokens)
        return plain(self, tokens, rows, columns)

    monkeypatch.setattr(Autoencoder, "decode", noted)
    prompts = ["prompt=picture of red", "prompt=green letter"]
    assert generate_command([str(tmp_path / "run"), *prompts, "steps=2", f"out={tmp_path / 'out'}"]) == 0
    files = sorted((tmp_path / "out").glob("0*.png"))
    (found,) = latents
    assert found.shape == (2, 16, 16)
    description = {"name": "autoencoder_kl", "folder": str(place / "flux" / "vae"), "shift": 0.1159, "scale": 0.3611}
    expected = image_codec(description).decode(found, 4, 4)
    for file, pixels in zip(files, expected, strict=True):
        with Image.open(file) as image:
            assert np.array_equal(np.asarray(image), pixels)


def every_visit_has_the_posterior_noise_of_the_first_sample() -> None:
    def make(original: Callable[..., torch.Tensor]) -> object:
        def drawn(batch: object, seed: int, purpose: str) -> torch.Tensor:
            found = original(batch, seed, purpose)
            return found[:1].expand_as(found) if purpose == "posterior" else found

        return drawn

    patch("titan_exp.extensions.diffusion.samples.noise_of", make)


def deviations_are_dropped() -> None:
    def make(original: Callable[..., tuple]) -> object:
        def encode(self: object, images: np.ndarray) -> tuple[np.ndarray, ...]:
            means, deviations = original(self, images)
            return means, 0 * deviations

        return encode

    patch("titan_exp.extensions.diffusion.encoders.Autoencoder.encode", make)


def captions_are_encoded_without_their_last_token() -> None:
    patch(
        "titan_exp.extensions.diffusion.encoders.T5AndCLIP._ids",
        lambda original: lambda self, which, caption, length: original(self, which, caption[:-2], length),
    )


@pytest.mark.parametrize(
    "mutate",
    [
        every_visit_has_the_posterior_noise_of_the_first_sample,
        deviations_are_dropped,
        captions_are_encoded_without_their_last_token,
    ],
)
@pytest.mark.night
def test_mutations_are_noticed(mutate: Callable[[], None], place: Path, from_the_store: Curve, tmp_path: Path):
    assert not same_bits(train(tmp_path / "run", *encoded(place), *FSDP2.split(), mutate=mutate), from_the_store)
