"""Training on images that are encoded on the way: the losses and weights of training from a store, to the bit."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.extensions.diffusion.test_latent_store import SIZES
from tests.parity.runs import Curve, train
from tests.parity.test_continued import continued
from tests.patching import patch
from titan_exp.extensions.diffusion.verbs import encode as run
from titan_exp.inference.evaluate import evaluate_command
from titan_exp.inference.generate import generate_command

OPTIONS = ["size=8", "patch=2", "text_tokens=8", "text_dim=32", "pooled_dim=24"]
COMMON = ["model=flux_debug", "training.objective=rectified_flow", "training.seq_len=24", "optimizer.lr=1e-2", *SIZES]
TWO = ["parallelism.dp_shard=2", "training.micro_batch_size=2"]
ENCODED = [*COMMON, "data=images", *(f"data.options.{option}" for option in OPTIONS)]
EVALUATED = ["evaluation.every=6", "data.validation_documents=20", "tracking.images_every=6"]


@pytest.fixture(scope="module")
def from_the_store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Curve]:
    """Run on two ranks that accumulate, with a validation and a grid."""
    folder = tmp_path_factory.mktemp("stored")
    assert run(["images=glyphs", f"out={folder / 'store'}", *OPTIONS]) == 0
    words = [*COMMON, "data=latents", f"data.paths=[{folder / 'store'}]", *TWO, *EVALUATED]
    return folder, train(folder / "run", *words)


def same_bits(found: Curve, expected: Curve) -> bool:
    """True if two runs have the same losses, also of validation, gradient norms and weights."""
    losses = [key for key in expected.rows[-1] if key.startswith("validation_loss")]
    assert len(losses) == 10
    return (
        (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)
        and [found.rows[-1][key] for key in losses] == [expected.rows[-1][key] for key in losses]
        and all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())
    )


@pytest.mark.night
def test_losses_weights_and_grids_are_those_of_a_store(from_the_store: tuple[Path, Curve], tmp_path: Path):
    folder, expected = from_the_store
    found = train(tmp_path / "run", *ENCODED, *TWO, *EVALUATED)
    assert same_bits(found, expected)
    grids = [(path / "run" / "images" / "step-00000006.png").read_bytes() for path in (folder, tmp_path)]
    assert grids[0] == grids[1]


def test_a_stopped_run_goes_on_to_the_bit_and_is_evaluated_and_draws_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = [*ENCODED, "evaluation.every=10", "data.validation_documents=9"]
    whole, resumed = continued(tmp_path, words, words)
    capsys.readouterr()
    assert (resumed.loss, resumed.grad_norm) == (whole.loss[5:], whole.grad_norm[5:])
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in whole.weights.items())
    run_folder = tmp_path / "whole"
    assert evaluate_command([str(run_folder), "--json", "training.micro_batch_size=2"]) == 0
    found, last = json.loads(capsys.readouterr().out), whole.rows[-1]
    assert found["tokens"] == last["validation_tokens"] == 8 * 9 * 24
    assert found["loss"] == pytest.approx(last["validation_loss"], rel=1e-5)
    assert found["t=0.0625"] == pytest.approx(last["validation_loss/t=0.0625"], rel=1e-5)
    assert found["text_gain"] == pytest.approx(last["validation_text_gain"], abs=1e-6)
    assert generate_command([str(run_folder), "prompt=Digit seven", "steps=2", f"out={tmp_path / 'out'}"]) == 0
    assert (tmp_path / "out" / "00-digit-seven-0-0.png").is_file()


def every_epoch_has_the_order_of_the_source() -> None:
    def make(original: Callable[..., dict]) -> object:
        def order(images: object, buckets: object, fraction: float, seed: int) -> dict:
            found = original(images, buckets, fraction, seed)
            return {split: [(bucket, sorted(group)) for bucket, group in groups] for split, groups in found.items()}

        return order

    patch("titan_exp.extensions.diffusion.latents.order_samples", make)


def states_are_those_of_the_first_caption_of_a_batch() -> None:
    def make(original: Callable[..., tuple]) -> object:
        def encode(self: object, images: object, indices: list[int], bucket: object) -> tuple:
            latents, states, pooled, *rest = original(self, images, indices, bucket)
            return latents, states[:1].repeat(len(states), 0), pooled, *rest

        return encode

    patch("titan_exp.extensions.diffusion.encoders.Encoders.encode", make)


@pytest.mark.parametrize(
    "mutate", [every_epoch_has_the_order_of_the_source, states_are_those_of_the_first_caption_of_a_batch]
)
@pytest.mark.night
def test_mutations_are_noticed(mutate: Callable[[], None], from_the_store: tuple[Path, Curve], tmp_path: Path):
    assert not same_bits(train(tmp_path / "run", *ENCODED, *TWO, *EVALUATED, mutate=mutate), from_the_store[1])
