"""One data rank in bf16 without sharding: weights, norms and losses of FSDP2 on the same ranks, bit for bit."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.parity.runs import LINES, Curve, train
from tests.parity.test_continued import SAVING
from tests.patching import patch

BF16 = ["training.mixed_precision=bf16", "training.max_grad_norm=0.3", *LINES]
RUNS = {"one micro-batch": "training.loss_chunk_tokens=37"}
AT_NIGHT = {
    "tied": "model.tied_embeddings=true training.loss_chunk_tokens=16384",
    "accumulated": "training.micro_batch_size=2 training.fp32_modules=[blocks.*.attention_norm,blocks.1.feed_forward]",
    "recomputed, a head in fp32": "activation_checkpoint=full training.fp32_modules=[head]",
    "operators recomputed, compiled": "activation_checkpoint=selective compile=blocks compile.backend=aot_eager",
    "float8": "quantization=float8_tensorwise quantization.precomputed_scales=true training.micro_batch_size=4",
    "bf16 moments": "optimizer.state_precision=bf16",
    "SGD": "optimizer.name=torch.optim.SGD +optimizer.options.momentum=0.9",
    "tensor parallelism": "parallelism.tp=2",
    "tensor parallelism, accumulated": "parallelism.tp=2 training.micro_batch_size=2",
    "tensor parallelism, replicated sequences": "parallelism.tp=2 parallelism.sequence_parallel=false",
    "experts of tensor-parallel ranks": "model=qwen3_moe_debug parallelism.tp=2 parallelism.ep=2",
    "1F1B, tied": "parallelism.pp=2 model.tied_embeddings=true",
    "one pass per micro-batch": "parallelism.pp=2 parallelism.pp_microbatches=2 training.micro_batch_size=1",
    "zero bubble": "parallelism.pp=2 parallelism.pp_schedule=ZBVZeroBubble",
    "zero bubble of tensor-parallel stages": "parallelism.pp=2 parallelism.tp=2 "
    "parallelism.pp_schedule=InterleavedZeroBubble",
    "evaluated": "evaluation.every=5 data.validation_fraction=0.1 data.validation_documents=40",
}


def sharded_by_fsdp() -> None:
    """FSDP2 on a mesh of one data rank, as for several."""
    for name in ("titan_exp.parallel.fsdp.uses_fsdp", "titan_exp.trainer.train_state.uses_fsdp"):
        patch(name, lambda _: lambda *_, **__: True)
    patch("titan_exp.trainer.train_step.reduce_partial_gradients", _requires_fsdp)


def _requires_fsdp(original: Any) -> Any:
    def reduce(parts: Sequence[torch.nn.Module], mesh: Any) -> None:
        assert all(isinstance(part, FSDPModule) for part in parts)
        original(parts, mesh)

    return reduce


def assert_same(found: Curve, expected: Curve) -> None:
    names = ("loss", "grad_norm", "validation_loss")
    assert [[row.get(name) for name in names] for row in found.rows] == [
        [row.get(name) for name in names] for row in expected.rows
    ]
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        assert weight.dtype == torch.float32, name
        assert torch.equal(found.weights[name], weight), name


@pytest.mark.parametrize(
    "run",
    [
        *(pytest.param(run, marks=pytest.mark.day) for run in RUNS),
        *(pytest.param(run, marks=pytest.mark.night) for run in AT_NIGHT),
    ],
)
def test_one_data_rank_trains_as_fsdp(tmp_path: Path, run: str):
    words = [*BF16, *{**RUNS, **AT_NIGHT}[run].split()]
    expected = train(tmp_path / "fsdp", *words, mutate=sharded_by_fsdp)
    assert min(expected.grad_norm) > 0.3, "nothing is clipped"
    assert_same(train(tmp_path / "one", *words), expected)


def loaded(path: Path, *words: str, mutate: Callable[[], None] | None = None) -> tuple[Curve, Curve]:
    """A run of ten steps, and one that continues it after five."""
    whole = train(path / "runs" / "whole", *BF16, *SAVING)
    parent = [f"checkpoint.continue_from={path / 'runs' / 'whole'}", "checkpoint.continue_step=5"]
    return whole, train(path / "child", *BF16, *SAVING, *parent, *words, mutate=mutate)


@pytest.mark.day
def test_a_continued_run_computes_with_loaded_weights(tmp_path: Path):
    whole, found = loaded(tmp_path)
    assert (found.loss, found.grad_norm) == (whole.loss[5:], whole.grad_norm[5:])
    for name, weight in whole.weights.items():
        assert torch.equal(found.weights[name], weight), name


@pytest.mark.night
def test_a_run_continues_on_many_ranks_and_back(tmp_path: Path):
    whole, found = loaded(tmp_path, "parallelism.dp_shard=2")
    assert found.loss == pytest.approx(whole.loss[5:], rel=1e-3)
    parent = [f"checkpoint.continue_from={tmp_path / 'child'}", "training.steps=12"]
    back = train(tmp_path / "back", *BF16, *parent)
    longer = train(tmp_path / "longer", *BF16, *parent, "parallelism.dp_shard=2")
    assert back.loss == pytest.approx(longer.loss, rel=1e-3)
    assert len(back.loss) == 2


@pytest.mark.night
def test_initial_weights_are_computed_with(tmp_path: Path):
    whole = train(tmp_path / "whole", *BF16, *SAVING)
    words = [*BF16, f"checkpoint.initial={tmp_path / 'whole'}", "training.steps=2"]
    found = train(tmp_path / "found", *words)
    assert found.loss[0] < whole.loss[0] - 0.1
    assert_same(found, train(tmp_path / "fsdp", *words, mutate=sharded_by_fsdp))
