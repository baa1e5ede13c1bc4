"""Text encoders of FLUX.1 from a local folder, through transformers: states of T5, and the pooled embedding of CLIP."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from titan_exp.config.images.latent_format import T5_AND_CLIP, absolute, text_folders
from titan_exp.data.latent_store.pretrained import load_network, load_tokenizer, loading


class T5AndCLIP:
    """Encoder of captions, frozen; `tokens` is the number of T5's states, padding included, which is not masked.

    Raises:
        UserError: the package or the files are missing.
    """

    def __init__(self, folder: str, tokens: int) -> None:
        clip, clip_tokenizer, t5, t5_tokenizer = text_folders(folder)
        self._folder = absolute(folder)
        with loading("texts", folder, "the folder of a FLUX.1 pipeline of diffusers, or texts=hashed_words"):
            from transformers import CLIPTextModel, T5EncoderModel

            self._tokenizers: list[Any] = [load_tokenizer(path) for path in (clip_tokenizer, t5_tokenizer)]
            self._clip, self._t5 = load_network(CLIPTextModel, clip), load_network(T5EncoderModel, t5)
        self._device = self._t5.device
        self.tokens, self.dim, self.pooled_dim = tokens, self._t5.config.d_model, self._clip.config.hidden_size

    @property
    def description(self) -> Mapping[str, Any]:
        """Entry of the manifest."""
        return {"name": T5_AND_CLIP, "folder": self._folder}

    @torch.no_grad()
    def __call__(self, caption: str) -> tuple[np.ndarray, np.ndarray]:
        """States [tokens, dim] and pooled embedding [pooled_dim], in fp32."""
        states = self._t5(self._ids(1, caption, self.tokens)).last_hidden_state
        pooled = self._clip(self._ids(0, caption, self._clip.config.max_position_embeddings)).pooler_output
        return states[0].float().cpu().numpy(), pooled[0].float().cpu().numpy()

    def _ids(self, which: int, caption: str, length: int) -> torch.Tensor:
        tokenizer = self._tokenizers[which]
        found = tokenizer([caption], padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        return found.input_ids.to(self._device)
