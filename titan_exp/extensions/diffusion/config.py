"""Options of captioned images and their encoders, of `titan-exp encode` and of `data.options` of `data.source=images`;
those of the objective; keys of the groups `data` and `tracking`; and options of `titan-exp generate`."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Interval

from titan_exp.config.groups.types import Count, NonNegativeFloat, PositiveFloat, PositiveInt, Share

ImageKind = Literal["emoji", "folder", "glyphs", "huggingface", "webdataset"]
"""Kind of captioned images."""
READ_FROM_PATHS = ("folder", "huggingface", "webdataset")
"""Kinds that are read from files or the hub; the others are rendered."""


@dataclass(frozen=True)
class ImageSource:
    """Kind and place of captioned images."""

    images: ImageKind = "glyphs"
    """Kind of images. `emoji` are those of the Debian package fonts-noto-color-emoji, with captions such as "Thumbs up
    sign, dark skin tone". `glyphs` are characters in the faces of the fonts that matplotlib brings along, with captions
    such as "Latin small letter a, DejaVu Sans Bold Oblique". The others are read from `paths`."""
    paths: str = ""
    """Folder of images, whose captions are in NAME.txt or in a file of JSON lines or CSV with `file_name`; WebDataset
    shards, as in 'shards/*.tar'; or OWNER/NAME or the local folder of a Hugging Face data set."""


@dataclass(frozen=True)
class ImageOptions:
    """Captions, shapes, encoders and order of images."""

    caption_key: str = "text"
    """Key or column of captions in JSON lines, CSV, KEY.json of WebDataset, or a Hugging Face data set."""
    image_key: str = "image"
    """Column of images in a Hugging Face data set."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    size: PositiveInt = 32
    """Height and width of square images in pixels."""
    max_aspect: Annotated[float, Interval(ge=1)] = 1.0
    """Largest ratio of an image's sides. Images go to the nearest of the shapes within it that have as many tokens as a
    square, and 1 crops all to squares. Sides of many divisors have many shapes: 48 tokens also have 36 x 64 and 32 x
    72."""
    latents: str = "pixels"
    """Encoder of images: `pixels`, or the folder of an AutoencoderKL as diffusers saves it."""
    patch: PositiveInt = 4
    """Height and width of an image token in pixels; `model.patch_dim` is 3 · patch². Autoencoders have a patch of their
    own."""
    texts: str = "hashed_words"
    """Encoder of captions: `hashed_words`, a frozen random vector for each word, or the folder of a FLUX.1 pipeline
    with its T5 and CLIP as diffusers saves it."""
    text_tokens: PositiveInt = 16
    """Number of words of a caption, or of tokens of T5. It is `model.text_tokens` of the model that is trained."""
    text_dim: PositiveInt = 64
    """Width of a word's state, which is `model.text_dim`."""
    pooled_dim: PositiveInt = 64
    """Width of a caption's pooled embedding, which is `model.pooled_dim`."""
    seed: Count = 0
    """Seed of the words' vectors and of the order of samples."""


@dataclass(frozen=True)
class EncodeOptions(ImageOptions, ImageSource):
    """Options of `titan-exp encode`."""

    out: str = ""
    """Folder of the store to make, such as stores/glyphs."""
    dtype: Literal["fp16", "fp32"] = "fp32"
    """Dtype of the store's arrays. fp16 takes half the disk."""
    validation_fraction: Share = 0.05
    """Fraction of the images that are held out for evaluation, chosen by caption."""
    shard_samples: PositiveInt = 4096
    """Number of samples after which a shard is full and safe. After an interruption, the same command resumes."""
    check: str = ""
    """Folder of a finished store to read and compare with its checksums, instead of making one."""


@dataclass(frozen=True)
class RectifiedFlowOptions:
    """Times, dropout of texts, and guidance."""

    times: Literal["logit_normal", "mode", "uniform"] = "logit_normal"
    """Distribution of times: `logit_normal` is the sigmoid of a standard normal, `mode` is SD3's with a mode in the
    middle, and `uniform` (Esser et al. 2024, arXiv 2403.03206, section 3.1)."""
    shift: bool = False
    """True if times are shifted towards noise by the number of image tokens, as Flux shifts them in sampling."""
    text_dropout: Share = 0.1
    """Fraction of samples whose text states are those of the empty text, for classifier-free guidance."""
    pooled_dropout: Share = 0.1
    """Fraction of samples whose pooled embeddings are those of the empty text, drawn independently."""
    guidance: tuple[PositiveFloat, PositiveFloat] = (3.5, 3.5)
    """Bounds between which the guidance scale is drawn uniformly, for a model that reads one. Training such a model
    from the data, not from a guided teacher, teaches it nothing about guidance."""


@dataclass(frozen=True)
class ImageData:
    """Keys of the group `data`."""

    images: ImageKind | None = None
    """Kind of images of source `images`, which encodes them during training: `emoji`, `folder`, `glyphs`, `huggingface`
    or `webdataset`; null for other sources. E.g. `data.images=folder`."""


def images_of(data: object) -> ImageKind | None:
    """Kind of images of the group `data`."""
    return data.images if isinstance(data, ImageData) else None


@dataclass(frozen=True)
class ImageTracking:
    """Keys of the group `tracking`."""

    images_every: Count = 0
    """Steps between grids of images that a diffusion model draws, for the captions of 8 training samples and of 8
    held-out ones; 0 draws none.

    They are in the run's `images/`, TensorBoard and W&B. E.g. `tracking.images_every=500`."""


def asked(experiment: Any) -> bool:
    """True for a run that draws images while it trains."""
    return experiment.tracking.images_every > 0


@dataclass(frozen=True)
class DrawOptions:
    """Options of `titan-exp generate` for images."""

    steps: PositiveInt = 50
    """Images: number of Euler steps from noise to data."""
    guidance: NonNegativeFloat = 4.0
    """Images: scale of classifier-free guidance. 1 is without it, and takes half the time."""
    model_guidance: PositiveFloat = 3.5
    """Images: guidance scale that a model distilled for guidance reads (`model.guidance_embedding`), as FLUX.1 dev
    does. guidance=1 goes with it."""
    samples: PositiveInt = 1
    """Images: number of images for each prompt, each from noise of its own."""
    height: Count = 0
    """Images: height in pixels. 0 is that of the store's squares, and so for the width."""
    width: Count = 0
    """Images: width in pixels."""
    shift: Literal["training", "on", "off"] = "training"
    """Images: shift of times towards noise by the number of image tokens, on, off, or as in the run's training."""
    store: str = ""
    """Images: latent store whose encoders read the prompt and decode the image; empty is that of the run."""
    captions: Literal["", "held_out", "training"] = ""
    """Images: captions to draw beside prompts, those of the run's held-out images or of those it was trained on."""
    limit: Count = 0
    """Images: largest number of `captions` to draw, the first; 0 is all."""
    clip: str = ""
    """Images: folder of a CLIPModel of transformers, with its tokenizer and image processor. It prints the CLIP
    score."""
    fid: str = ""
    """Images: file of a TorchScript Inception, such as inception-2015-12-05.pt. It prints the Fréchet inception
    distance to the images of `captions` (all of its split, and held-out ones without it), decoded from their
    latents."""
    out: str = ""
    """Images: folder to write them to; empty is `generated/step-…` of the run, and `generated` here for other
    weights."""
    cp: PositiveInt = 1
    """Images: context-parallel degree, a process per GPU beside those of `tp`. Each computes a part of the text tokens
    and of the image tokens, and the image stays the same."""
