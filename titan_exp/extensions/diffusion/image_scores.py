"""Scores of generated images by networks in local files: CLIP score (Hessel et al. 2021) for the agreement of images
with their prompts, and Fréchet inception distance (Heusel et al. 2017) between two sets of images.

FID = |μ_a - μ_b|² + tr(Σ_a + Σ_b - 2 (Σ_a Σ_b)^½), for Gaussians with the means and covariances of the features.
"""

import warnings
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.extensions.diffusion.config import DrawOptions
from titan_exp.extensions.diffusion.encoders import ImageCodec, load_network, load_tokenizer, loading
from titan_exp.extensions.diffusion.samples import LatentSamples

BATCH = 32
"""Number of images per call of the network."""

Features = Callable[[Sequence[np.ndarray]], np.ndarray]
"""Computes features [n, width] in fp64 of images [height, width, 3] in uint8."""


def inception_features(file: str) -> Features:
    """Feature function of a TorchScript module that takes images [n, 3, height, width] in uint8.

    Published distances use inception-2015-12-05.pt of NVIDIA's StyleGAN, which resizes images itself; its argument
    `return_features` is set.

    Raises:
        UserError: there is no such file, or it is not TorchScript.
    """
    path = Path(file).expanduser()
    remedy = "give the path of inception-2015-12-05.pt, as NVIDIA publishes it, or of another TorchScript module"
    if not path.is_file():
        reason = "it is a folder" if path.is_dir() else "there is no such file"
        raise UserError("We cannot compute FID.", [Violation("fid", file, reason, remedy)])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with warnings.catch_warnings():
            # Published networks are TorchScript, although torch advises against it for new ones.
            warnings.simplefilter("ignore", DeprecationWarning)
            network: Any = torch.jit.load(str(path), map_location=device).eval()
    except RuntimeError as error:
        reason = f"it is not a TorchScript module: {shorten(str(error), 100, placeholder=' ...')}"
        raise UserError("We cannot compute FID.", [Violation("fid", file, reason, remedy)]) from error
    takes = {argument.name for argument in network.forward.schema.arguments}
    options = {"return_features": True} if "return_features" in takes else {}

    @torch.no_grad()
    def features(images: Sequence[np.ndarray]) -> np.ndarray:
        found = list[np.ndarray]()
        for _, alike in groupby(images, np.shape):
            group = list(alike)
            for first in range(0, len(group), BATCH):
                pixels = torch.from_numpy(np.stack(group[first : first + BATCH])).permute(0, 3, 1, 2).to(device)
                found.append(network(pixels, **options).flatten(1).double().cpu().numpy())
        return np.concatenate(found)

    return features


def frechet_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Distance between Gaussians fitted to two sets of features [n, width].

    Raises:
        UserError: a set has fewer than two.
    """
    if min(len(a), len(b)) < 2:
        raise UserError("FID needs at least two generated and two real images, since it compares covariances.")
    (mean_a, covariance_a), (mean_b, covariance_b) = (
        (features.mean(axis=0), np.atleast_2d(np.cov(features, rowvar=False))) for features in (a, b)
    )
    # The trace of (Σ_a Σ_b)^½ is that of (Σ_a^½ Σ_b Σ_a^½)^½, which is symmetric.
    values, vectors = np.linalg.eigh(covariance_a)
    root = (vectors * values.clip(min=0) ** 0.5) @ vectors.T
    cross = np.linalg.eigvalsh(root @ covariance_b @ root).clip(min=0) ** 0.5
    return float(((mean_a - mean_b) ** 2).sum() + np.trace(covariance_a) + np.trace(covariance_b) - 2 * cross.sum())


MISSING = {
    "clip": "CLIP score: not computed. Give a CLIPModel and its tokenizer as transformers saves them: clip=FOLDER",
    "fid": "FID: not computed. Give a TorchScript Inception, such as inception-2015-12-05.pt: fid=FILE",
}


class ImageScores:
    """Scores by the networks `options.clip` and `options.fid`; each is None if it is not given.

    Raises:
        UserError: a network is missing or cannot be read.
    """

    def __init__(self, options: DrawOptions) -> None:
        self._clip = CLIPScore(options.clip) if options.clip else None
        self._features: Features | None = inception_features(options.fid) if options.fid else None
        self._evaluates = bool(options.captions)

    def lines(
        self, images: Sequence[np.ndarray], prompts: Sequence[str], real: Callable[[], Sequence[np.ndarray]]
    ) -> list[str]:
        """Lines to print about images of prompts, compared with the `real` images. They say what an evaluation lacks.

        Raises:
            UserError: there are too few images.
        """
        found = list[str]()
        if self._clip is not None:
            found.append(f"CLIP score: {self._clip(images, prompts):.3f} over {len(images):,} images")
        elif self._evaluates:
            found.append(MISSING["clip"])
        if self._features is not None:
            generated, theirs = self._features(images), self._features(real())
            count = f"{len(generated):,} images and {len(theirs):,} real ones"
            width = generated.shape[1]
            few = f" (biased, because {width:,} features need more images)" if len(generated) <= width else ""
            found.append(f"FID: {frechet_distance(generated, theirs):.3f} between {count}{few}")
        elif self._evaluates:
            found.append(MISSING["fid"])
        return found


def real_images(samples: LatentSamples, codec: ImageCodec) -> list[np.ndarray]:
    """Images [height, width, 3] of a split, decoded from the means of their latents."""
    return [codec.decode(samples[index].latents[None], *samples.shape(index))[0] for index in range(len(samples))]


CONTENTS = "give the folder of a CLIPModel with its tokenizer and image processor, as transformers saves it"
"""Remedy if the folder has no CLIP model."""


class CLIPScore:
    """Mean of max(0, 100 · cosine) over images and their prompts; texts beyond CLIP's length are cut.

    Raises:
        UserError: the package or files are missing.
    """

    def __init__(self, folder: str) -> None:
        path = Path(folder).expanduser()
        if not (path / "config.json").is_file():
            reason = "there is no config.json in it" if path.is_dir() else "there is no such folder"
            raise UserError("We cannot compute the CLIP score.", [Violation("clip", folder, reason, CONTENTS)])
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
