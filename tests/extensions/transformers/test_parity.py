"""Promise 1 for classes of transformers: in every layout that their plans allow, the curve stays."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.checkpoint.test_expert_weights import count_read_bytes
from tests.extensions.transformers.hf_folders import CLASSES, SIZES, write_config
from tests.parity.runs import EVALUATE, LINES, Curve, assert_same_curve, remembered, train
from tests.parity.test_continued import assert_continues, continued
from tests.ranks import PRELOAD

# Else every rank imports it, for seconds.
PRELOAD.append("transformers.modeling_utils")

TP2, FSDP2 = "parallelism.tp=2", "parallelism.dp_shard=2"
AOT = "compile=blocks compile.backend=aot_eager"
WHOLE_TOKENS = "parallelism.sequence_parallel=false"
VARIANTS = {
    "documents": " ".join([*LINES, EVALUATE]),
    "float8": "quantization=float8_rowwise quantization.smallest_gemm=0",
}

LAYOUTS = [
    ("gemma documents", f"{TP2} {FSDP2}"),
    ("gpt_neox", f"{TP2} training.micro_batch_size=1"),
    ("olmo2", f"{TP2} {FSDP2}"),
    ("mistral documents", f"{TP2} activation_checkpoint=full training.loss_chunk_tokens=37"),
    ("mistral documents", "parallelism.cp=2"),
    ("gemma documents", f"parallelism.pp=2 {TP2} training.micro_batch_size=2"),
    ("qwen3_moe", f"{FSDP2} parallelism.ep=2"),
    ("deepseek_v3", f"{TP2} {FSDP2} parallelism.ep=4"),
]
"""Layouts that show what is different about a class."""

MORE = [
    ("gemma", "parallelism=hsdp activation_checkpoint=every_n"),
    ("gemma", f"{TP2} {WHOLE_TOKENS} parallelism.loss_parallel=false"),
    ("gemma", f"{TP2} {FSDP2} {AOT}"),
    ("gpt_neox", f"{FSDP2} {AOT} activation_checkpoint=full"),
    ("gpt_neox documents", f"parallelism.tp=4 {WHOLE_TOKENS}"),
    ("gpt_neox", "parallelism=ddp"),
    ("olmo2", f"{TP2} {WHOLE_TOKENS} {AOT}"),
    ("phi3", f"{TP2} {FSDP2} activation_checkpoint=selective"),
    ("phi3", f"{TP2} {WHOLE_TOKENS}"),
    ("mistral", f"{TP2} {FSDP2} {AOT}"),
    ("olmo2", "parallelism.cp=2 parallelism.cp_method=ulysses"),
    ("olmo2", f"parallelism.pp=2 {FSDP2} training.micro_batch_size=1 parallelism.pp_schedule=1F1B"),
    ("qwen3_moe documents", f"{TP2} {WHOLE_TOKENS} parallelism.ep=2"),
    ("qwen3_moe", f"{FSDP2} parallelism.ep=2 activation_checkpoint=full"),
    ("qwen3_moe", "parallelism.cp=2 parallelism.ep=2"),
    ("qwen3_moe", f"{TP2} {FSDP2} parallelism.ep=2 {AOT}"),
    ("qwen3_moe", f"parallelism.pp=2 {FSDP2} parallelism.ep=2 training.micro_batch_size=2"),
    ("deepseek_v3", f"{TP2}"),
    ("qwen3_5_text", f"{TP2} {WHOLE_TOKENS}"),
]


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Callable[[str], str]:
    """Overrides by name: a class, and perhaps a variant."""
    folder = tmp_path_factory.mktemp("repositories")
    for name in CLASSES:
        write_config(folder, name)

    def of(experiment: str) -> str:
        name, _, variant = experiment.partition(" ")
        return f"model=huggingface model.repository={folder / name} {VARIANTS.get(variant, '')}"

    return of


@pytest.fixture(scope="module")
def one_device(tmp_path_factory, words):
    names = {experiment for experiment, _ in (*LAYOUTS, *MORE)} | {"gemma float8"}
    return remembered(lambda: tmp_path_factory.mktemp("one"), {name: words(name) for name in names})


@pytest.mark.proves("huggingface", "layout")
@pytest.mark.parametrize(
    ("experiment", "layout"),
    [
        pytest.param(*LAYOUTS[0], marks=pytest.mark.day),
        *LAYOUTS[1:],
        *(pytest.param(*case, marks=pytest.mark.night) for case in MORE),
    ],
)
def test_layout_does_not_change_the_curve(tmp_path: Path, one_device, words, experiment: str, layout: str):
    assert_same_curve(train(tmp_path, *words(experiment).split(), *layout.split()), one_device(experiment))


@pytest.mark.proves("huggingface", "fp8")
@pytest.mark.night
def test_its_linears_are_quantized(tmp_path: Path, one_device, words):
    found: Curve = train(tmp_path, *words("gemma float8").split(), TP2)
    assert found.loss == pytest.approx(one_device("gemma float8").loss, rel=1e-3)
    assert one_device("gemma float8").loss != one_device("gemma").loss


@pytest.mark.night
def test_resumes_in_another_layout(tmp_path: Path, words):
    given = words("gpt_neox").split()
    whole, changed = continued(tmp_path, [*given, TP2], [*given, FSDP2])
    assert_continues(whole, changed)


@pytest.mark.night
def test_in_the_same_layout_it_resumes_bitwise(tmp_path: Path, words):
    given = [*words("gemma").split(), FSDP2]
    whole, changed = continued(tmp_path, given, given)
    assert changed.loss == whole.loss[5:]
    assert all(torch.equal(changed.weights[name], weight) for name, weight in whole.weights.items())


@pytest.mark.night
def test_each_rank_reads_its_shards_of_a_folder(tmp_path: Path, words):
    transformers = pytest.importorskip("transformers")
    made = transformers.CONFIG_MAPPING["phi3"].from_dict({**SIZES, **CLASSES["phi3"]})
    theirs = transformers.AutoModelForCausalLM.from_config(made, torch_dtype="float32")
    theirs.save_pretrained(tmp_path / "phi3")
    given = [
        *words("phi3").split(),
        f"checkpoint.initial={tmp_path / 'phi3'}",
        "training.steps=1",
        "optimizer.lr=1e-12",
    ]
    count = partial(count_read_bytes, str(tmp_path), "")
    found = train(tmp_path / "run", *given, *TP2.split(), *FSDP2.split(), mutate=count)
    counts = [int(file.read_text()) for file in tmp_path.glob("read-*")]
    total = sum(weight.nbytes for weight in found.weights.values())
    assert len(counts) == 4
    # Norms are read by both tensor-parallel ranks.
    assert max(counts) < 0.3 * total
    assert total <= sum(counts) < 1.05 * total
    named = dict(theirs.named_parameters())
    assert len(found.weights) == len(named)
    for ours, name in (
        ("embedding", "model.embed_tokens"),
        ("blocks.1.self_attn.qkv_proj", "model.layers.1.self_attn.qkv_proj"),
    ):
        torch.testing.assert_close(found.weights[f"{ours}.weight"], named[f"{name}.weight"].detach(), atol=1e-8, rtol=0)
