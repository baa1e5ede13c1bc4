"""Layouts of several ranks on one GPU, against one rank on it: its kernels, streams and allocator, messages by way of
the host (`tests/staged.py`). The same tests run on a CPU."""

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.parity.runs import LINES, Curve, train
from tests.staged import show_gpus_to_rules, use_one_device

ON_CUDA = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
DEVICES = [pytest.param("cpu", marks=pytest.mark.night), pytest.param("cuda", marks=ON_CUDA)]
LAYOUTS = [
    "parallelism.dp_shard=2 parallelism.reshard_after_forward=always training.micro_batch_size=2",
    "parallelism=hsdp activation_checkpoint=full",
    "parallelism.tp=2",
    "parallelism.tp=2 parallelism.dp_shard=2 training.loss_chunk_tokens=37",
    "parallelism.tp=2 parallelism.sequence_parallel=false parallelism.loss_parallel=false",
    "parallelism.pp=2 parallelism.pp_schedule=1F1B parallelism.dp_shard=2",
    "parallelism.pp=2 parallelism.pp_schedule=ZBVZeroBubble",
    "parallelism.pp=2 parallelism.pp_schedule=DualPipeV parallelism.pp_microbatches=4",
    "parallelism.pp=2 parallelism.tp=2 parallelism.pp_schedule=Interleaved1F1B",
    "parallelism.cp=2 parallelism.cp_method=ring",
    "parallelism.cp=2 parallelism.cp_method=allgather parallelism.dp_shard=2",
    "parallelism.cp=2 parallelism.cp_method=ulysses",
    "parallelism.cp=2 parallelism.tp=2",
]
"""Layouts of two or four ranks."""


@pytest.fixture(autouse=True)
def _ranks_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    show_gpus_to_rules(monkeypatch)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    @cache
    def run(*overrides: str) -> Curve:
        return train(tmp_path_factory.mktemp("one"), *overrides, timeout=300)

    return run


def assert_agrees(found: Curve, expected: Curve) -> None:
    """To the rounding of a GPU, whose attention adds in an order that changes."""
    assert found.disputed == []
    assert found.loss == pytest.approx(expected.loss, rel=2e-5)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=2e-4)
    assert [row["tokens"] for row in found.rows] == [row["tokens"] for row in expected.rows]
    for name, weight in expected.weights.items():
        torch.testing.assert_close(
            found.weights[name].cpu(), weight.cpu(), atol=1e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.proves("llama", "layout")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", DEVICES)
def test_layout_does_not_change_the_curve(tmp_path: Path, one_rank, device: str, layout: str):
    chosen = [f"cluster.device={device}", *layout.split()]
    found = train(tmp_path, *chosen, mutate=use_one_device, timeout=300)
    assert_agrees(found, one_rank(f"cluster.device={device}"))


@pytest.mark.parametrize("layout", ["parallelism.tp=2", "parallelism.cp=2", "parallelism.pp=2"])
@pytest.mark.parametrize("device", DEVICES)
def test_nor_that_of_documents(tmp_path: Path, one_rank, device: str, layout: str):
    chosen = [f"cluster.device={device}", *LINES]
    found = train(tmp_path, *chosen, *layout.split(), mutate=use_one_device, timeout=300)
    assert_agrees(found, one_rank(*chosen))


RECIPES = ["none", "float8_tensorwise", "float8_rowwise", "float8_rowwise_gw_hp", "mxfp8"]


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        *((recipe, "compile=all") for recipe in RECIPES),
        *((recipe, "parallelism.tp=2 parallelism.dp_shard=2") for recipe in RECIPES),
        ("none", "compile=blocks activation_checkpoint=selective training.micro_batch_size=2"),
        # One rank keeps bf16 compute weights; FSDP casts.
        ("none", "parallelism.dp_shard=2"),
        # One pass clips and updates on a GPU; torch's kernel with a clip before it does here.
        ("none", "optimizer.implementation=fused"),
        ("none", "parallelism.cp=2"),
        ("none", "parallelism.pp=2 parallelism.pp_schedule=1F1B"),
        ("float8_tensorwise", "parallelism.dp_shard=2 quantization.float8_all_gather=true"),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_recipes_in_bf16_learn_alike(tmp_path: Path, one_rank, device: str, recipe: str, layout: str):
    """Against one rank without a compiler; roundings differ, and add up over ten steps."""
    shared = [f"cluster.device={device}", "training.mixed_precision=bf16", f"quantization={recipe}"]
    # On a GPU, matmuls as small as these stay in bf16 unless asked for.
    shared += [] if recipe == "none" else ["quantization.smallest_gemm=0"]
    backend = ["compile.backend=aot_eager"] if device == "cpu" and "compile=" in layout else []
    found = train(tmp_path, *shared, *layout.split(), *backend, mutate=use_one_device, timeout=300)
    expected = one_rank(*shared)
    assert found.loss == pytest.approx(expected.loss, rel=1e-2)
    assert found.grad_norm[0] == pytest.approx(expected.grad_norm[0], rel=3e-2)
    assert found.loss[-1] < found.loss[0] - 0.5
