"""Diffusion rules: model, objective and latent store must fit together, and their sizes agree."""

import math
from collections.abc import Iterator
from glob import glob
from pathlib import Path

from titan_exp.config.errors.user_error import UserError, Violation, listed
from titan_exp.config.groups.parallelism import BLOCK, ParallelismConfig, QuantizationConfig
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.groups.training import EvaluationConfig, TrainingConfig
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.foreign_code import described
from titan_exp.config.schema.typed_config import typed_options
from titan_exp.extensions.diffusion.config import READ_FROM_PATHS, RectifiedFlowOptions, images_of
from titan_exp.extensions.diffusion.latent_format import LatentManifest, format_of
from titan_exp.extensions.diffusion.spec import latent_inputs
from titan_exp.models.spec.model_spec import EVERY_TOKEN, ModelSpec
from titan_exp.rules.quantization import RECIPE, quantized_linears, scaling_block
from titan_exp.rules.rule import Refuse, rules

_OBJECTIVE = "rectified_flow"
_EXAMPLES = {
    "folder": "use data.images=folder data.paths='[photos]'",
    "huggingface": "use data.images=huggingface data.paths='[OWNER/NAME]', or a local folder",
    "webdataset": "use data.images=webdataset data.paths='[shards/*.tar]'",
}


def options_are_known(training: TrainingConfig) -> Iterator[Violation]:
    """Options of the objective must have its names and types."""
    try:
        typed_options(RectifiedFlowOptions, training.objective_options, "training.objective_options")
    except UserError as error:
        yield from error.violations


def store_fits(
    spec: ModelSpec, data: DataConfig, training: TrainingConfig, evaluation: EvaluationConfig
) -> Iterator[Violation]:
    """The store, or the encoders' folders, must be complete. Samples must have the sizes that the model takes, and a
    store needs a validation split if the run evaluates."""
    latents = latent_inputs(spec)
    if latents is None:
        remedy = "use data=tokens, or model=flux_laptop"
        yield Violation("data.source", data.source, "it holds latents, and the model takes tokens", remedy)
        return
    if data.source == "latents" and len(data.paths) != 1:
        reason = "a run reads exactly one latent store"
        yield Violation("data.paths", data.paths, reason, "name one, as in data.paths='[stores/glyphs]'")
        return
    try:
        encoded = format_of(data)
    except UserError as error:
        yield from error.violations
        return
    sizes = {
        "patch_dim": (latents.patch_dim, encoded.channels),
        "text_tokens": (latents.text_tokens, encoded.text_tokens),
        "text_dim": (latents.text_dim, encoded.text_dim),
        "pooled_dim": (latents.pooled_dim, encoded.pooled_dim),
    }
    name = f"the store {data.paths[0]}" if data.source == "latents" else f"data.images={images_of(data)}"
    for key, (own, stored) in sizes.items():
        if own != stored:
            yield Violation(f"model.{key}", own, f"{name} has {stored}", f"use model.{key}={stored}")
    if training.seq_len != encoded.tokens:
        reason = f"a sample of {name} has {encoded.text_tokens} text and {encoded.rows}x{encoded.columns} image tokens"
        yield Violation("training.seq_len", training.seq_len, reason, f"use training.seq_len={encoded.tokens}")
    if isinstance(encoded, LatentManifest) and evaluation.enabled and not encoded.samples["validation"]:
        reason = f"{data.paths[0]} has no validation samples"
        yield Violation("evaluation.every", evaluation.every, reason, "use evaluation.every=0")


def _has_latents(data: DataConfig) -> bool:
    return described(data.source).holds == "latents"


def images_are_given(data: DataConfig) -> Iterator[Violation]:
    """Images need a kind, and a path if they are read from one."""
    images = images_of(data)
    example = _EXAMPLES.get(images or "", "")
    on_the_hub = images == "huggingface" and not "".join(data.paths[:1]).startswith((".", "/", "~"))
    if images is None:
        yield Violation("data.images", None, "the source images needs a kind of images", _EXAMPLES["folder"])
    elif images not in READ_FROM_PATHS and data.paths:
        remedy = f"use data.paths='[]', or {_EXAMPLES['folder'].removeprefix('use ')}"
        yield Violation("data.paths", data.paths, f"titan_exp draws {images} itself, and reads no files", remedy)
    elif images in READ_FROM_PATHS and len(data.paths) != 1:
        yield Violation("data.paths", data.paths, f"data.images={images} reads exactly one path", example)
    elif images in READ_FROM_PATHS and not on_the_hub and not glob(str(Path(data.paths[0]).expanduser())):
        yield Violation("data.paths", data.paths[0], "no file or folder has this name", example)


