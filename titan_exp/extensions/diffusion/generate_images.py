"""Images from prompts, by a diffusion model with the encoders of its latent store, and their scores by networks in
local files: CLIP score (Hessel et al. 2021) for the agreement with their prompts, and Fréchet inception distance
(Heusel et al. 2017) between two sets of images.

FID = |μ_a - μ_b|² + tr(Σ_a + Σ_b - 2 (Σ_a Σ_b)^½), for Gaussians with the means and covariances of the features.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import groupby
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint
from titan_exp.config.command_line.verb_options import GenerateOptions
from titan_exp.config.errors.user_error import UserError, Violation, divisors, listed, nearest_numbers
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.schema.typed_config import load_group, typed_options
from titan_exp.extensions.diffusion import encoders, rectified_flow
from titan_exp.extensions.diffusion.config import DrawOptions, RectifiedFlowOptions
from titan_exp.extensions.diffusion.images import image_grid, save_image
from titan_exp.extensions.diffusion.latent_format import LatentFormat, format_of, read_latent_manifest
from titan_exp.extensions.diffusion.latents import LatentData, open_latents, open_store
from titan_exp.extensions.diffusion.spec import LatentInputs, latent_inputs
from titan_exp.inference.generate import DTYPES, load_sharded
from titan_exp.models.spec.lookup import model_spec
from titan_exp.parallel.mesh import Mesh
from titan_exp.trainer.forward_backward import whole_outputs

BATCH = 32  # number of images per call of the network

Features = Callable[[Sequence[np.ndarray]], np.ndarray]
"""Computes features [n, width] in fp64 of images [height, width, 3] in uint8."""


def inception_features(file: str) -> Features:
    """Feature function of a TorchScript module that takes images [n, 3, height, width] in uint8. Published distances
    use inception-2015-12-05.pt of NVIDIA's StyleGAN, which resizes images itself; its argument `return_features` is
    set. Raises UserError if there is no such file, or it is not TorchScript."""
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
    """Distance between Gaussians fitted to two sets of features [n, width]. Raises UserError if a set has fewer than
    two."""
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
    """Scores by the networks `options.clip` and `options.fid`; each is None if it is not given. Raises UserError if a
    network is missing or cannot be read."""

    def __init__(self, options: DrawOptions) -> None:
        self._clip = CLIPScore(options.clip) if options.clip else None
        self._features: Features | None = inception_features(options.fid) if options.fid else None
        self._missing = MISSING if options.captions else {}

    def lines(
        self, images: Sequence[np.ndarray], prompts: Sequence[str], real: Callable[[], Sequence[np.ndarray]]
    ) -> list[str]:
        """Lines to print about images of prompts, compared with the `real` images. They say what an evaluation lacks.
        Raises UserError if there are too few images."""
        found = dict(self._missing)
        if self._clip is not None:
            found["clip"] = f"CLIP score: {self._clip(images, prompts):.3f} over {len(images):,} images"
        if self._features is not None:
            generated, theirs = self._features(images), self._features(real())
            count = f"{len(generated):,} images and {len(theirs):,} real ones"
            width = generated.shape[1]
            few = f" (biased, because {width:,} features need more images)" if len(generated) <= width else ""
            found["fid"] = f"FID: {frechet_distance(generated, theirs):.3f} between {count}{few}"
        return list(found.values())


CONTENTS = "give the folder of a CLIPModel with its tokenizer and image processor, as transformers saves it"
"""Remedy if the folder has no CLIP model."""


class CLIPScore:
    """Mean of max(0, 100 · cosine) over images and their prompts; texts beyond CLIP's length are cut. Raises UserError
    if the package or files are missing."""

    def __init__(self, folder: str) -> None:
        path = Path(folder).expanduser()
        if not (path / "config.json").is_file():
            reason = "there is no config.json in it" if path.is_dir() else "there is no such folder"
            raise UserError("We cannot compute the CLIP score.", [Violation("clip", folder, reason, CONTENTS)])
        with encoders.loading("clip", folder, CONTENTS):
            from transformers import CLIPImageProcessor, CLIPModel

            self._tokenizer: Any = encoders.load_tokenizer(path)
            self._processor: Any = CLIPImageProcessor.from_pretrained(path, local_files_only=True)
            self._model = encoders.load_network(CLIPModel, path)
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


if TYPE_CHECKING:

    class Options(DrawOptions, GenerateOptions):
        """Options of the verb, including those for images."""

else:
    Options = GenerateOptions

ROWS = 16  # number of images that are sampled together
SPLITS = {"": "validation", "held_out": "validation", "training": "train"}  # split of the images that `captions` names
GRID_COLUMNS = 8  # number of images in a row of the grid, if each prompt has a single one


@dataclass(frozen=True)
class SamplingSetup:
    """Encoders of a latent store, and the shape of the images to draw in image tokens."""

    encoder: encoders.TextEncoder
    codec: encoders.ImageCodec
    rows: int
    columns: int
    shift: bool  # True if times are shifted by the number of image tokens


class Images:
    """Generator of images, with their scores, for `titan-exp generate`."""

    options = frozenset(field.name for field in fields(DrawOptions))
    averaged = True

    def prepared(self, source: OpenCheckpoint, options: Options, prompts: Sequence[str]) -> Sequence[str]:
        """Return the captions instead of prompts, if a split's captions are drawn. Raises UserError if the encoders are
        missing, or ranks cannot share a sequence."""
        encoded = encoders_of(source, options)
        if options.captions:
            prompts = _latents_of(source, options).splits[SPLITS[options.captions]].captions()
            if not prompts:
                reason, remedy = "the run held out no image", "use captions=training"
                raise UserError("There is nothing to draw.", [Violation("captions", options.captions, reason, remedy)])
            prompts = prompts[: options.limit or None]
        if not options.height and not options.width:
            require_even_shares(encoded.text_tokens, encoded.rows * encoded.columns, options.cp)
        return prompts

    def lines(
        self, path: Path, source: OpenCheckpoint, options: Options, prompts: Sequence[str], mesh: Mesh | None
    ) -> list[str]:
        """Draw images and write each to a file, and the grid of all to a last file; lines are paths and scores. Raises
        UserError if the latent store, or an encoder of it, is missing."""
        scores, setup = ImageScores(options), sampling_setup(source, options)
        tokens = setup.encoder.tokens + setup.rows * setup.columns
        require_even_shares(setup.encoder.tokens, setup.rows * setup.columns, options.cp)
        model = load_sharded(source, seq_len=tokens, dtype=DTYPES[options.dtype], mesh=mesh)
        images = list(draw(model, setup, options, prompts, mesh))
        if mesh is not None and torch.distributed.get_rank() > 0:
            return []
        run, folder = _run_of(source), Path(options.out or "generated").expanduser()
        if run is not None and not options.out:
            folder = run / "generated" / source.path.name
        folder.mkdir(parents=True, exist_ok=True)
        written = list[Path]()
        texts = [prompt for prompt in prompts for _ in range(options.samples)]
        for number, (image, prompt) in enumerate(zip(images, texts, strict=True)):
            place, sample = divmod(number, options.samples)
            slug = "-".join(re.findall(r"[a-z0-9]+", prompt.lower()))[:40] or "empty"
            written.append(folder / f"{place:02d}-{slug}-{options.seed}-{sample}.png")
            facts = {"prompt": prompt, "weights": source.path, "seed": options.seed, "sample": sample}
            save_image(written[-1], image, {**facts, "steps": options.steps, "guidance": options.guidance})
        columns = options.samples if options.samples > 1 else min(GRID_COLUMNS, len(images))
        save_image(folder / "grid.png", image_grid(images, texts, columns), {"weights": source.path})

        def real() -> list[np.ndarray]:
            """Images of the split, decoded from the means of their latents."""
            split = _latents_of(source, options).splits[SPLITS[options.captions]]
            places = range(len(split))
            return [setup.codec.decode(split[at].latents[None], *split.shape(at))[0] for at in places]

        return [*map(str, (*written, folder / "grid.png")), *scores.lines(images, texts, real)]


def draw(
    model: torch.nn.Module, setup: SamplingSetup, options: Options, prompts: Sequence[str], mesh: Mesh | None = None
) -> Iterator[np.ndarray]:
    """Draw images [height, width, 3] in uint8, `options.samples` for each prompt. A sample's initial noise is a
    function of the seed and the sample's number only; captions of a split each have their own noise."""
    latents, device = _inputs(model.spec), next(model.parameters()).device
    image_tokens = setup.rows * setup.columns
    scale = options.model_guidance if latents.guidance else None
    times = rectified_flow.sampling_times(options.steps, image_tokens, shift=setup.shift)
    outputs = partial(whole_outputs, model, mesh=mesh)
    empty = rectified_flow.conditions(setup.encoder, [""], setup.rows, setup.columns, scale).to(device)
    jobs = [(prompt, sample) for prompt in prompts for sample in range(options.samples)]
    if options.captions:
        jobs = [(prompt, number) for number, (prompt, _) in enumerate(jobs)]
    for first in range(0, len(jobs), ROWS):
        texts, samples = zip(*jobs[first : first + ROWS], strict=True)
        given = rectified_flow.conditions(setup.encoder, texts, setup.rows, setup.columns, scale).to(device)
        predict = rectified_flow.guided_velocity(outputs, given, empty, options.guidance)
        noise = rectified_flow.sampling_noise(options.seed, samples, image_tokens, latents.patch_dim)
        found = rectified_flow.euler(predict, noise.to(device), times)
        yield from setup.codec.decode(found.cpu().numpy(), setup.rows, setup.columns)


