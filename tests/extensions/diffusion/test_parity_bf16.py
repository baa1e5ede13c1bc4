"""Flux in bf16: no layout leaves the band that one device's own reduction orders span, as in `test_bf16`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.extensions.diffusion.test_latent_store import SIZES
from tests.extensions.diffusion.test_parity import weights_begin_with_noise
from tests.parity.runs import train
from tests.parity.test_bf16 import BANDS, FLOOR, Band, Bands, gradients_are_too_large
from tests.patching import patch

WORDS = [
    *("model=flux_debug", "data=images", "data.images=glyphs", "data.options.size=8", "data.options.patch=2"),
    *("data.options.text_tokens=8", "data.options.text_dim=32", "data.options.pooled_dim=24", *SIZES),
    *("training.seq_len=24", "training.objective=rectified_flow", "training.steps=8", "training.mixed_precision=bf16"),
    "optimizer.lr=1e-3",
]
ORDERS = [
    "training.micro_batch_size=8",
    "training.micro_batch_size=4",
    "training.micro_batch_size=2",
    "training.micro_batch_size=1",
    "model.attention_backend=math training.micro_batch_size=8",
    "model.attention_backend=math training.micro_batch_size=4",
    "model.attention_backend=math training.micro_batch_size=2",
    "model.attention_backend=math training.micro_batch_size=1",
]
"""Reduction orders of one device."""
LAYOUTS = [
    "parallelism.dp_shard=2",
    "parallelism.dp_replicate=2 training.micro_batch_size=1 activation_checkpoint=full",
    "parallelism.tp=2",
    "parallelism.tp=2 parallelism.sequence_parallel=false",
    "parallelism.cp=2",
    "parallelism.cp=2 parallelism.cp_method=ulysses",
    "parallelism.pp=2 training.micro_batch_size=2",
]


def begin(mutate: Callable[[], None] | None = None) -> None:
    weights_begin_with_noise()
    if mutate is not None:
        mutate()


@pytest.fixture(scope="module")
def bands(tmp_path_factory: pytest.TempPathFactory) -> Bands:
    curves = [train(tmp_path_factory.mktemp("order"), *WORDS, *order.split(), mutate=begin) for order in ORDERS]
    loss = Band.of([curve.loss for curve in curves], FLOOR["loss"])
    return Bands(loss, Band.of([curve.grad_norm for curve in curves], FLOOR["norm"]), [])


@pytest.mark.night
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_stays_in_the_band(tmp_path: Path, bands: Bands, layout: str):
    curve = train(tmp_path, *WORDS, *layout.split(), mutate=begin)
    found = bands.used(layout, curve)
    print(bands.table[-1])
    assert max(found) <= BANDS
    assert {weight.dtype for weight in curve.weights.values()} == {torch.float32}


@pytest.mark.night
def test_the_band_is_narrow(bands: Bands):
    """The norm's is wider than a language model's: gradients that are wrong by less than 3 % are left to fp32."""
    print(bands.loss.width, bands.norm.width)
    assert FLOOR["loss"] < bands.loss.width[-1] < 1e-3
    assert FLOOR["norm"] < bands.norm.width[-1] < 4e-3
    assert bands.loss.middle[-1] < bands.loss.middle[0] - 0.1, "a curve that does not move stays in any band"


def times_are_rounded() -> None:
    """Times of bf16 have eight bits, of which 1000 · t keeps multiples of four."""

    patch(
        "titan_exp.extensions.diffusion.transformer.sinusoid",
        lambda original: lambda numbers: original(numbers.bfloat16().float()),
    )


@pytest.mark.night
@pytest.mark.parametrize(
    "broken",
    [
        partial(gradients_are_too_large, 1.04),
        times_are_rounded,
    ],
)
def test_what_is_broken_leaves_the_band(tmp_path: Path, bands: Bands, broken: Callable[[], None]):
    curve = train(tmp_path, *WORDS, LAYOUTS[0], mutate=partial(begin, broken))
    found = bands.used("broken", curve)
    print(bands.table[-1])
    assert max(found) > BANDS
