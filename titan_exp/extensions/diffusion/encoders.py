"""Frozen encoders of captioned images: image codecs (pixels, an autoencoder), text encoders (hashed words, T5 and
CLIP), and the order of samples. Networks of diffusers and transformers come from local folders."""

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch

from titan_exp.config.data_files import SPLITS, unit_hash
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.data.batch import Permutation, keyed_generator
from titan_exp.extensions.diffusion import latent_format
from titan_exp.extensions.diffusion.images import Bucket, CaptionedImages, fit, nearest_bucket


@contextmanager
def loading(option: str, folder: str, contents: str) -> Iterator[None]:
    """Add the folder of an option to errors of packages and files in the `with` block; `contents` is the remedy. Raises
    UserError if a package is not installed, or a file is missing, damaged or of something else."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # packages set the levels of their loggers when they are imported
    try:
        yield
    except ImportError as error:
        remedy = "pip install 'titan_exp[diffusion]'"
        raise _refusal(option, folder, f"you have not installed a package that reads it: {error}", remedy) from error
    except UserError:
        raise
    except Exception as error:  # files of many formats
        reason = f"it does not load: {shorten(str(error), 160, placeholder=' ...')}"
        raise _refusal(option, folder, reason, contents) from error
    finally:
        logging.disable(level)


@contextmanager
def encoders_of_samples() -> Iterator[None]:
    """Explain, for an encoder that cannot be loaded, that the samples of a store or a run name it, so options cannot
    replace it. Raises UserError if an encoder cannot be loaded."""
    try:
        yield
    except UserError as error:
        remedy = "put the folder that encoded the samples back in this place (a link will do)"
        found = [replace(violation, remedy=remedy) for violation in error.violations]
        raise UserError("We cannot load an encoder of the samples.", found) from error


def load_network(kind: Any, path: Path) -> Any:
    """Load a network of a class with `from_pretrained`, in evaluation mode, on the GPU if there is one. Raises
    ValueError if weights are missing, for which the class would take random ones."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    network, found = kind.from_pretrained(path, local_files_only=True, output_loading_info=True)
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"{path.name} has no weights for {missing[0]} and {len(missing) - 1:,} others")
    return network.eval().to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def load_tokenizer(path: Path) -> Any:
    """Load the tokenizer of a folder. Raises ValueError if its vocabulary is missing, for which transformers would take
    a few special tokens."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    files = dict(tokenizer.vocab_files_names)
    whole = files.pop("tokenizer_file", "tokenizer.json")
    if not (path / whole).is_file() and not (files and all((path / name).is_file() for name in files.values())):
        raise ValueError(f"{path.name} has no {whole}, and no vocabulary in {' and '.join(files.values())}")
    return tokenizer


def _refusal(option: str, folder: str, reason: str, remedy: str) -> UserError:
    return UserError("We cannot use this frozen network.", [Violation(option, folder, reason, remedy)])


class ImageCodec(ABC):
    """Codec between images [n, height, width, 3] in uint8 and tokens [n, rows · columns, channels] in fp32. The
    description has `posterior` if images have a distribution of latents."""

    token_size: int  # height and width of a token in pixels
    channels: int  # features of a token
    description: Mapping[str, Any]  # entry in the manifest, from which `image_codec` builds it again

    @abstractmethod
    def encode(self, images: np.ndarray) -> tuple[np.ndarray, ...]:
        """Encode images whose height and width are multiples of `token_size`: as latents, or as means and standard
        deviations of their posterior."""

    @abstractmethod
    def decode(self, tokens: np.ndarray, rows: int, columns: int) -> np.ndarray:
        """Decode tokens to images."""


class Pixels(ImageCodec):
    """Image codec that scales pixels to [-1, 1] and divides them into patches."""

    def __init__(self, patch: int) -> None:
        self.token_size = patch
        self.channels = latent_format.COLOURS * patch**2
        self.description = {"name": latent_format.PIXELS, "patch": patch}

    def encode(self, images: np.ndarray) -> tuple[np.ndarray, ...]:
        return (to_tokens(images / np.float32(127.5) - 1, self.token_size),)

    def decode(self, tokens: np.ndarray, rows: int, columns: int) -> np.ndarray:
        return to_uint8(from_tokens(tokens, rows, columns, self.token_size))


def to_tokens(images: np.ndarray, patch: int) -> np.ndarray:
    """Cut images [n, height, width, channels] into patches [n, rows · columns, channels · patch²], fp32."""
    n, height, width, channels = images.shape
    patches = images.reshape(n, height // patch, patch, width // patch, patch, channels).transpose(0, 1, 3, 5, 2, 4)
    return patches.reshape(n, -1, channels * patch * patch).astype(np.float32)


def from_tokens(tokens: np.ndarray, rows: int, columns: int, patch: int) -> np.ndarray:
    """Join patches [n, rows · columns, channels · patch²] to images [n, height, width, channels]."""
    patches = tokens.reshape(len(tokens), rows, columns, -1, patch, patch).transpose(0, 1, 4, 2, 5, 3)
    return patches.reshape(len(tokens), rows * patch, columns * patch, -1)


def to_uint8(images: np.ndarray) -> np.ndarray:
    """Convert images in [-1, 1] to uint8; other values are clipped."""
    return ((images + 1) * 127.5).round().clip(0, 255).astype(np.uint8)


class Autoencoder(ImageCodec):
    """Image codec: latents are (z - shift) · scale in patches, for z of the posterior. Raises UserError if the package
    or the files are missing."""

    def __init__(self, folder: str) -> None:
        self.description = latent_format.autoencoder_description(folder, latent_format.autoencoder_config(folder))
        self._shift, self._scale = self.description["shift"], self.description["scale"]
        with loading("latents", folder, "give the folder vae of a FLUX.1 pipeline, or use latents=pixels"):
            from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

            self._model = load_network(AutoencoderKL, Path(folder).expanduser())
        self._device = self._model.device
        config = self._model.config
        self.token_size = latent_format.LATENT_PATCH * 2 ** (len(config.block_out_channels) - 1)
        self.channels = config.latent_channels * latent_format.LATENT_PATCH**2

    def encode(self, images: np.ndarray) -> tuple[np.ndarray, ...]:
        # Images go one by one: kernels round other batch sizes differently, and samples would depend on the layout.
        moments = zip(*(self._moments(image) for image in images), strict=True)
        return tuple(to_tokens(np.stack(moment), latent_format.LATENT_PATCH) for moment in moments)

    def decode(self, tokens: np.ndarray, rows: int, columns: int) -> np.ndarray:
        latents = from_tokens(tokens, rows, columns, latent_format.LATENT_PATCH)
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


def image_codec(description: Mapping[str, Any]) -> ImageCodec:
    """Build the codec from a manifest's entry `latents`. Raises UserError if its package or files are missing."""
    if description["name"] == latent_format.AUTOENCODER:
        return Autoencoder(description["folder"])
    return Pixels(description["patch"])