def require_even_shares(text: int, image: int, cp: int) -> None:
    """Check that context-parallel ranks can have equally many text tokens, and equally many image tokens. Raises
    UserError if they cannot."""
    common = math.gcd(text, image)
    if common % cp:
        reason = f"a sequence has {text} text and {image} image tokens, and cp must divide both"
        near = listed(nearest_numbers(cp, divisors(common)))
        raise UserError("We cannot draw these images.", [Violation("cp", cp, reason, f"nearest: cp={near}")])


def sampling_setup(source: OpenCheckpoint, options: Options) -> SamplingSetup:
    """Encoders for a model, from `options.store` or the store of its run. Raises UserError if there is no store, or its
    sizes or those of the images do not fit."""
    run, encoded = _run_of(source), encoders_of(source, options)
    latents, violations = _inputs(model_spec(source.model)), list[Violation]()
    sizes = {
        "patch_dim": (latents.patch_dim, encoded.channels),
        "text_dim": (latents.text_dim, encoded.text_dim),
        "pooled_dim": (latents.pooled_dim, encoded.pooled_dim),
    }
    for key, (own, stored) in sizes.items():
        if own != stored:
            reason = f"the store has {key}={stored}, and {source.model.name} needs {own}"
            remedy = "give the store that the model was trained on: store=FOLDER"
            violations.append(Violation("store", options.store, reason, remedy))
    if violations:
        raise UserError("We cannot draw these images.", violations)
    with encoders.encoders_of_samples():
        codec, encoder = encoders.image_codec(encoded.latents), encoders.text_encoder(encoded)
    grid = [encoded.rows, encoded.columns]
    for place, (key, pixels) in enumerate((("height", options.height), ("width", options.width))):
        if pixels % codec.token_size:
            near = max(1, round(pixels / codec.token_size)) * codec.token_size
            reason = f"an image token is {codec.token_size} pixels wide"
            violations.append(Violation(key, pixels, reason, f"nearest: {key}={near}"))
        elif pixels:
            grid[place] = pixels // codec.token_size
    if violations:
        raise UserError("We cannot draw these images.", violations)
    shift = options.shift == "on" or (options.shift == "training" and _trained_shift(run))
    return SamplingSetup(encoder, codec, grid[0], grid[1], shift)


