"""CLIP score (Hessel et al. 2021): agreement of images with their prompts, by a CLIP model in a local folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.data.latent_store.pretrained import load_network, load_tokenizer, loading

BATCH = 32
"""Pairs in a call of the model."""
CONTENTS = "the folder of a CLIPModel with its tokenizer and image processor, as transformers saves it"
"""Remedy where there is none."""


class CLIPScore:
    """Mean of max(0, 100 · cosine) over images and their prompts; texts beyond CLIP's length are cut.

    Raises:
        UserError: the package or files are missing.
    """

    def __init__(self, folder: str) -> None:
        path = Path(folder).expanduser()
        if not (path / "config.json").is_file():
            reason = "there is no config.json in it" if path.is_dir() else "no such folder"
            raise UserError("The CLIP score cannot be computed.", [Violation("clip", folder, reason, CONTENTS)])
        with loading("clip", folder, CONTENTS):
            from transformers import CLIPImageProcessor, CLIPModel

            self._tokenizer: Any = load_tokenizer(path)
            self._processor: Any = CLIPImageProcessor.from_pretrained(path, local_files_only=True)
            self._model = load_network(CLIPModel, path)
        self._device = self._model.device

    @torch.no_grad()
    def __call__(self, images: Sequence[np.ndarray], prompts: Sequence[str]) -> float:
        """Score of images [height, width, 3] in uint8."""
        total = 0.0
        for first in range(0, len(images), BATCH):
            chunk = slice(first, first + BATCH)
            pixels = self._processor(list(images[chunk]), input_data_format="channels_last", return_tensors="pt").to(
                self._device
            )
            length = self._model.config.text_config.max_position_embeddings
            options = {"padding": True, "truncation": True, "max_length": length, "return_tensors": "pt"}
            texts = self._tokenizer(list(prompts[chunk]), **options).to(self._device)
            found = self._model(
                input_ids=texts.input_ids, attention_mask=texts.attention_mask, pixel_values=pixels.pixel_values
            )
            cosines = torch.nn.functional.cosine_similarity(found.image_embeds, found.text_embeds)
            total += float((100 * cosines.double()).clamp(min=0).sum())
        return total / len(images)
