"""Promise 1 for tensor parallelism: however matrices, tokens and the vocabulary are divided, the curve stays."""

from pathlib import Path

import pytest

from tests.parity.runs import EVALUATE, LINES, PARAGRAPHS, Curve, assert_same_curve, remembered, train
from tests.parity.test_context_parallel import assert_same_evaluation
from tests.parity.test_continued import assert_continues, continued

TP2, TP4 = "parallelism.tp=2", "parallelism.tp=4"
FSDP2 = "parallelism.dp_shard=2"
AOT = "compile=blocks compile.backend=aot_eager"
WHOLE_TOKENS = "parallelism.sequence_parallel=false"
WHOLE_LOGITS = "parallelism.loss_parallel=false"

LAYOUTS = [
    TP2,
    f"{TP2} {WHOLE_TOKENS} {WHOLE_LOGITS}",
    f"{TP2} {WHOLE_TOKENS} training.micro_batch_size=1",
    f"{TP2} {WHOLE_LOGITS} activation_checkpoint=full",
    # More ranks than key and value heads, of which there are two.
    pytest.param(f"{TP4} training.micro_batch_size=1", marks=pytest.mark.night),
    pytest.param(f"{TP4} {WHOLE_TOKENS} activation_checkpoint=selective", marks=pytest.mark.day),
    pytest.param(f"{TP4} {FSDP2} {AOT}", marks=pytest.mark.night),
    f"{TP2} {FSDP2} training.micro_batch_size=2",
    f"{TP2} {FSDP2} {AOT} activation_checkpoint=full {WHOLE_TOKENS}",
    pytest.param(f"{TP2} parallelism.dp_shard=4 parallelism.reshard_after_forward=always", marks=pytest.mark.night),
    f"{TP2} parallelism=ddp activation_checkpoint=every_n",
    f"{TP2} parallelism=hsdp {AOT}",
    f"{TP2} {FSDP2} parallelism.cpu_offload=true",
    f"{TP2} {FSDP2} training.loss_chunk_tokens=37",
    f"{TP2} parallelism.cp=2",
    f"{TP2} parallelism.cp=2 parallelism.cp_method=allgather {WHOLE_TOKENS}",
    f"{TP2} parallelism.cp=2 {FSDP2} {AOT}",
]

EXPERIMENTS = {
    "plain": "",
    "evaluated": " ".join([*PARAGRAPHS, EVALUATE, "training.z_loss=0.01"]),
    "documents": " ".join([*LINES, EVALUATE]),
    "uneven": "model.vocab_size=257",
    "uneven, tied": "model.vocab_size=263 model.tied_embeddings=true",
    "tied": "model.tied_embeddings=true",
    "one kv head": "model.kv_heads=1",
    "no groups": "model.kv_heads=4",
    # Five groups of gate and up rows, which ranks replicate.
    "cut groups": "model.ffn_dim=160",
}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return remembered(lambda: tmp_path_factory.mktemp("one"), EXPERIMENTS)


@pytest.mark.proves("llama", "layout")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_change_the_curve(tmp_path: Path, one_device, layout):
    assert_same_curve(train(tmp_path, *layout.split()), one_device("plain"))


@pytest.mark.parametrize(
    ("experiment", "layout"),
    [
        ("evaluated", f"{TP2} {FSDP2}"),
        ("evaluated", f"{TP4} training.loss_chunk_tokens=16384"),
        pytest.param(
            "documents",
            f"{TP2} {FSDP2} training.micro_batch_size=1 training.loss_chunk_tokens=37",
            marks=pytest.mark.night,
        ),
        ("documents", f"{TP2} parallelism.cp=2"),
        ("uneven", f"{TP2} parallelism.dp_shard=4"),
        ("uneven", f"{TP4} {WHOLE_LOGITS} training.micro_batch_size=1"),
        ("uneven, tied", f"{TP4} {FSDP2}"),
        ("uneven, tied", f"{TP2} training.loss_chunk_tokens=64 compile=all compile.backend=aot_eager"),
        ("tied", f"{TP2} {FSDP2} {WHOLE_TOKENS}"),
        ("tied", f"{TP2} {WHOLE_LOGITS}"),
        ("one kv head", f"{TP2} {FSDP2}"),
        ("one kv head", f"{TP4} parallelism.cp=2"),
        ("no groups", f"{TP2} parallelism.cp=2 parallelism.cp_method=ulysses"),
        ("no groups", TP4),
        pytest.param("cut groups", f"{TP2} {FSDP2}", marks=pytest.mark.night),
        pytest.param("cut groups", f"{TP4} {FSDP2} {AOT}", marks=pytest.mark.night),
        pytest.param("cut groups", f"{TP2} parallelism.pp=2 training.micro_batch_size=1", marks=pytest.mark.night),
        pytest.param("cut groups", f"{TP2} {WHOLE_TOKENS} activation_checkpoint=full", marks=pytest.mark.night),
    ],
)
def test_nor_of_another_experiment(tmp_path: Path, one_device, experiment, layout):
    found = train(tmp_path, *EXPERIMENTS[experiment].split(), *layout.split())
    assert_same_curve(found, one_device(experiment))
    if "evaluate" in EXPERIMENTS[experiment]:
        assert_same_evaluation(found, one_device(experiment))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"{TP2} {FSDP2}", TP4),
        (f"{TP4} model.vocab_size=257", f"{TP2} {FSDP2} model.vocab_size=257"),
        (f"{TP2} {FSDP2} parallelism.cp=2", ""),
        pytest.param("parallelism=hsdp", f"{TP2} parallelism.cp=2", marks=pytest.mark.night),
        pytest.param(f"{TP2} {FSDP2} model.ffn_dim=160", f"{TP4} model.ffn_dim=160", marks=pytest.mark.night),
    ],
)
def test_resumes_with_other_tensor_parallelism(tmp_path: Path, before, after):
    whole, changed = continued(tmp_path, before.split(), after.split())
    assert_continues(whole, changed)


@pytest.mark.parametrize("layout", [f"{TP2} training.fp32_modules=[embedding,blocks.0,blocks.*.attention_norm,head]"])
def test_modules_in_fp32_among_bf16(tmp_path: Path, layout):
    bf16 = "training.mixed_precision=bf16"
    alone: Curve = train(tmp_path / "one", bf16, *layout.split()[1:])
    found = train(tmp_path / "two", bf16, *layout.split())
    assert found.loss == pytest.approx(alone.loss, rel=2e-3)
    assert found.grad_norm[0] == pytest.approx(alone.grad_norm[0], rel=5e-3)
