"""Flux in every layout: curve and weights of one device, with noise, times and dropped texts keyed by sample."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from tests.extensions.diffusion.test_latent_store import SIZES, write
from tests.parity.expert_mutations import tensor_ranks_split_tokens_across_sequences
from tests.parity.runs import Curve, assert_same_curve, remembered, train
from tests.parity.test_continued import assert_continues, continued
from tests.parity.test_quantized import assert_same_recipe
from tests.patching import patch
from tests.proofs import proves

SEQ = "training.seq_len=24"
DAY = ["parallelism.dp_shard=2 training.micro_batch_size=2"]
DIVIDED = [
    "parallelism.tp=2 training.micro_batch_size=4",
    "parallelism.cp=2 training.micro_batch_size=4",
    "parallelism.pp=2 training.micro_batch_size=2",
]
"""Layouts whose gradients are compared by day, and whose curves by night."""
NIGHT = [
    "parallelism.dp_replicate=2 parallelism.dp_shard=2",
    "training.micro_batch_size=1 activation_checkpoint=full",
    "parallelism.dp_replicate=2 activation_checkpoint=selective",
    "parallelism.dp_shard=2 compile=blocks compile.backend=aot_eager",
    "parallelism.dp_shard=4 parallelism.reshard_after_forward=always",
    "parallelism.dp_shard=2 activation_checkpoint=full compile=blocks compile.backend=inductor",
    "parallelism.tp=2 compile=all compile.backend=inductor",
    "parallelism.tp=2 parallelism.sequence_parallel=false",
    "parallelism.tp=2 parallelism.dp_shard=2 training.micro_batch_size=1 activation_checkpoint=full",
    "parallelism.tp=2 compile=blocks compile.backend=aot_eager",
    "parallelism.cp=2 parallelism.cp_method=allgather compile=blocks compile.backend=aot_eager",
    "parallelism.cp=2 parallelism.cp_method=ulysses activation_checkpoint=full",
    "parallelism.cp=4 parallelism.cp_ulysses=2",
    "parallelism.cp=2 parallelism.tp=2",
    "parallelism.pp=2 parallelism.pp_schedule=InterleavedZeroBubble parallelism.tp=2 training.micro_batch_size=1",
    "parallelism.pp=4 parallelism.pp_schedule=GPipe training.micro_batch_size=2",
    "parallelism.pp=2 parallelism.cp=2 training.micro_batch_size=2",
]


def limit_of(layout: str) -> float:
    """Seconds for a run; inductor's first compilation takes minutes on busy cores."""
    return 360.0 if "inductor" in layout else 120.0


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    store = tmp_path_factory.mktemp("stores") / "glyphs"
    write(store)
    given = ("model=flux_debug", "data=latents", f"data.paths=[{store}]", "training.objective=rectified_flow")
    # Larger rates than those of language models: outputs begin as zeros, and gradients before them with them.
    return " ".join((*given, *SIZES, SEQ, "optimizer.lr=1e-2", "evaluation.every=6"))


