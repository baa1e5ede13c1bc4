"""Fréchet inception distance (Heusel et al. 2017) between two sets of images, by the features of a network in a file.

FID = |μ_a - μ_b|² + tr(Σ_a + Σ_b - 2 (Σ_a Σ_b)^½), of Gaussians with the means and covariances of the features.
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

BATCH = 32
"""Images in a call of the network."""

Features = Callable[[Sequence[np.ndarray]], np.ndarray]
"""Features [n, width] in fp64 of images [height, width, 3] in uint8."""


def inception_features(file: str) -> Features:
    """Features of a TorchScript module, which takes images [n, 3, height, width] in uint8.

    Published distances use inception-2015-12-05.pt of NVIDIA's StyleGAN, which resizes images itself; its argument
    `return_features` is set.

    Raises:
        UserError: there is no such file, or it is no TorchScript.
    """
    path = Path(file).expanduser()
    remedy = "the path of inception-2015-12-05.pt, as NVIDIA publishes it, or of another TorchScript module"
    if not path.is_file():
        reason = "it is a folder" if path.is_dir() else "there is no such file"
        raise UserError("FID cannot be computed.", [Violation("fid", file, reason, remedy)])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with warnings.catch_warnings():
            # Published networks are TorchScript, which torch advises against for new ones.
            warnings.simplefilter("ignore", DeprecationWarning)
            network: Any = torch.jit.load(str(path), map_location=device).eval()
    except RuntimeError as error:
        reason = f"it is no TorchScript module: {shorten(str(error), 100, placeholder=' ...')}"
        raise UserError("FID cannot be computed.", [Violation("fid", file, reason, remedy)]) from error
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
        raise UserError("FID cannot be computed: a covariance needs two images, generated and real ones.")
    (mean_a, covariance_a), (mean_b, covariance_b) = (
        (features.mean(axis=0), np.atleast_2d(np.cov(features, rowvar=False))) for features in (a, b)
    )
    # The trace of (Σ_a Σ_b)^½ is that of (Σ_a^½ Σ_b Σ_a^½)^½, which is symmetric.
    values, vectors = np.linalg.eigh(covariance_a)
    root = (vectors * values.clip(min=0) ** 0.5) @ vectors.T
    cross = np.linalg.eigvalsh(root @ covariance_b @ root).clip(min=0) ** 0.5
    return float(((mean_a - mean_b) ** 2).sum() + np.trace(covariance_a) + np.trace(covariance_b) - 2 * cross.sum())
