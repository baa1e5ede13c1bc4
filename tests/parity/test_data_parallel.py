"""Promise 1 for data parallelism: FSDP, HSDP and DDP on 1, 2 and 4 ranks give the curve of one device."""

import itertools
from pathlib import Path

import pytest
import torch

from tests.parity.runs import LINES, assert_same_curve, remembered, train

FSDP2 = "parallelism.dp_shard=2"
FSDP4 = "parallelism.dp_shard=4"
HSDP = "parallelism=hsdp"
DDP2 = "parallelism=ddp"
DDP4 = "parallelism=ddp parallelism.dp_replicate=4"

LAYOUTS = [
    FSDP2,
    FSDP4,
    f"{FSDP4} parallelism.reshard_after_forward=always",
    f"{FSDP4} parallelism.reshard_after_forward=never",
    f"{FSDP4} training.micro_batch_size=1",
    f"{FSDP2} training.micro_batch_size=2 activation_checkpoint=full",
    f"{FSDP2} compile=blocks compile.backend=aot_eager",
    f"{FSDP2} compile=blocks compile.backend=aot_eager activation_checkpoint=full training.micro_batch_size=1",
    HSDP,
    f"{HSDP} training.micro_batch_size=1",
    DDP2,
    f"{DDP2} training.micro_batch_size=1 compile=blocks compile.backend=aot_eager",
    DDP4,
    f"{FSDP4} parallelism.cpu_offload=true training.micro_batch_size=1",
    f"{HSDP} parallelism.cpu_offload=true",
    "parallelism.cpu_offload=true",
    f"{FSDP4} parallelism.prefetch_blocks=3 parallelism.reshard_after_forward=always",
    f"{HSDP} parallelism.prefetch_blocks=2 training.micro_batch_size=1",
    "training.micro_batch_size=1",
    "training.micro_batch_size=4 activation_checkpoint=full",
    "compile=blocks compile.backend=aot_eager",
    "model.attention_backend=math",
]
"""Everything that may differ without changing what is computed."""

EXPERIMENTS = {
    "plain": "",
    "documents": " ".join(LINES),
    "tied": "model.tied_embeddings=true",
    "unclipped": "training.max_grad_norm=null",
    "twelve rows": f"training.global_batch_size=12 {' '.join(LINES)} data.streaming=true",
    # One step of AdamW with so large an epsilon that the update is 100 times the gradient, beside small weights.
    "gradients of twelve rows": "training.global_batch_size=12 data.streaming=true training.steps=1 optimizer.lr=1e8 "
    "optimizer.eps=1e6 optimizer.weight_decay=0 training.max_grad_norm=null lr_schedule=constant",
}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return remembered(lambda: tmp_path_factory.mktemp("one"), EXPERIMENTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_change_the_curve(tmp_path: Path, one_device, layout):
    assert_same_curve(train(tmp_path, *layout.split()), one_device("plain"))


@pytest.mark.parametrize("experiment", ["documents", "tied", "unclipped"])
@pytest.mark.parametrize("layout", [f"{FSDP4} training.micro_batch_size=1", HSDP, DDP2])
def test_nor_of_another_experiment(tmp_path: Path, one_device, layout, experiment):
    found = train(tmp_path, *layout.split(), *EXPERIMENTS[experiment].split())
    assert_same_curve(found, one_device(experiment))


def test_documents_by_another_kernel(tmp_path: Path, one_device):
    found = train(tmp_path, "model.attention_backend=math", FSDP2, *EXPERIMENTS["documents"].split())
    assert_same_curve(found, one_device("documents"))


@pytest.mark.night
@pytest.mark.parametrize(
    "layout",
    [
        "parallelism.dp_shard=3",
        "parallelism.dp_shard=3 training.micro_batch_size=1",
        "parallelism.dp_shard=6",
        "parallelism=ddp parallelism.dp_replicate=3",
        "parallelism.dp_replicate=2 parallelism.dp_shard=3 training.micro_batch_size=2",
        "parallelism.dp_replicate=3 parallelism.tp=2",
    ],
)
@pytest.mark.parametrize("experiment", ["twelve rows", "gradients of twelve rows"])
def test_degrees_that_share_virtual_shards(tmp_path: Path, one_device, layout: str, experiment: str):
    found = train(tmp_path, *layout.split(), *EXPERIMENTS[experiment].split())
    assert_same_curve(found, one_device(experiment))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("kernel", "precision"), [("efficient", "fp32"), ("flex", "fp32"), ("flex", "bf16"), ("cudnn", "bf16")]
)
def test_every_kernel_of_a_gpu_masks_documents(tmp_path: Path, kernel: str, precision: str):
    """Against the plain one, in the same precision; without the mask the curve is another one."""
    shared = ["cluster.device=cuda", f"training.mixed_precision={precision}", *EXPERIMENTS["documents"].split()]
    expected = train(tmp_path / "math", *shared, "model.attention_backend=math")
    found = train(tmp_path / kernel, *shared, f"model.attention_backend={kernel}")
    assert found.loss == pytest.approx(expected.loss, rel=1e-4 if precision == "fp32" else 2e-2)
    unmasked = train(tmp_path / "unmasked", *shared, f"model.attention_backend={kernel}", "data.document_mask=false")
    assert unmasked.loss != pytest.approx(expected.loss, rel=1e-4)


def test_documents_are_short_enough_to_matter(one_device):
    tokens = [row["tokens"] for row in one_device("documents").rows]
    steps = [later - earlier for earlier, later in itertools.pairwise(tokens)]
    assert len(set(steps)) > 2, "every step predicts as many tokens"
    assert max(steps) < 0.99 * 8 * 64


def test_the_curve_learns(one_device):
    """A curve that does not move would agree with itself in every layout."""
    curve = one_device("plain")
    assert curve.loss[-1] < curve.loss[0] - 0.5
    assert len(set(curve.grad_norm)) == len(curve.grad_norm)


def test_clipping_is_on_in_the_plain_experiment_and_changes_it(one_device):
    assert max(one_device("plain").grad_norm) > 1.0
    assert one_device("plain").loss[-1] != one_device("unclipped").loss[-1]


FP32_MODULES = "training.mixed_precision=bf16 training.fp32_modules=[embedding,blocks.0,blocks.*.attention_norm,head]"


@pytest.mark.parametrize("layout", [f"{FSDP2} training.micro_batch_size=1", f"{HSDP} activation_checkpoint=full"])
def test_modules_in_fp32_among_bf16(tmp_path: Path, one_device, layout):
    found = train(tmp_path / "many", *FP32_MODULES.split(), *layout.split())
    alone = train(tmp_path / "one", *FP32_MODULES.split())
    assert found.loss == pytest.approx(alone.loss, rel=2e-3)
    assert found.grad_norm[0] == pytest.approx(alone.grad_norm[0], rel=5e-3)
    assert alone.loss == pytest.approx(one_device("plain").loss, rel=5e-3)


def test_an_unknown_module_is_an_error(tmp_path: Path):
    with pytest.raises(AssertionError, match=r"training.fp32_modules=embeding.*\n.*did you mean embedding"):
        train(tmp_path, "training.mixed_precision=bf16", "training.fp32_modules=[embeding]")