@pytest.fixture(scope="session")
def on_one_device(words: str, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    run: Callable[[str], Curve] = remembered(lambda: tmp_path_factory.mktemp("one"), {"flux": words})
    return run("flux")


@pytest.mark.parametrize(
    "layout",
    [
        *(pytest.param(layout, marks=proves(f"model=flux_debug {layout}", "layout")) for layout in DAY),
        *(
            pytest.param(layout, marks=[pytest.mark.night, proves(f"model=flux_debug {layout}", "layout")])
            for layout in (*DIVIDED, *NIGHT)
        ),
    ],
)
def test_the_curve_is_that_of_one_device(layout: str, words: str, on_one_device: Curve, tmp_path: Path):
    found = train(tmp_path / "many", *words.split(), *layout.split(), timeout=limit_of(layout))
    assert_same_curve(found, on_one_device)
    last, expected = found.rows[-1], on_one_device.rows[-1]
    losses = [key for key in expected if key.startswith("validation_loss")]
    assert len(losses) == 10
    assert [last[key] for key in losses] == pytest.approx([expected[key] for key in losses], rel=1e-5)
    assert "validation_perplexity" not in last


def views_are_errors() -> None:
    warnings.filterwarnings("error", "FSDP2-wrapped module", UserWarning)


def test_no_unit_of_fsdp_returns_a_view(words: str, tmp_path: Path):
    """FSDP would warn of it, on every rank."""
    layout = "parallelism.dp_replicate=2 parallelism.tp=2 training.micro_batch_size=1 training.steps=1"
    given = [word for word in words.split() if not word.startswith("evaluation.every")]
    assert train(tmp_path, *given, *layout.split(), mutate=views_are_errors).disputed == []


def weights_begin_with_noise() -> None:
    """No initial weight is zero: gradients before a modulation or an output would be, too."""

    def make(plain: Callable[..., object]) -> object:
        def drawn(*given: object, **named: object) -> object:
            return plain(*given, **{**named, "zero": False})

        return drawn

    patch("titan_exp.extensions.diffusion.spec._linear", make)


def broken(mutate: Callable[[], None] | None) -> None:
    weights_begin_with_noise()
    if mutate is not None:
        mutate()


def gradients(
    path: Path, words: str, layout: str = "", mutate: Callable[[], None] | None = None
) -> dict[str, torch.Tensor]:
    """Gradients of the first step, by a rate of SGD beside which the weights themselves vanish."""
    one = ["training.steps=1", "optimizer=sgd", "optimizer.lr=1e7", "optimizer.weight_decay=0"]
    one += ["training.max_grad_norm=1e9", "lr_schedule=constant", "evaluation.every=0"]
    given = [word for word in words.split() if not word.startswith(("optimizer.", "evaluation.every"))]
    broken_too = partial(broken, mutate)
    found = train(path, *given, *one, *layout.split(), mutate=broken_too, timeout=limit_of(layout))
    assert mutate is not None or found.disputed == []
    return found.weights


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 100, name
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.fixture(scope="session")
def gradients_on_one_device(words: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return gradients(tmp_path_factory.mktemp("one"), words)


@pytest.mark.parametrize(
    "layout",
    [
        *DAY,
        pytest.param(DIVIDED[0], marks=pytest.mark.day),
        *DIVIDED[1:],
        *(pytest.param(layout, marks=pytest.mark.night) for layout in NIGHT),
    ],
)
def test_gradients_of_every_parameter_are_those_of_one_device(
    layout: str, words: str, gradients_on_one_device: dict[str, torch.Tensor], tmp_path: Path
):
    assert_same_gradients(gradients(tmp_path, words, layout), gradients_on_one_device)


@pytest.mark.parametrize(
    ("before", "after"),
    [("parallelism.dp_shard=2", "parallelism.dp_shard=2"), ("", "parallelism.dp_shard=2 training.micro_batch_size=2")],
)
def test_a_run_stopped_half_way_goes_on(before: str, after: str, words: str, tmp_path: Path):
    """To the bit in the same layout, and in another one to rounding."""
    whole, changed = continued(tmp_path, [*words.split(), *before.split()], [*words.split(), *after.split()])
    if before == after:
        assert (changed.loss, changed.grad_norm) == (whole.loss[5:], whole.grad_norm[5:])
        assert all(torch.equal(changed.weights[name], weight) for name, weight in whole.weights.items())
    else:
        assert_continues(whole, changed)


def noise_depends_on_the_rank() -> None:
    from titan_exp.data.batch import keyed_generator

    def make(_: object) -> object:
        import os

        return lambda seed, sample, purpose: keyed_generator(seed + int(os.environ["RANK"]), sample, purpose)

    patch("titan_exp.extensions.diffusion.samples.keyed_generator", make)


def numbers_depend_on_the_place_in_the_micro_batch() -> None:
    patch(
        "titan_exp.extensions.diffusion.rectified_flow.RectifiedFlow.prepare",
        lambda original: (
            lambda self, batch, seed: original(self, replace(batch, samples=torch.arange(len(batch.samples))), seed)
        ),
    )


def the_loss_is_a_mean_over_the_rows_of_a_micro_batch() -> None:
    from titan_exp.trainer.objective import Loss

    def make(original: Callable[..., Loss]) -> object:
        def call(self: object, model: object, batch: object, hidden: object = None) -> Loss:
            found = original(self, model, batch, hidden)
            return Loss(found.total / len(batch.samples), found.metrics)  # type: ignore[attr-defined]

        return call

    patch("titan_exp.extensions.diffusion.rectified_flow.RectifiedFlow.__call__", make)


@pytest.mark.parametrize(
    "mutate",
    [
        noise_depends_on_the_rank,
        numbers_depend_on_the_place_in_the_micro_batch,
        the_loss_is_a_mean_over_the_rows_of_a_micro_batch,
    ],
)
@pytest.mark.night
def test_mutations_are_noticed(mutate: Callable[[], None], words: str, on_one_device: Curve, tmp_path: Path):
    found = train(tmp_path / "many", *words.split(), *DAY[0].split(), mutate=mutate)
    with pytest.raises(AssertionError):
        assert_same_curve(found, on_one_device)


def positions_of_gathered_tokens_are_those_of_text_first() -> None:
    from titan_exp.parallel.tensor_parallel.styles import GatheredRopeOrder

    patch(f"{GatheredRopeOrder.__module__}.GatheredRopeOrder.forward", lambda _: lambda self, rope, text_tokens: rope)


def gradients_of_replicated_linears_are_taken_for_whole_ones() -> None:
    from titan_exp.models.blocks.linear import Linear

    def make(original: Callable[..., None]) -> object:
        return lambda module, *names: None if isinstance(module, Linear) else original(module, *names)

    patch("titan_exp.parallel.mesh.mark_partial", make)


def every_tensor_rank_adds_its_gradient_of_the_result() -> None:
    patch(
        "titan_exp.parallel.tensor_parallel.layers.TensorParallelGroup.gather_result",
        lambda _: lambda self, x: self.gather_input(x),
    )


def gradients_of_modulations_are_those_of_a_rank_s_own_tokens() -> None:
    patch(
        "titan_exp.parallel.tensor_parallel.layers.TensorParallelGroup.gather_vector",
        lambda _: lambda self, part: self.gather_outputs(part, part.shape[-1] * self.degree),
    )


def the_conditioning_has_the_gradient_of_a_rank_s_own_outputs() -> None:
    patch(
        "titan_exp.parallel.tensor_parallel.layers.TensorParallelGroup.share_vector",
        lambda _: lambda self, x: x,
    )


def context_ranks_attend_causally() -> None:
    from titan_exp.ops.attention.mask_pattern import CAUSAL

    def make(original: Callable[..., None]) -> object:
        def build(self: object, *given: object) -> None:
            original(self, *given[:5], CAUSAL, *given[6:])

        return build

    patch("titan_exp.parallel.context_parallel.attention.ContextAttention.__init__", make)


def the_conditioning_has_no_gradient_from_later_stages() -> None:
    def make(original: Callable[..., torch.Tensor]) -> object:
        def forward(self: object, image: torch.Tensor, *given: object, **named: object) -> torch.Tensor:
            if getattr(self, "inputs", None) is None:
                image = torch.cat((image[:, :-1], image[:, -1:].detach()), dim=1)
            return original(self, image, *given, **named)

        return forward

    patch("titan_exp.extensions.diffusion.transformer.DiffusionTransformer.forward", make)


@pytest.mark.parametrize(
    ("layout", "mutate"),
    [
        ("parallelism.tp=2", positions_of_gathered_tokens_are_those_of_text_first),
        ("parallelism.tp=2", gradients_of_replicated_linears_are_taken_for_whole_ones),
        ("parallelism.tp=2", every_tensor_rank_adds_its_gradient_of_the_result),
        ("parallelism.tp=2", gradients_of_modulations_are_those_of_a_rank_s_own_tokens),
        ("parallelism.tp=2", tensor_ranks_split_tokens_across_sequences),
        (
            "parallelism.tp=2 parallelism.sequence_parallel=false",
            the_conditioning_has_the_gradient_of_a_rank_s_own_outputs,
        ),
        ("parallelism.cp=2", context_ranks_attend_causally),
        ("parallelism.cp=2", noise_depends_on_the_rank),
        ("parallelism.pp=2 training.micro_batch_size=2", the_conditioning_has_no_gradient_from_later_stages),
    ],
)
@pytest.mark.night
def test_mutations_of_divided_models_are_noticed(
    layout: str,
    mutate: Callable[[], None],
    words: str,
    gradients_on_one_device: dict[str, torch.Tensor],
    tmp_path: Path,
):
    found = gradients(tmp_path, words, layout, mutate)
    with pytest.raises(AssertionError):
        assert_same_gradients(found, gradients_on_one_device)


RECIPES = {recipe: f"quantization={recipe}" for recipe in ("float8_tensorwise", "float8_rowwise", "mxfp8")}
RECIPES["float8_rowwise_gw_hp"] = "quantization=float8_rowwise_gw_hp quantization.filter=['*.text.*']"
RECIPES["nvfp4"] = "quantization=nvfp4"
# NVFP4 transforms 16 tokens of a sequence together, of text or of the image, on each of two ranks.
LONG = "model.text_tokens=32 data.options.text_tokens=32 data.options.size=16 training.seq_len=96"


def quantized(path: Path, words: str, recipe: str, layout: str = "", mutate: Callable[[], None] | None = None) -> Curve:
    """Three steps; initial weights are drawn, since blocks whose gates are zero round nothing that anyone sees."""
    few = ["training.steps=3", "evaluation.every=0", "optimizer.lr=1e-3"]
    if recipe == "nvfp4":
        sizes = "data.options.patch=2 data.options.text_dim=32 data.options.pooled_dim=24 model.patch_dim=12"
        words = f"model=flux_debug data=images training.objective=rectified_flow {sizes} {LONG}"
    given = [word for word in words.split() if word.partition("=")[0] not in {key.partition("=")[0] for key in few}]
    chosen = [] if "quantization=none" in layout else RECIPES[recipe].split()
    return train(path, *given, *few, *chosen, *layout.split(), mutate=partial(broken, mutate))


@pytest.fixture(scope="session")
def recipe_on_one_device(words: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Curve]:
    return cache(lambda recipe: quantized(tmp_path_factory.mktemp("one"), words, recipe))


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("float8_rowwise", "parallelism.tp=2 training.micro_batch_size=4"),
        pytest.param("float8_tensorwise", "parallelism.dp_shard=2", marks=pytest.mark.night),
        pytest.param("float8_tensorwise", "parallelism.tp=2 activation_checkpoint=full", marks=pytest.mark.night),
        pytest.param("nvfp4", "parallelism.tp=2 training.micro_batch_size=4", marks=pytest.mark.night),
        pytest.param("nvfp4", "parallelism.cp=2 activation_checkpoint=full", marks=pytest.mark.night),
        pytest.param("nvfp4", "parallelism.pp=2 training.micro_batch_size=2", marks=pytest.mark.night),
        pytest.param("mxfp8", "parallelism.cp=2 training.micro_batch_size=8", marks=pytest.mark.night),
        pytest.param("float8_rowwise_gw_hp", "parallelism.pp=2 training.micro_batch_size=2", marks=pytest.mark.night),
        pytest.param("mxfp8", "parallelism.tp=2 compile=blocks compile.backend=aot_eager", marks=pytest.mark.night),
    ],
)
def test_recipes_give_the_curve_of_one_device(
    recipe: str, layout: str, words: str, recipe_on_one_device: Callable[[str], Curve], tmp_path: Path
):
    assert_same_recipe(quantized(tmp_path, words, recipe, layout), recipe_on_one_device(recipe))


