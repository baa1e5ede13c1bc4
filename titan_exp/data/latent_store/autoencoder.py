"""AutoencoderKL of diffusers, from a local folder: images to normalized latents in patches of 2 by 2, and back."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titan_exp.config.images.latent_format import LATENT_PATCH, autoencoder_config, autoencoder_description
from titan_exp.data.latent_store.pixels import from_tokens, to_tokens, to_uint8
from titan_exp.data.latent_store.pretrained import load_network, loading


class Autoencoder:
    """Image codec: latents are (z - shift) · scale in patches, for z of the posterior.

    Raises:
        UserError: the package or the files are missing.
    """

    def __init__(self, folder: str) -> None:
        self.description: Mapping[str, Any] = autoencoder_description(folder, autoencoder_config(folder))
        """Entry of the manifest."""
        self._shift, self._scale = self.description["shift"], self.description["scale"]
        with loading("latents", folder, "the folder vae of a FLUX.1 pipeline, or latents=pixels"):
            from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

            self._model = load_network(AutoencoderKL, Path(folder).expanduser())
        self._device = self._model.device
        config = self._model.config
        self.token_size = LATENT_PATCH * 2 ** (len(config.block_out_channels) - 1)
        """Height and width of a token in pixels."""
        self.channels = config.latent_channels * LATENT_PATCH**2
        """Features of a token."""

    def encode(self, images: np.ndarray) -> tuple[np.ndarray, ...]:
        """Means and standard deviations [n, rows · columns, channels] in fp32 of images [n, height, width, 3]."""
        # One by one: kernels round other batch sizes differently, and samples would depend on the layout.
        moments = zip(*(self._moments(image) for image in images), strict=True)
        return tuple(to_tokens(np.stack(moment), LATENT_PATCH) for moment in moments)

    def decode(self, tokens: np.ndarray, rows: int, columns: int) -> np.ndarray:
        """Tokens [n, rows · columns, channels] to images [n, height, width, 3] in uint8."""
        latents = from_tokens(tokens, rows, columns, LATENT_PATCH)
        return np.stack([self._image(latent) for latent in latents])

    @torch.no_grad()
    def _moments(self, image: np.ndarray) -> Iterator[np.ndarray]:
        pixels = torch.from_numpy(image / np.float32(127.5) - 1).permute(2, 0, 1)[None].to(self._device)
        posterior = self._model.encode(pixels).latent_dist
        for moment in ((posterior.mean - self._shift) * self._scale, posterior.std * self._scale):
            yield moment[0].float().permute(1, 2, 0).cpu().numpy()

    @torch.no_grad()
    def _image(self, latent: np.ndarray) -> np.ndarray:
        latents = torch.from_numpy(np.ascontiguousarray(latent)).permute(2, 0, 1)[None].to(self._device)
        pixels = self._model.decode(latents / self._scale + self._shift).sample
        return to_uint8(pixels[0].float().permute(1, 2, 0).cpu().numpy())