def tokens_divide(spec: ModelSpec, parallelism: ParallelismConfig, training: TrainingConfig) -> Iterator[Violation]:
    """Ranks that share a sequence must have equally many of its text tokens, and of its image tokens."""
    latents = latent_inputs(spec)
    if latents is None:
        return
    axes = {"cp": parallelism.cp, "tp": parallelism.tp if parallelism.sequence_parallel else 1}
    text = latents.text_tokens
    image = max(0, training.seq_len - text)
    common = math.gcd(text, image)
    if common % math.prod(axes.values()):
        used = {f"parallelism.{axis}": degree for axis, degree in axes.items() if degree > 1}
        named = listed([f"{field}={degree}" for field, degree in used.items()], "and")
        reason = f"a sequence has {text} text and {image} image tokens, which {named} cannot both share evenly"
        remedy = f"use degrees whose product divides {common}"
        remedy += ", or parallelism.sequence_parallel=false" if axes["tp"] > 1 else ""
        field, degree = next(iter(used.items()))
        yield Violation(field, degree, reason, remedy)


def quantized_streams_divide(
    spec: ModelSpec, quantization: QuantizationConfig, layout: ResolvedLayout, device: str
) -> Iterator[Violation]:
    """Tokens that a quantized linear reads (text, image or both) must form whole scaling blocks."""
    config, latents = quantization, latent_inputs(spec)
    if latents is None or config.recipe in ("none", "float8_rowwise_gw_hp"):
        return
    block = scaling_block(config, device)
    seq_len, rows, cp = layout.training.seq_len, layout.micro_batch_size, layout.parallelism.cp
    spans = {linear.tokens for _, linear in quantized_linears(spec, config)}
    text, image = latents.text_tokens, seq_len - latents.text_tokens
    counts = [round(span.share(seq_len) * seq_len) for span in spans]
    if config.recipe == "nvfp4":
        # For a layer that reads both, gathered tokens come by rank: text and image of the first, then of the second.
        axes = {"cp": cp, "tp": layout.parallelism.tp if layout.parallelism.sequence_parallel else 1}
        shares = math.prod(axes.values()) if EVERY_TOKEN in spans else cp
        runs = (text, image) if EVERY_TOKEN in spans else counts
        if any(run % (BLOCK["nvfp4"] * shares) for run in runs):
            degrees = listed([f"parallelism.{axis}={degree}" for axis, degree in axes.items() if degree > 1], "and")
            among = f", divided by {degrees}" if degrees else ""
            reason = f"it transforms {BLOCK['nvfp4']} consecutive tokens together, and a sequence has {text} text and "
            reason += f"{image} image tokens{among}"
            remedy = f"make both a multiple of {BLOCK['nvfp4'] * shares} (model.text_tokens, size of the images)"
            remedy += ", let fewer ranks share a sequence" if among else ""
            yield Violation(RECIPE, "nvfp4", reason, f"{remedy}, or use quantization=mxfp8")
            return
    if any(rows * count % (block * cp) for count in counts):
        among = f" on each of parallelism.cp={cp} ranks" if cp > 1 else ""
        reason = f"{config.recipe} quantizes blocks of {block} tokens{among}, and {rows} sequences have {rows * text} "
        few = block * cp // math.gcd(block * cp, *counts)
        remedy = f"use a multiple of {few}"
        if len(spans) > 1 and EVERY_TOKEN in spans and rows * seq_len % (block * cp) == 0:
            remedy += ", or quantization.filter=['*.text.*', '*.image.*']"
        yield Violation("training.micro_batch_size", rows, f"{reason}of text and {rows * image} of the image", remedy)


RULES = (
    *rules(tokens_divide),
    *rules(options_are_known, when=lambda training: training.objective == _OBJECTIVE),
    *rules(images_are_given, when=lambda data: "images" in described(data.source).reads),
    *rules(store_fits, when=_has_latents),
    *rules(
        Refuse(
            "data.source",
            # Language modeling is refused with the same remedy.
            lambda data, spec, training: (
                latent_inputs(spec) is not None and not _has_latents(data) and training.objective == _OBJECTIVE
            ),
            "it has documents, and {model.name} takes latents",
            "use data=latents data.paths='[stores/glyphs]', which titan-exp encode writes, or data=images",
        ),
        Refuse(
            "training.objective",
            lambda training, spec: training.objective == _OBJECTIVE and latent_inputs(spec) is None,
            "it is for latents, and {model.name} takes tokens",
            "use training.objective=language_modeling, or model=flux_laptop",
        ),
        Refuse(
            "tracking.images_every",
            lambda tracking, training: tracking.images_every and training.objective != _OBJECTIVE,
            "{training.objective} does not train a model of images",
            "use tracking.images_every=0",
        ),
        Refuse(
            "compile.cuda_graphs",
            lambda compile, spec: compile.cuda_graphs and latent_inputs(spec) is not None,
            "we cannot capture batches of latents in a CUDA graph",
            "use compile.cuda_graphs=false",
        ),
        Refuse(
            "data.preview",
            lambda data, spec: data.preview and latent_inputs(spec) is not None,
            "a preview decodes tokens, and {model.name} takes latents",
            "use data.preview=null",
        ),
    ),
)
LAYOUT_RULES = rules(quantized_streams_divide)
EVALUATION_RULES = RULES