def modulations_are_rounded_too() -> None:
    """Their inputs are one vector for each sequence."""

    def make(original: Callable[..., Iterator[tuple[str, object]]]) -> object:
        def chosen(model: torch.nn.Module, config: object, layers: int) -> Iterator[tuple[str, object]]:
            from titan_exp.models.blocks.linear import Linear

            yield from original(model, config, layers)
            for name, module in model.named_modules():
                if isinstance(module, Linear) and name.startswith("blocks.") and name.endswith("modulation"):
                    yield name, module

        return chosen

    patch("titan_exp.quantization.quantize._quantized_linears", make)


def one_linear_stays_in_high_precision() -> None:
    def make(original: Callable[..., Iterator[tuple[str, object]]]) -> object:
        def chosen(*given: object) -> Iterator[tuple[str, object]]:
            return ((name, linear) for name, linear in original(*given) if name != "blocks.3.out")

        return chosen

    patch("titan_exp.quantization.quantize._quantized_linears", make)


@pytest.mark.parametrize(
    ("recipe", "mutate"),
    [
        ("float8_rowwise", None),
        ("mxfp8", None),
        ("float8_rowwise", modulations_are_rounded_too),
        ("float8_rowwise", one_linear_stays_in_high_precision),
        ("mxfp8", one_linear_stays_in_high_precision),
        ("nvfp4", None),
        ("nvfp4", one_linear_stays_in_high_precision),
    ],
)
@pytest.mark.night
def test_mutations_of_recipes_are_noticed(
    recipe: str,
    mutate: Callable[[], None] | None,
    words: str,
    recipe_on_one_device: Callable[[str], Curve],
    tmp_path: Path,
):
    """Without a recipe the curve is another, so that the recipe does something."""
    layout = "quantization=none" if mutate is None else "parallelism.tp=2"
    if mutate is modulations_are_rounded_too:
        layout = "parallelism.dp_shard=2"  # tensor parallelism replaces them by layers that no recipe reaches
    found = quantized(tmp_path, words, recipe, layout, mutate)
    with pytest.raises(AssertionError):
        assert_same_recipe(found, recipe_on_one_device(recipe))
