"""Encoders from a local folder, and images, against the FLUX.1 pipeline of diffusers with tiny random weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.models.flux_shapes import needs_diffusers
from titan_exp.cli.encode import run
from titan_exp.config.paths.latent_store_manifest import read_latent_manifest
from titan_exp.data.images.glyphs import GlyphImages
from titan_exp.data.latent_store.image_codec import image_codec
from titan_exp.data.latent_store.reader import LatentSplit
from titan_exp.data.latent_store.text_encoder import text_encoder
from titan_exp.inference.generate import generate_command
from titan_exp.trainer.sampling.euler import sampling_noise

pytestmark = needs_diffusers
TEXT_TOKENS, SIZE, STEPS = 12, 32, 4
PROMPT = "greek small letter alpha"


def tokenizer(folder: Path, length: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *PROMPT.split(), "latin", "capital", "a"]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 2)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=length
    )
    fast.save_pretrained(folder)
    return fast


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Pipeline, and its folder."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("pipeline")
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 20}
    clip = CLIPTextConfig(vocab_size=16, hidden_size=24, intermediate_size=32, eos_token_id=2, **sizes)
    t5 = T5Config(vocab_size=16, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=24, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    kind: Any = AutoencoderKL  # whose annotations are narrower than its values
    vae = kind(
        block_out_channels=(8, 8), latent_channels=4, norm_num_groups=4, scaling_factor=0.3611, shift_factor=0.1159,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, use_quant_conv=False,
        use_post_quant_conv=False,
    )  # fmt: skip
    found = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae,
        text_encoder=CLIPTextModel(clip),
        tokenizer=tokenizer(folder / "tokenizer", 20),
        text_encoder_2=T5EncoderModel(t5),
        tokenizer_2=tokenizer(folder / "tokenizer_2", TEXT_TOKENS),
        transformer=transformer,
    )
    for name in ("vae", "text_encoder", "text_encoder_2", "transformer"):
        getattr(found, name).eval().save_pretrained(folder / name)
    found.set_progress_bar_config(disable=True)
    return found, folder


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