def encoders_of(source: OpenCheckpoint, options: Options) -> LatentFormat:
    """Encoders of `options.store`, or of the data that the source's run was trained on. Raises UserError if there is no
    such store, or an encoder's folder is missing."""
    if options.store:
        return read_latent_manifest(options.store)
    run = _run_of(source)
    if run is None:
        reason = "these weights do not come from a run that names their encoders"
        remedy = "name a latent store with the encoders that they need: store=FOLDER"
        raise UserError("We cannot encode the prompts.", [Violation("store", "", reason, remedy)])
    data = _data_of(run)
    try:
        return format_of(data)
    except UserError as error:
        if data.source == "images":
            raise
        reason = f"{run} trained on this store, which names the encoders, and it is not there"
        remedy = "say where it is now: store=FOLDER"
        raise UserError(
            "We cannot encode the prompts.", [Violation("store", str(data.paths[0]), reason, remedy)]
        ) from error


def _latents_of(source: OpenCheckpoint, options: Options) -> LatentData:
    encoders_of(source, options)  # its errors say what is missing
    run = _run_of(source)
    return open_store(options.store) if options.store or run is None else open_latents(_data_of(run))


def _data_of(run: Path) -> DataConfig:
    return load_group(run / "config.yaml", "data", imports=())


def _trained_shift(run: Path | None) -> bool:
    """True if the run shifted times by the number of image tokens; also True for weights without a run."""
    if run is None:
        return True
    training = load_group(run / "config.yaml", "training", imports=())
    if training.objective != "rectified_flow":
        return False
    return typed_options(RectifiedFlowOptions, training.objective_options, "training.objective_options").shift


def _inputs(spec: Any) -> LatentInputs:
    latents = latent_inputs(spec)
    assert latents is not None, "a model that makes images"
    return latents


def _run_of(source: OpenCheckpoint) -> Path | None:
    """Run folder of a checkpoint; None for other weights."""
    run = source.path.parent.parent
    return run if source.format == "dcp" and (run / "config.yaml").is_file() else None
