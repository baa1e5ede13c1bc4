"""Sums of gradients over micro-batches in bf16: near those in fp32 in every layout, and not the same. Ranks reduce them
in fp32: where a rank has one micro-batch, and nothing to sum, the key changes no bit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.parity.runs import Curve, train
from tests.patching import patch

BF16 = ["training.mixed_precision=bf16", "training.micro_batch_size=1", "training.steps=4"]
SUMS = "training.accumulation_precision=bf16"


@pytest.mark.night
@pytest.mark.parametrize(
    "layout",
    [
        "",
        "optimizer.implementation=foreach model.tied_embeddings=true",
        "parallelism.dp_shard=2",
        "parallelism=ddp",
        "parallelism.tp=2 parallelism.dp_shard=2",
        "parallelism.pp=2",
        "parallelism.pp=2 parallelism.dp_shard=2 parallelism.pp_schedule=ZBVZeroBubble",
        "parallelism.cpu_offload=true parallelism.dp_shard=2",
        "model=qwen3_moe_debug parallelism.dp_shard=2 parallelism.ep=2",
    ],
)
def test_sums_in_bf16_are_near(tmp_path: Path, layout: str):
    assert_sums_are_near(*both(tmp_path, *layout.split()))


def both(path: Path, *words: str, mutate: Callable[[], None] | None = None) -> tuple[Curve, Curve]:
    """Runs with sums in fp32, and in bf16 with a mutation."""
    return train(path / "fp32", *BF16, *words), train(path / "bf16", *BF16, SUMS, *words, mutate=mutate)


def assert_sums_are_near(exact: Curve, found: Curve) -> None:
    """Within rounding to bf16, and rounded."""
    assert found.loss[0] == exact.loss[0]
    assert found.grad_norm[0] != exact.grad_norm[0]
    assert found.grad_norm[0] == pytest.approx(exact.grad_norm[0], rel=3e-3)
    assert found.loss == pytest.approx(exact.loss, rel=5e-3)


ONE_MICRO_BATCH = ["parallelism.dp_shard=2", "parallelism=ddp", "parallelism=hsdp"]


@pytest.mark.night
@pytest.mark.parametrize("layout", ONE_MICRO_BATCH)
def test_one_micro_batch_is_not_rounded(tmp_path: Path, layout: str):
    assert_bitwise(*both(tmp_path, layout, "training.micro_batch_size=null"))


def assert_bitwise(exact: Curve, found: Curve) -> None:
    """The same numbers to the bit."""
    assert found.grad_norm == exact.grad_norm
    assert all(torch.equal(found.weights[name], weight) for name, weight in exact.weights.items())


def shards_are_summed_in_fp32() -> None:
    patch("titan_exp.parallel.fsdp.accumulate_in_compute_dtype", lambda _: lambda model: None)


def sums_of_one_rank_are_in_fp32() -> None:
    patch(
        "titan_exp.trainer.train_state.ComputeWeights",
        lambda original: lambda *args, **options: original(*args, **{**options, "accumulate": True}),
    )


def the_last_micro_batch_replaces_the_sum() -> None:
    def make(original: Callable[..., object]) -> Callable[..., object]:
        def normalize_by_tokens(objective, module, *rest):
            module.zero_grad()
            return original(objective, module, *rest)

        return normalize_by_tokens

    patch("titan_exp.trainer.forward_backward.normalize_by_tokens", make)


def ranks_reduce_in_bf16() -> None:
    patch(
        "titan_exp.parallel.fsdp.MixedPrecisionPolicy",
        lambda original: lambda **options: original(**{**options, "reduce_dtype": torch.bfloat16}),
    )


@pytest.mark.night
@pytest.mark.parametrize(
    ("layout", "mutate"),
    [
        ("parallelism.dp_shard=2", shards_are_summed_in_fp32),
        ("", sums_of_one_rank_are_in_fp32),
        ("", the_last_micro_batch_replaces_the_sum),
    ],
)
def test_mutations_of_the_sum_are_noticed(tmp_path: Path, layout: str, mutate: Callable[[], None]):
    found = both(tmp_path, *layout.split(), mutate=mutate)
    with pytest.raises(AssertionError):
        assert_sums_are_near(*found)


@pytest.mark.night
def test_a_reduction_in_bf16_is_noticed(tmp_path: Path):
    found = both(tmp_path, ONE_MICRO_BATCH[0], "training.micro_batch_size=null", mutate=ranks_reduce_in_bf16)
    with pytest.raises(AssertionError):
        assert_bitwise(*found)
