"""Diffusion rules: model, objective and latent store belong together, and their sizes agree."""

import math
from collections.abc import Iterator

from titan_exp.config.errors.did_you_mean import listed
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.data import DataConfig
from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.objectives.rectified_flow import RectifiedFlowOptions
from titan_exp.config.paths.latent_store_manifest import read_latent_manifest
from titan_exp.config.schema.typed_options import typed_options
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.rules.rule import Refuse, rules

_OBJECTIVE = "rectified_flow"


def options_are_known(training: TrainingConfig) -> Iterator[Violation]:
    """Options of the objective have its names and types."""
    try:
        typed_options(RectifiedFlowOptions, training.objective_options, "training.objective_options")
    except UserError as error:
        yield from error.violations


def store_fits(spec: ModelSpec, data: DataConfig, training: TrainingConfig) -> Iterator[Violation]:
    """The store is complete, its samples have the sizes that the model takes, and it has a validation split if the run
    evaluates."""
    if spec.latents is None:
        yield Violation("data.source", data.source, "the model takes tokens", "data=tokens, or model=flux_laptop")
        return
    if len(data.paths) != 1:
        yield Violation("data.paths", data.paths, "one latent store is read", "data.paths='[stores/glyphs]'")
        return
    try:
        store = read_latent_manifest(data.paths[0])
    except UserError as error:
        yield from error.violations
        return
    sizes = {
        "patch_dim": (spec.latents.patch_dim, store.channels),
        "text_tokens": (spec.latents.text_tokens, store.text_tokens),
        "text_dim": (spec.latents.text_dim, store.text_dim),
        "pooled_dim": (spec.latents.pooled_dim, store.pooled_dim),
    }
    for key, (own, stored) in sizes.items():
        if own != stored:
            yield Violation(f"model.{key}", own, f"the store {data.paths[0]} has {stored}", f"model.{key}={stored}")
    if training.seq_len != store.tokens:
        reason = (
            f"a sample of {data.paths[0]} has {store.text_tokens} text and {store.rows}x{store.columns} image tokens"
        )
        yield Violation("training.seq_len", training.seq_len, reason, f"training.seq_len={store.tokens}")
    if training.evaluate_every and not store.samples["validation"]:
        reason = f"{data.paths[0]} was made without validation samples"
        yield Violation("training.evaluate_every", training.evaluate_every, reason, "training.evaluate_every=0")


def tokens_divide(spec: ModelSpec, parallelism: ParallelismConfig, training: TrainingConfig) -> Iterator[Violation]:
    """Every rank that shares a sequence has as many of its text tokens, and of its image tokens."""
    if spec.latents is None:
        return
    axes = {"cp": parallelism.cp, "tp": parallelism.tp if parallelism.sequence_parallel else 1}
    text = spec.latents.text_tokens
    image = max(0, training.seq_len - text)
    common = math.gcd(text, image)
    if common % math.prod(axes.values()):
        used = {f"parallelism.{axis}": degree for axis, degree in axes.items() if degree > 1}
        named = listed([f"{field}={degree}" for field, degree in used.items()], "and")
        reason = f"a sequence has {text} text and {image} image tokens, which {named} cannot both share evenly"
        remedy = f"degrees whose product divides {common}"
        remedy += "; or parallelism.sequence_parallel=false" if axes["tp"] > 1 else ""
        field, degree = next(iter(used.items()))
        yield Violation(field, degree, reason, remedy)


RULES = (
    *rules(tokens_divide),
    *rules(options_are_known, when=lambda training: training.objective == _OBJECTIVE),
    *rules(store_fits, when=lambda data: data.source == "latents"),
    *rules(
        Refuse(
            "data.source",
            # Language modeling is refused with the same remedy.
            lambda data, spec, training: (
                spec.latents is not None and data.source != "latents" and training.objective == _OBJECTIVE
            ),
            "it has documents, and {model.name} takes latents",
            "data=latents data.paths='[stores/glyphs]', which titan-exp encode writes",
        ),
        Refuse(
            "training.objective",
            lambda training, spec: training.objective == _OBJECTIVE and spec.latents is None,
            "it is for latents, and {model.name} takes tokens",
            "training.objective=language_modeling, or model=flux_laptop",
        ),
        Refuse(
            "tracking.images_every",
            lambda tracking, training: tracking.images_every and training.objective != _OBJECTIVE,
            "{training.objective} trains no model of images",
            "tracking.images_every=0",
        ),
        Refuse(
            "compile.cuda_graphs",
            lambda compile, spec: compile.cuda_graphs and spec.latents is not None,
            "batches of latents are not captured",
            "compile.cuda_graphs=false",
        ),
        Refuse(
            "data.preview",
            lambda data, spec: data.preview and spec.latents is not None,
            "it decodes tokens",
            "data.preview=null",
        ),
    ),
)