class TextEncoder(ABC):
    """Frozen encoder of texts."""

    tokens: int  # number of states per text
    dim: int  # width of a state
    pooled_dim: int  # width of the pooled embedding
    description: Mapping[str, Any]  # entry in the manifest, from which `text_encoder` builds it again

    @abstractmethod
    def __call__(self, caption: str) -> tuple[np.ndarray, np.ndarray]:
        """States [tokens, dim] and pooled embedding [pooled_dim], in fp32."""


class HashedWords(TextEncoder):
    """Caption encoder by hashed words; words are letters and digits, in any case."""

    def __init__(self, tokens: int, dim: int, pooled_dim: int, seed: int) -> None:
        self.tokens, self.dim, self.pooled_dim, self.seed = tokens, dim, pooled_dim, seed
        self.description = {"name": latent_format.HASHED_WORDS, "seed": seed}
        half = -(-dim // 2)
        angles = np.arange(tokens)[:, None] * 10_000.0 ** (-np.arange(half) / half)
        self._places = np.concatenate((np.cos(angles), np.sin(angles)), axis=1)[:, :dim]

    def __call__(self, caption: str) -> tuple[np.ndarray, np.ndarray]:
        """States [tokens, dim] of the first words, with zeros after the last one; and the sum of all words' vectors
        over the root of their number [pooled_dim], in fp32."""
        words = re.findall(r"\w+", caption.lower())
        states, pooled = np.zeros((self.tokens, self.dim)), np.zeros(self.pooled_dim)
        for place, word in enumerate(words[: self.tokens]):
            states[place] = self._vector(word, "state", self.dim) + self._places[place]
        for word in words:
            pooled += self._vector(word, "pooled", self.pooled_dim) / len(words) ** 0.5
        return states.astype(np.float32), pooled.astype(np.float32)

    def _vector(self, word: str, purpose: str, width: int) -> np.ndarray:
        return keyed_generator(self.seed, 0, f"{purpose}/{word}").standard_normal(width)


class T5AndCLIP(TextEncoder):
    """Frozen caption encoder by T5 and CLIP; `tokens` is the number of T5's states, including padding, which is not
    masked. Raises UserError if the package or the files are missing."""

    def __init__(self, folder: str, tokens: int) -> None:
        clip, clip_tokenizer, t5, t5_tokenizer = latent_format.text_folders(folder)
        self.description = {"name": latent_format.T5_AND_CLIP, "folder": latent_format.absolute(folder)}
        with loading("texts", folder, "give the folder of a FLUX.1 pipeline of diffusers, or use texts=hashed_words"):
            from transformers import CLIPTextModel, T5EncoderModel

            self._tokenizers: list[Any] = [load_tokenizer(path) for path in (clip_tokenizer, t5_tokenizer)]
            self._clip, self._t5 = load_network(CLIPTextModel, clip), load_network(T5EncoderModel, t5)
        self._device = self._t5.device
        self.tokens, self.dim, self.pooled_dim = tokens, self._t5.config.d_model, self._clip.config.hidden_size

    @torch.no_grad()
    def __call__(self, caption: str) -> tuple[np.ndarray, np.ndarray]:
        states = self._t5(self._ids(1, caption, self.tokens)).last_hidden_state
        pooled = self._clip(self._ids(0, caption, self._clip.config.max_position_embeddings)).pooler_output
        return states[0].float().cpu().numpy(), pooled[0].float().cpu().numpy()

    def _ids(self, which: int, caption: str, length: int) -> torch.Tensor:
        tokenizer = self._tokenizers[which]
        found = tokenizer([caption], padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        return found.input_ids.to(self._device)


def text_encoder(encoded: latent_format.LatentFormat) -> TextEncoder:
    """Build the text encoder of a store, or of images encoded in training. Raises UserError if its package or files are
    missing."""
    texts = encoded.texts
    if texts["name"] == latent_format.T5_AND_CLIP:
        return T5AndCLIP(texts["folder"], encoded.text_tokens)
    return HashedWords(encoded.text_tokens, encoded.text_dim, encoded.pooled_dim, texts["seed"])


@dataclass(frozen=True)
class Encoders:
    """Frozen encoders."""

    images: ImageCodec
    texts: TextEncoder

    @classmethod
    def build(cls, encoded: latent_format.LatentFormat) -> "Encoders":
        """Load encoders. Raises UserError if their packages or files are missing."""
        return cls(image_codec(encoded.latents), text_encoder(encoded))

    def encode(self, images: CaptionedImages, indices: Sequence[int], bucket: Bucket) -> tuple[np.ndarray, ...]:
        """Latents, text states and pooled embeddings for images of a bucket, and standard deviations if there is a
        posterior. Raises UserError if an image is damaged."""
        pixels = np.stack([fit(images.image(index), bucket, self.images.token_size) for index in indices])
        states, pooled = zip(*(self.texts(images.caption(index)) for index in indices), strict=True)
        latents, *deviations = self.images.encode(pixels)
        return latents, np.stack(states), np.stack(pooled), *deviations


def order_samples(
    images: CaptionedImages, buckets: list[Bucket], validation_fraction: float, seed: int
) -> dict[str, list[tuple[Bucket, list[int]]]]:
    """Shuffled indices of the images of each split by bucket; captions decide which are held out."""
    order = Permutation(len(images), "images", seed)
    groups = {split: {bucket: list[int]() for bucket in buckets} for split in SPLITS}
    for index in (order[rank] for rank in range(len(images))):
        held_out = unit_hash(images.caption(index)) < validation_fraction
        bucket = nearest_bucket(*images.size(index), buckets) if len(buckets) > 1 else buckets[0]
        groups["validation" if held_out else "train"][bucket].append(index)
    return {split: list(by_bucket.items()) for split, by_bucket in groups.items()}
