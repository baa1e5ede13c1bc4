"""Predictions for a diffusion transformer equal measurements of real ranks: memory, messages and FLOPs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.extensions.diffusion.test_latent_store import SIZES, write
from tests.patching import patch
from tests.plan.layouts import experiment_of, measured, predicted
from tests.plan.test_extrapolate import MASKED
from tests.plan.test_extrapolated_trace import both_ways
from tests.ranks import run_ranks
from titan_exp.config.schema.typed_config import to_yaml
from titan_exp.extensions.diffusion.samples import LatentBatch
from titan_exp.models.spec.lookup import model_spec
from titan_exp.plan.extrapolate.eligibility import unsupported_reason

LAYOUTS = {
    "one device": "",
    "fsdp 2, accumulated": "parallelism.dp_shard=2 training.micro_batch_size=2",
    "hsdp 2x2, full recompute": "parallelism=hsdp activation_checkpoint=full",
    "tp 2 x fsdp 2": "parallelism.tp=2 parallelism.dp_shard=2",
    "tp 2, no sequence parallelism, bf16": "parallelism.tp=2 parallelism.sequence_parallel=false "
    "training.mixed_precision=bf16",
    "cp 2, ring, selective": "parallelism.cp=2 activation_checkpoint=selective",
    "cp 4, Ulysses in a ring": "parallelism.cp=4 parallelism.cp_ulysses=2",
    "pp 2, double blocks, then single ones": "parallelism.pp=2 parallelism.pp_microbatches=4",
    "fsdp 2, compiled blocks and loss": "parallelism.dp_shard=2 compile=all compile.backend=aot_eager",
    "tp 2, float8 rowwise": "parallelism.tp=2 quantization=float8_rowwise",
}
BY_DAY = ("pp 2, double blocks, then single ones",)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    write(store := tmp_path_factory.mktemp("stores") / "glyphs")
    given = ("model=flux_debug", "data=latents", f"data.paths=[{store}]", "training.objective=rectified_flow")
    return " ".join((*given, *SIZES, "training.seq_len=24"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BY_DAY else [pytest.mark.night]) for name in LAYOUTS]
)
def test_prediction_is_what_ranks_do(name: str, words: str, tmp_path: Path):
    experiment = experiment_of(f"{words} {LAYOUTS[name]}")
    guesses, found = predicted(experiment, tmp_path / "plan"), measured(experiment, tmp_path / "run")
    assert len(guesses) == len(found) == experiment.parallelism.pp
    for guess, fact in zip(guesses, found, strict=True):
        assert guess.parameters == fact.parameters > 0
        assert guess.gradients == fact.gradients > 0
        assert guess.optimizer == fact.optimizer > 0
        assert guess.messages == fact.messages
        assert guess.flops == fact.flops > 0
        assert guess.passing <= fact.passing <= 1.02 * guess.passing


@pytest.mark.night
@pytest.mark.parametrize("double_layers", [2, 4])
def test_extrapolated_allocations_of_a_split_pipeline_equal_the_full_trace(
    double_layers: int, words: str, tmp_path: Path
):
    experiment = experiment_of(
        f"{words} {MASKED} model.layers=24 model.double_layers={double_layers} parallelism.pp=2 parallelism.tp=2 "
        "parallelism.pp_schedule=ZBVZeroBubble parallelism.pp_microbatches=4"
    )
    assert unsupported_reason(experiment) is None
    (tmp_path / "config.yaml").write_text(to_yaml(experiment))
    (found,) = run_ranks(1, both_ways, str(tmp_path / "config.yaml"), False)
    for whole, short in found:
        assert short == whole


def test_flops_that_ranks_execute_are_those_that_the_spec_counts(words: str, tmp_path: Path):
    """Attention in both directions; a modulation once per sequence, not per token."""
    experiment = experiment_of(words)
    (found,) = measured(experiment, tmp_path)
    spec, training = model_spec(experiment.model), experiment.training
    assert spec is not None
    counted = spec.flops_per_token(training.seq_len) * training.seq_len * training.global_batch_size
    # The first layers' inputs need no gradient, and forward passes of attention are computed again in backward.
    assert found.flops == pytest.approx(counted, rel=0.1)


def batches_have_one_row() -> None:
    def make(original: Callable[..., LatentBatch]) -> object:
        return lambda inputs, rows, seq_len: original(inputs, rows, seq_len).map(lambda tensor: tensor[:1])

    patch("titan_exp.extensions.diffusion.spec.LatentInputs.example", make)


@pytest.mark.night
def test_batches_of_another_size_are_noticed(words: str, tmp_path: Path):
    experiment = experiment_of(words)
    (right,) = predicted(experiment, tmp_path / "right")
    (wrong,) = predicted(experiment, tmp_path / "wrong", batches_have_one_row)
    assert wrong.flops < 0.5 * right.flops
    assert wrong.passing < right.passing
