"""Tiny FLUX.1 pipeline with random weights, in a folder laid out as the published ones, and captioned images."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

TEXT_TOKENS = 12
"""Tokens that the folder's T5 reads."""
WORDS = ("greek", "small", "letter", "alpha", "latin", "capital", "a", "red", "green", "blue", "picture", "of")
"""Words that both tokenizers know."""


def word_tokenizer(folder: Path, length: int) -> Any:
    """Tokenizer of whole words, saved in the folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *WORDS[:7]]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 2)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=length
    )
    fast.save_pretrained(folder)
    return fast


def clip_tokenizer() -> Any:
    """Byte-pair tokenizer of CLIP, of single letters."""
    from transformers import CLIPTokenizer

    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    return CLIPTokenizer({piece: index for index, piece in enumerate(pieces)}, [], model_max_length=20)


def t5_tokenizer() -> Any:
    """Unigram tokenizer of T5, of words and letters."""
    from transformers import T5Tokenizer

    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    known = [*(f"\u2581{word}" for word in WORDS), "\u2581", *letters]
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    scored = [(piece, -float(rank)) for rank, piece in enumerate(known, 1)]
    return T5Tokenizer([*special, *scored], extra_ids=0, model_max_length=TEXT_TOKENS)


def write_pipeline(folder: Path) -> Any:
    """Pipeline of diffusers with weights of noise, and `model_index.json` and all of its parts in the folder."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    torch.manual_seed(0)
    clip_words, t5_words = clip_tokenizer(), t5_tokenizer()
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 20}
    sizes |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    clip = CLIPTextConfig(vocab_size=len(clip_words), hidden_size=24, intermediate_size=32, **sizes)
    t5 = T5Config(vocab_size=len(t5_words), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
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
        vae=vae.eval(),
        text_encoder=CLIPTextModel(clip).eval(),
        tokenizer=clip_words,
        text_encoder_2=T5EncoderModel(t5).eval(),
        tokenizer_2=t5_words,
        transformer=transformer.eval(),
    )
    found.set_progress_bar_config(disable=True)
    found.save_pretrained(folder)
    return found


def write_photos(folder: Path, count: int = 40) -> None:
    """Images of several sizes with captions of known words, in a folder."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for number in range(count):
        colours = random.integers(0, 256, (3, 3, 3), dtype=np.uint8)
        size = 16 + number % 3, 16 + number % 4
        Image.fromarray(colours).resize(size, Image.Resampling.BILINEAR).save(folder / f"{number:02d}.png")
        chosen = random.permutation(WORDS)[: 2 + number % 4]
        (folder / f"{number:02d}.txt").write_text(f"picture of {' '.join(chosen)}")
