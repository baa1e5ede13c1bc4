"""Scores of generated images by networks in local files: CLIP score and Fréchet inception distance."""

from collections.abc import Callable, Sequence

import numpy as np

from titan_exp.config.command_line.verb_options import GenerateOptions
from titan_exp.data.latent_store.image_codec import ImageCodec
from titan_exp.data.latent_store.samples import LatentSamples
from titan_exp.inference.clip_score import CLIPScore
from titan_exp.inference.frechet_distance import Features, frechet_distance, inception_features

MISSING = {
    "clip": "CLIP score: not computed; clip=FOLDER of a CLIPModel as transformers saves it, with its tokenizer",
    "fid": "FID: not computed; fid=FILE of a TorchScript Inception, such as inception-2015-12-05.pt",
}


class ImageScores:
    """Networks of `options.clip` and `options.fid`, each None if it is not given.

    Raises:
        UserError: a network is missing or cannot be read.
    """

    def __init__(self, options: GenerateOptions) -> None:
        self._clip = CLIPScore(options.clip) if options.clip else None
        self._features: Features | None = inception_features(options.fid) if options.fid else None
        self._evaluates = bool(options.captions)

    def lines(
        self, images: Sequence[np.ndarray], prompts: Sequence[str], real: Callable[[], Sequence[np.ndarray]]
    ) -> list[str]:
        """Lines to print about images of prompts, beside the `real` images. An evaluation says what it lacks.

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
            few = f"; fewer than {width:,} features, so it is biased" if len(generated) <= width else ""
            found.append(f"FID: {frechet_distance(generated, theirs):.3f} between {count}{few}")
        elif self._evaluates:
            found.append(MISSING["fid"])
        return found


def real_images(samples: LatentSamples, codec: ImageCodec) -> list[np.ndarray]:
    """Images [height, width, 3] of a split, decoded from the means of their latents."""
    return [codec.decode(samples[index].latents[None], *samples.shape(index))[0] for index in range(len(samples))]
