"""Encoders from a local folder, and images, against the FLUX.1 pipeline of diffusers with tiny random weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.extensions.diffusion.flux_shapes import needs_diffusers
from tests.extensions.diffusion.made_pipeline import TEXT_TOKENS, write_pipeline
from titan_exp.extensions.diffusion.encoders import Autoencoder, image_codec, text_encoder
from titan_exp.extensions.diffusion.latent_format import read_latent_manifest
from titan_exp.extensions.diffusion.latents import LatentSplit
from titan_exp.extensions.diffusion.rectified_flow import sampling_noise
from titan_exp.extensions.diffusion.rendered_images import GlyphImages
from titan_exp.extensions.diffusion.verbs import encode as run
from titan_exp.inference.generate import generate_command

pytestmark = needs_diffusers
SIZE, STEPS = 32, 4
PROMPT = "greek small letter alpha"


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Pipeline, and its folder."""
    folder = tmp_path_factory.mktemp("pipeline")
    return write_pipeline(folder), folder


@pytest.fixture(scope="module")
def store(pipeline: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some glyphs, encoded by the pipeline's encoders."""
    out, (_, folder) = tmp_path_factory.mktemp("stores") / "glyphs", pipeline
    words = [f"latents={folder / 'vae'}", f"texts={folder}", f"text_tokens={TEXT_TOKENS}", f"size={SIZE}"]
    assert run([f"out={out}", "images=glyphs", *words, "shard_samples=300"]) == 0
    return out


def pixels_of(caption: str) -> torch.Tensor:
    """Pixels of a glyph in [-1, 1]."""
    images = GlyphImages(SIZE)
    (index,) = (index for index in range(len(images)) if images.caption(index) == caption)
    return torch.from_numpy(images.image(index) / np.float32(127.5) - 1).permute(2, 0, 1)[None]


@torch.no_grad()
def test_a_store_holds_what_the_pipeline_computes(pipeline: tuple[Any, Path], store: Path):
    pipe, _ = pipeline
    manifest = read_latent_manifest(store)
    split, encoder, codec = LatentSplit(manifest, "train"), text_encoder(manifest), image_codec(manifest.latents)
    states, pooled, _ = pipe.encode_prompt(split.captions()[0], None, max_sequence_length=TEXT_TOKENS)
    sample = split[0]
    np.testing.assert_allclose(sample.text, states[0], atol=1e-5)
    np.testing.assert_allclose(sample.pooled, pooled[0], atol=1e-5)
    np.testing.assert_allclose(encoder(split.captions()[0])[0], states[0], atol=1e-5)
    rows, columns = split.shape(0)
    posterior = pipe.vae.encode(pixels_of(split.captions()[0])).latent_dist
    deviations = pipe._pack_latents(posterior.std * 0.3611, 1, 4, SIZE // 2, SIZE // 2)
    assert sample.deviations is not None
    np.testing.assert_allclose(sample.deviations, deviations[0], atol=1e-5)
    unpacked = pipe._unpack_latents(torch.from_numpy(sample.latents)[None], SIZE, SIZE, pipe.vae_scale_factor)
    decoded = pipe.vae.decode(unpacked / 0.3611 + 0.1159).sample
    expected = pipe.image_processor.postprocess(decoded, output_type="np")[0]
    found = codec.decode(sample.latents[None], rows, columns)[0]
    assert np.abs(found / 255 - expected).max() < 0.003


def test_samples_do_not_depend_on_those_encoded_with_them(monkeypatch: pytest.MonkeyPatch, pipeline: tuple[Any, Path]):
    """Kernels round a batch of another size differently, at shapes larger than these: images are coded one by one."""
    codec, sizes = Autoencoder(str(pipeline[1] / "vae")), list[int]()
    for name in ("encode", "decode"):
        plain = getattr(codec._model, name)

        def counted(x: torch.Tensor, plain: Callable[[torch.Tensor], Any] = plain) -> Any:
            sizes.append(len(x))
            return plain(x)

        monkeypatch.setattr(codec._model, name, counted)
    images = np.random.default_rng(0).integers(0, 256, (3, SIZE, SIZE, 3), dtype=np.uint8)
    means, deviations = codec.encode(images)
    assert len(codec.decode(means, SIZE // 4, SIZE // 4)) == len(deviations) == 3
    assert sizes == [1] * 6


def test_images_are_those_of_the_pipeline(pipeline: tuple[Any, Path], store: Path, tmp_path: Path):
    pipe, folder = pipeline
    noise = sampling_noise(0, [0], (SIZE // 4) ** 2, 16)
    expected = pipe(
        PROMPT, height=SIZE, width=SIZE, num_inference_steps=STEPS, guidance_scale=3.5, latents=noise,
        max_sequence_length=TEXT_TOKENS, output_type="np",
    ).images[0]  # fmt: skip
    words = [f"prompt={PROMPT}", f"steps={STEPS}", "guidance=1", f"store={store}", f"out={tmp_path}"]
    assert generate_command([str(folder / "transformer"), *words]) == 0
    (file,) = tmp_path.glob("00-*.png")
    with Image.open(file) as image:
        assert np.abs(np.asarray(image) / 255 - expected).max() < 0.006
