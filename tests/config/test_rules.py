"""Every rule: overrides that violate it alone, and overrides that satisfy it."""

import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from tests.config.composing import experiment, give_gpus
from titan_exp.config import torch_features
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.layout.pipeline_schedules import SCHEDULES
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.schema import annotation_of
from titan_exp.models.llama import Config
from titan_exp.models.spec.transformer import transformer_layer, transformer_spec
from titan_exp.rules import always_rules, check, layout_rules, violations
from titan_exp.rules.data import source_has_input
from titan_exp.rules.mesh import heads_divide, kernel_merges
from titan_exp.rules.rule import Refuse, Values

HERE = Path(__file__).parent
SCHEDULE = "parallelism.pp_schedule"
BATCH_RAMP = "training.batch_ramp"
QK_CLIP = "optimizer.qk_clip"
DETERMINISTIC = "training.deterministic=true"
ASYNC_TP = ["compile=blocks", "parallelism.tp=2", "parallelism.async_tp=true"]
BASE = (
    *("training.steps=600", "training.seq_len=256", "training.global_batch_size=16", "training.micro_batch_size=null"),
    *("model.dim=192", "model.heads=6", "model.kv_heads=2", "model.ffn_dim=512", "model.vocab_size=320"),
    *("model.context=1024", "data.virtual_shards=64", "data.validation_fraction=0.02", "evaluation.every=200"),
    "training.mixed_precision=fp32",
    "model.layers=6",
)
"""Base of the cases below, independent of shipped defaults."""
MIXED = ("model.architecture=tests.models.own_attention", "+model.window=64", "+model.chunk=128")
"""A model of the base with windows, chunks and sinks."""
SINKS = (MIXED[0], "+model.window=256", "+model.chunk=256")
"""The same with limits that its sequences do not reach."""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Relative paths of the configuration start here, on a machine without GPUs."""
    monkeypatch.chdir(tmp_path)
    give_gpus(monkeypatch, 0)


def broken(*overrides: str) -> list[Violation]:
    has_experts = any(override.startswith("model=qwen3_moe") for override in overrides)
    base = [override for override in BASE if not (has_experts and override.startswith("model.ffn_dim"))]
    return violations(experiment(*base, *overrides))


def only(*overrides: str) -> Violation:
    """The one violation that these overrides cause."""
    found = broken(*overrides)
    assert len(found) == 1, [str(violation) for violation in found]
    assert found[0].reason
    assert found[0].remedy
    return found[0]


def test_the_default_run_keeps_every_rule():
    assert broken() == []


TILES = [
    *("quantization=nvfp4", "quantization.smallest_gemm=0", "model.dim=256", "model.heads=4", "model.kv_heads=2"),
    *("model.head_dim=64", "model.ffn_dim=512"),
]
"""Dims that are multiples of 128, as torchao's NVFP4 kernels need."""


@pytest.mark.parametrize(
    ("overrides", "field", "remedy"),
    [
        # batch
        (["training.global_batch_size=15", "training.micro_batch_size=4"], "training.global_batch_size", "12 or 16"),
        (
            ["training.global_batch_size=15", "training.micro_batch_size=4"],
            "training.global_batch_size",
            "micro_batch_size=1, 3 or 5",
        ),
        (["parallelism=ddp", "training.global_batch_size=7"], "training.global_batch_size", "6 or 8"),
        (["parallelism.dp_shard=4", "training.global_batch_size=2"], "training.global_batch_size", "=4"),
        (["parallelism.dp_replicate=3", "training.global_batch_size=18"], "", ""),
        (["parallelism.dp_replicate=128", "training.global_batch_size=128"], "", ""),
        # averages, clipping
        (["weight_average=tail", "weight_average.steps=700"], "weight_average.steps", "=600"),
        *(
            (["optimizer=muon", "optimizer.qk_clip=30", *rest], field, "optimizer.qk_clip=null" if field else "")
            for rest, field in (
                ([], ""),
                (["parallelism.cp=2"], ""),
                (["model=qwen3_debug"], QK_CLIP),
                (["model.architecture=tests.models.own_model.Bigram"], QK_CLIP),
            )
        ),
        (["weight_average.decay=0.9"], "weight_average.decay", "use it with weight_average=ema"),
        (["weight_average=ema", "weight_average.steps=50"], "weight_average.steps", "weight_average=tail"),
        (["grad_clip.max_value=1e-3"], "grad_clip.max_value", "use it with grad_clip=value"),
        (["grad_clip=adagc", "grad_clip.max_value=1e-3"], "grad_clip.max_value", "grad_clip=value"),
        (["grad_clip=value", "grad_clip.decay=0.5"], "grad_clip.decay", "grad_clip=adagc"),
        (["grad_clip.relative=1.05", "grad_clip.warmup_steps=100"], "", ""),
        (["weight_average=ema", "optimizer=schedule_free_adamw"], "weight_average.mode", "weight_average=none"),
        (["weight_average=tail", "weight_average.steps=600"], "", ""),
        (["optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=true"], "optimizer.nesterov", "momentum=0.9"),
        (["optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=false"], "", ""),
        (["optimizer=muon", "optimizer.momentum=0"], "optimizer.nesterov", "nesterov=false"),
        (
            ["grad_clip=adagc", "+optimizer.groups.a={match:[vector],max_grad_norm:1}"],
            "optimizer.groups.a.max_grad_norm",
            "grad_clip=norm",
        ),
        (
            ["+optimizer.groups.rest={match:[vector],max_grad_norm:1}"],
            "optimizer.groups.rest.max_grad_norm",
            "another name",
        ),
        (["grad_clip=value", "+optimizer.groups.a={match:[vector],max_grad_norm:1}"], "", ""),
        # precision
        (["training.accumulation_precision=bf16"], "training.accumulation_precision", "mixed_precision=bf16"),
        (["training.accumulation_precision=bf16", "training.mixed_precision=bf16"], "", ""),
        (
            [
                *("training.accumulation_precision=bf16", "training.mixed_precision=bf16"),
                *("model.tied_embeddings=true", "parallelism.pp=2"),
            ],
            "training.accumulation_precision",
            "parallelism.pp=1",
        ),
        (["training.fp32_modules=[embedding]"], "training.fp32_modules", "mixed_precision=bf16"),
        (
            ["training.fp32_modules=[embed*]", "training.mixed_precision=bf16", "model.tied_embeddings=true"],
            "training.fp32_modules",
            "tied_embeddings=false",
        ),
        (
            ["training.fp32_modules=[blocks.*.attention_norm]", "training.mixed_precision=bf16", "compile=blocks"],
            "training.fp32_modules",
            "compile=none",
        ),
        # quantization
        (["quantization=float8_tensorwise"], "", ""),
        (["quantization=mxfp8", "parallelism.tp=2"], "", ""),
        (
            [
                "quantization=mxfp8",
                "model.heads=4",
                "model.kv_heads=2",
                "model.head_dim=36",
                "quantization.filter=['*.qkv']",
            ],
            "quantization.recipe",
            "filter=['*.attention.out']",
        ),
        (
            [
                "quantization=mxfp8",
                "parallelism.tp=3",
                "model.heads=9",
                "model.kv_heads=3",
                "model.head_dim=16",
                "model.ffn_dim=576",
                "training.seq_len=255",
                "parallelism.sequence_parallel=false",
                "quantization.filter=['*.attention.*']",
                "training.global_batch_size=32",
            ],
            "",
            "",
        ),
        (
            ["quantization=float8_rowwise", "quantization.filter=[blocks.0.atention.qkv]"],
            "quantization.filter",
            "attention.qkv?",
        ),
        (["quantization=float8_rowwise", "quantization.filter=['*']"], "quantization.filter", "quantization=none"),
        (["quantization=float8_rowwise", "quantization.smallest_gemm=4096"], "quantization.smallest_gemm", "=192"),
        (
            [
                "quantization=float8_rowwise",
                "quantization.high_precision_first=3",
                "quantization.high_precision_last=3",
            ],
            "quantization.high_precision_first",
            "at most 5",
        ),
        (
            ["quantization=mxfp8", "training.seq_len=40", "training.micro_batch_size=2"],
            "training.seq_len",
            "32 or 64",
        ),
        (["quantization=nvfp4", "parallelism.tp=2"], "", ""),
        (
            [
                "quantization=nvfp4",
                "model.heads=4",
                "model.kv_heads=2",
                "model.head_dim=36",
                "quantization.filter=['*.out']",
            ],
            "",
            "",
        ),
        (
            ["quantization=nvfp4", "model.head_dim=36", "quantization.filter=['*.out']"],
            "quantization.recipe",
            "'*.attention.qkv'",
        ),
        # Pairs of sequences would be whole blocks, but sixteen tokens of two sequences are not transformed together.
        (["quantization=nvfp4", "training.seq_len=40", "training.micro_batch_size=2"], "training.seq_len", "32 or 48"),
        (["quantization=nvfp4", "training.seq_len=96", "parallelism.cp=4"], "training.seq_len", "=128"),
        (["quantization=nvfp4", "training.seq_len=128", "parallelism.cp=4"], "", ""),
        (["quantization=nvfp4", "quantization.power_of_two_scales=false"], "", ""),
        (["quantization=nvfp4", "quantization.stochastic_rounding=true"], "", ""),
        (["quantization=mxfp8", "quantization.stochastic_rounding=true"], "quantization.stochastic_rounding", "=false"),
        (["quantization=float8_rowwise_gw_hp", "training.seq_len=41", "training.micro_batch_size=1"], "", ""),
        (
            ["quantization=float8_rowwise", "parallelism.tp=4", "model.heads=8", "model.head_dim=32"],
            "parallelism.tp",
            "'*.qkv'",
        ),
        (
            [
                "quantization=float8_rowwise",
                "parallelism.tp=4",
                "model.heads=8",
                "model.head_dim=32",
                "quantization.filter=['*.qkv']",
            ],
            "",
            "",
        ),
        (["quantization=mxfp8", "quantization.power_of_two_scales=false"], "quantization.power_of_two_scales", "=true"),
        (["quantization=mxfp8", "quantization.precomputed_scales=true"], "quantization.precomputed_scales", "=false"),
        (
            ["quantization=float8_rowwise", "quantization.float8_all_gather=true"],
            "quantization.float8_all_gather",
            "float8_tensorwise",
        ),
        (
            ["quantization=float8_tensorwise", "quantization.precomputed_scales=false"],
            "quantization.float8_all_gather",
            "precomputed_scales=true",
        ),
        (
            ["quantization=float8_tensorwise", "parallelism.cpu_offload=true"],
            "quantization.float8_all_gather",
            "all_gather=false",
        ),
        (["quantization=mxfp8", "quantization.emulate=false", "cluster.device=cpu"], "quantization.emulate", "=auto"),
        (
            ["quantization=mxfp8", "training.mixed_precision=bf16", "training.fp32_modules=[blocks.0]"],
            "training.fp32_modules",
            "high_precision_first",
        ),
        (
            [
                "quantization=mxfp8",
                "training.mixed_precision=bf16",
                "training.fp32_modules=[blocks.0]",
                "quantization.high_precision_first=1",
            ],
            "",
            "",
        ),
        (["optimizer.state_precision=int8"], "", ""),
        (
            ["optimizer.state_precision=int8", "parallelism.tp=2", "model.head_dim=16"],
            "optimizer.state_precision",
            "smaller parallelism.tp",
        ),
        (["optimizer.state_precision=bf16", "parallelism.tp=2", "model.head_dim=16"], "", ""),
        (
            ["optimizer.state_precision=bf16", "optimizer.name=torch.optim.SGD"],
            "optimizer.state_precision",
            "optimizer.name=adamw",
        ),
        # checkpoint
        (["checkpoint.initial=nowhere"], "checkpoint.initial", "run folder"),
        (["checkpoint.initial=''"], "checkpoint.initial", "run folder"),
        (["checkpoint=async_pinned", "cluster.device=cpu"], "checkpoint.mode", "async_process"),
        (["checkpoint.initial_exclude=[head.*]"], "checkpoint.initial_exclude", "initial_exclude=[]"),
        (["training.steps=0", "checkpoint=none"], "training.steps", "checkpoint=sync"),
        (["training.steps=0"], "", ""),
        (["checkpoint.export=bf16", "checkpoint.export_every=10"], "", ""),
        (["checkpoint.export_every=10"], "checkpoint.export_every", "checkpoint.export=bf16"),
        (
            ["checkpoint.export=bf16", "model.architecture=tests.models.own_model.Bigram"],
            "checkpoint.export",
            "convert RUN weights.pt",
        ),
        # steps
        (["lr_schedule.warmup_steps=500"], "", ""),
        (["lr_schedule.warmup_steps=500", "lr_schedule.decay_steps=101"], "lr_schedule.decay_steps", "decay_steps=100"),
        (["training.batch_ramp=[[9,2],[9,8]]"], "", ""),
        (["training.batch_ramp=[[9,8],[9,2]]"], BATCH_RAMP, "with more sequences"),
        (["training.batch_ramp=[[9,16]]"], BATCH_RAMP, "with more sequences"),
        (["training.batch_ramp=[[500,2],[100,8]]"], BATCH_RAMP, "training.steps=601 or more"),
        (["training.batch_ramp=[[500,2],[99,8]]"], "", ""),
        (["training.batch_ramp=[[9,6]]", "parallelism.dp_shard=4"], BATCH_RAMP, "nearest: 4 or 8 sequences"),
        (
            ["training.batch_ramp=[[9,4]]", "parallelism.dp_shard=2", "training.micro_batch_size=4"],
            BATCH_RAMP,
            "8 sequences, or use training.micro_batch_size=1 or 2",
        ),
        (["training.batch_ramp=[[9,4]]", "parallelism.pp=2", "parallelism.pp_microbatches=4"], "", ""),
        (
            ["training.batch_ramp=[[9,2]]", "parallelism.pp=2", "parallelism.pp_microbatches=4"],
            BATCH_RAMP,
            "larger batches",
        ),
        (
            [
                *("training.batch_ramp=[[9,8]]", "parallelism.pp=2", "parallelism.pp_microbatches=4"),
                "training.micro_batch_size=4",
            ],
            BATCH_RAMP,
            "micro_batch_size=1 or 2",
        ),
        (["training.batch_ramp=[[9,2]]", "parallelism.pp=2", f"{SCHEDULE}=DualPipeV"], BATCH_RAMP, "a smaller"),
        (["training.batch_ramp=[[9,4]]", "parallelism.pp=2", f"{SCHEDULE}=DualPipeV"], "", ""),
        (["lr_schedule.warmup_steps=601"], "lr_schedule.warmup_steps", "warmup_steps=600"),
        (["profiling=trace", "profiling.start=598"], "profiling.start", "profiling.start=597"),
        (["profiling=trace", "profiling.start=597"], "", ""),
        (["data.validation_fraction=0"], "evaluation.every", "evaluation.every=0"),
        (["data.validation_fraction=0", "evaluation.every=0"], "", ""),
        # shape
        (["model.kv_heads=4"], "model.kv_heads", "2, 3 or 6"),
        (["model.kv_heads=12"], "model.kv_heads", "2, 3 or 6"),
        (["model.head_dim=33"], "model.head_dim", "32 or 34"),
        (["model.ffn_dim=500"], "model.ffn_dim", "480 or 512"),
        (["training.seq_len=1025"], "training.seq_len", "training.seq_len=1024"),
        (["training.seq_len=4096"], "training.seq_len", "model.rope.scaling=yarn model.rope.factor=4 (or linear"),
        (["training.seq_len=4096", "model.rope.scaling=yarn", "model.rope.factor=4"], "", ""),
        (["training.seq_len=4096", "model.rope.scaling=linear", "model.rope.factor=4"], "", ""),
        (["training.seq_len=4096", "model.rope.scaling=llama3", "model.rope.factor=4"], "", ""),
        (["training.seq_len=4096", "model.context=4096"], "", ""),
        (
            ["training.seq_len=4096", "model.rope.scaling=linear", "model.rope.factor=2"],
            "training.seq_len",
            "training.seq_len=2048 or less, or model.rope.factor=4, which",
        ),
        (["model.rope.scaling=yarn", "model.rope.factor=0.5"], "model.rope.factor", "model.rope.factor=1 or more"),
        (["model.rope.scaling=yarn", "model.rope.beta_fast=0.5"], "model.rope.beta_fast", "beta_fast=32"),
        (["training.seq_len=1024"], "", ""),
        (["model.rope.factor=8"], "model.rope.factor", "model.rope.scaling=llama3"),
        (
            ["model.rope.scaling=llama3", "model.rope.low_freq_factor=5"],
            "model.rope.low_freq_factor",
            "low_freq_factor=1",
        ),
        # attention, on CPU
        (["model.attention_backend=flex"], "model.attention_backend", "auto, flash or math"),
        (["model.attention_backend=cudnn"], "model.attention_backend", "auto, flash or math"),
        (["model.attention_backend=efficient"], "model.attention_backend", "auto, flash or math"),
        (["model.attention_backend=flash", "data.document_mask=true"], "", ""),
        # names
        (["training.objective=language_model"], "training.objective", "did you mean language_modeling?"),
        (["training.objective=nowhere.Distill"], "training.objective", "PYTHONPATH"),
        (["+training.objective_options.a=1"], "training.objective_options", "your own code"),
        (["lr_schedule.decay=cosin"], "lr_schedule.decay", "did you mean cosine?"),
        (["data.source=python-stdlib"], "data.source", "did you mean python_stdlib?"),
        (["optimizer.name=torch.optim.SGD"], "", ""),
        (["+optimizer.options.rho=1"], "optimizer.options", "your own code"),
        (["+optimizer.lr_scales.expert=0.5"], "optimizer.lr_scales.expert", "~optimizer.lr_scales.expert"),
        (["+optimizer.lr_scales.expert=0.5", "model=qwen3_moe_debug"], "", ""),
        (
            ["+optimizer.weight_decays.head=0", "model.tied_embeddings=true"],
            "optimizer.weight_decays.head",
            "~optimizer.weight_decays.head ++optimizer.weight_decays.embedding=0",
        ),
        (["+lr_schedule.options.a=1"], "lr_schedule.options", "your own code"),
        (["+data.options.a=1"], "data.options", "your own code"),
        (["+optimizer.options.momentum=0.9", "optimizer.name=torch.optim.SGD"], "", ""),
        (["compile.backend=inducter"], "compile.backend", "did you mean inductor?"),
        (["compile=blocks", "compile.components=[]"], "compile.components", "compile=none"),
        (["compile=none", "compile.components=[]"], "", ""),
        (["compile=blocks", "compile.backend=cudagraphs"], "compile.backend", "inductor"),
        # places
        (["experiment.name='a b/c'"], "experiment.name", "experiment.name=a_b_c"),
        (["experiment.name=.hidden"], "experiment.name", "experiment.name=hidden"),
        (["experiment.name=..."], "experiment.name", "experiment.name=my_idea"),
        ([f"paths.runs={__file__}/runs"], "paths.runs", "folder"),
        (["paths.runs=''"], "paths.runs", "paths.runs=runs"),
        # data
        (["data=text"], "data.paths", "data.paths='[notes,books/*.txt]'"),
        (["data=text", "data.paths=[nowhere/*.txt]"], "data.paths", "relative to the current folder"),
        (["data=text", "data.paths=[.]"], "data.paths", "a folder with files"),
        (["data=text", f"data.paths=['{HERE}']", "evaluation.every=0"], "", ""),
        (["data=text", f"data.paths=['{HERE}/*.py']", "evaluation.every=0"], "", ""),
        (["data=text", f"data.paths=['{__file__}']"], "data.document", "data.document=paragraph"),
        (["data=text", f"data.paths=['{__file__}']", "data.document=paragraph"], "", ""),
        (["data=text", f"data.paths=['{__file__}']", "evaluation.every=0"], "", ""),
        (["data.document=line"], "data.document", "data=text data.document=line"),
        (["data=c4", "data.document=paragraph"], "data.document", "data=text data.document=paragraph"),
        (["data=huggingface"], "data.dataset", "data.dataset=json"),
        (["data=huggingface", "data.dataset=json"], "data.data_files", "corpus.jsonl"),
        (["data=huggingface", "data.dataset=json", "data.data_files=[no.jsonl]"], "data.data_files", "relative"),
        (["data=huggingface", "data.dataset=./nowhere"], "data.dataset", "relative"),
        (["data=huggingface", "data.dataset=json", "data.data_files=['https://example.org/a.jsonl']"], "", ""),
        (["data=c4"], "", ""),
        (["data=fineweb_edu"], "", ""),
        (["data=c4", "data.validation_documents=null"], "", ""),
        (["data=fineweb", "data.validation_documents=null"], "data.validation_documents", "validation_documents=1024"),
        (["data=fineweb", "data.validation_documents=null", "evaluation.every=0"], "", ""),
        (["data=fineweb", "data.validation_documents=null", "data.streaming=false"], "", ""),
        (["data.paths=[notes]"], "data.paths", "data=text data.paths='[notes]'"),
        (["data=c4", "data.paths=[notes]"], "data.paths", "data=text"),
        (["data.dataset=allenai/c4"], "data.dataset", "data=huggingface data.dataset=allenai/c4"),
        (["data.subset=en"], "data.subset", "data=huggingface"),
        (["data.data_files=[a]"], "data.data_files", "data=huggingface"),
        (["data.validation_split=validation"], "data.validation_split", "data=huggingface"),
        (["data.streaming=true"], "", ""),
        (["model.vocab_size=256"], "model.vocab_size", "vocab_size=257"),
        (["model.vocab_size=257"], "", ""),
        (["data.tokenizer=nowhere.json"], "data.tokenizer", "data.tokenizer=bytes"),
        (["data.tokenizer=byte"], "data.tokenizer", "data.tokenizer=bytes"),
        # memory
        *(([f"activation_checkpoint={mode}"], "", "") for mode in ("full", "every_n", "selective")),
        (["activation_checkpoint=selective", "activation_checkpoint.save=[]"], "activation_checkpoint.save", "=full"),
        (
            ["activation_checkpoint=selective", "activation_checkpoint.save=[mm]"],
            "activation_checkpoint.save",
            "aten.mm",
        ),
        (
            ["activation_checkpoint=selective", "activation_checkpoint.save=[aten.mm/0]"],
            "activation_checkpoint.save",
            "/2",
        ),
        (
            ["activation_checkpoint=selective", "activation_checkpoint.save=[aten._scaled_dot_product_flash_atention]"],
            "activation_checkpoint.save",
            "did you mean aten._scaled_dot_product_flash_attention",
        ),
        (
            ["activation_checkpoint=selective", "activation_checkpoint.save=[_c10d_functional.reduce_scater_tensor]"],
            "activation_checkpoint.save",
            "did you mean _c10d_functional.reduce_scatter_tensor?",
        ),
        (
            ["activation_checkpoint=selective", "activation_checkpoint.save=[aten.xyzzyx]"],
            "activation_checkpoint.save",
            "torch.ops",
        ),
        (["activation_checkpoint=selective", "activation_checkpoint.save=[aten.mm.default/3,my_library.scan]"], "", ""),
        (["activation_checkpoint.save=[nonsense]"], "", ""),
        (["activation_checkpoint=selective", "activation_checkpoint.save=[auto/2]"], "", ""),
        *(
            (
                ["activation_checkpoint=selective", f"activation_checkpoint.save=[{wrong}]"],
                "activation_checkpoint.save",
                "auto/3",
            )
            for wrong in ("auto/0", "auto/3+", "auto,aten.mm")
        ),
        (
            ["activation_checkpoint=every_n", "activation_checkpoint.every=99"],
            "activation_checkpoint.every",
            "every=6 or less",
        ),
        (["activation_checkpoint.every=99"], "", ""),
        (["activation_checkpoint=budget"], "activation_checkpoint.mode", "compile=blocks"),
        (["activation_checkpoint=budget", "compile=blocks"], "", ""),
        (
            ["activation_checkpoint=budget", "compile=all", "compile.components=[loss]"],
            "activation_checkpoint.mode",
            "compile.components='[blocks,loss]', or",
        ),
        (["activation_checkpoint=budget", "compile=blocks", "compile.backend=aot_eager"], "", ""),
        (
            ["activation_checkpoint=budget", "compile=blocks", "compile.backend=eager"],
            "activation_checkpoint.mode",
            "compile.backend=inductor, or",
        ),
        (["training.loss_chunk_tokens=100", "training.z_loss=1e-4"], "", ""),
        (
            ["training.loss_chunk_tokens=100", "model.architecture=torch.nn.Linear"],
            "training.loss_chunk_tokens",
            "loss_chunk_tokens=null",
        ),
        (["training.z_loss=1e-4", "model.architecture=torch.nn.Linear"], "", ""),
        (
            ["training.loss_chunk_tokens=9", "training.fp32_modules=['h*']", "training.mixed_precision=bf16"],
            "training.loss_chunk_tokens",
            "leave the head out",
        ),
        (["training.loss_chunk_tokens=9", "training.fp32_modules=[norm]", "training.mixed_precision=bf16"], "", ""),
        # layout
        # tensor parallelism: 6 heads for 2 key and value heads, 16 groups of channels, 320 words
        (["parallelism.tp=2"], "", ""),
        (["parallelism.tp=2", "parallelism.cp=2", "parallelism.dp_shard=2"], "", ""),
        (["parallelism.tp=6", "model.ffn_dim=384", "training.seq_len=252"], "", ""),
        (["parallelism.tp=3", "training.seq_len=255", "model.ffn_dim=480"], "parallelism.tp", "tp=1, 2 or 6"),
        (["parallelism.tp=2", "model.ffn_dim=480"], "", ""),
        (["parallelism.tp=6", "model.ffn_dim=480", "training.seq_len=252"], "", ""),
        (
            ["parallelism.tp=6", "training.seq_len=252"],
            "parallelism.tp",
            "tp=2, 4 or 8, or use model.ffn_dim=480 or 576",
        ),
        (["parallelism.tp=2", "model.ffn_dim=480", "quantization=mxfp8"], "quantization.recipe", "to leave it in high"),
        (["parallelism.tp=2", "model.vocab_size=263"], "", ""),
        (
            [
                *("model.heads=64", "model.kv_heads=64", "model.head_dim=32", "model.ffn_dim=2048"),
                "parallelism.tp=64",
                "model.vocab_size=321",
            ],
            "parallelism.tp",
            "parallelism.tp=41, 46 or 54",
        ),
        (["parallelism.tp=2", "training.seq_len=255"], "training.seq_len", "254 or 256"),
        (["parallelism.tp=2", "parallelism.cp=2", "training.seq_len=252"], "", ""),
        (["parallelism.tp=2", "parallelism.cp=2", "training.seq_len=250"], "training.seq_len", "248 or 252"),
        (
            ["parallelism.tp=6", "model.ffn_dim=576", "parallelism.cp=2", "training.seq_len=256"],
            "training.seq_len",
            "252 or 264",
        ),
        (["parallelism.tp=2", "training.seq_len=255", "parallelism.sequence_parallel=false"], "", ""),
        (["parallelism.tp=2", "model.vocab_size=321", "parallelism.dp_shard=4"], "", ""),
        (
            ["parallelism.tp=2", "model.vocab_size=321", "parallelism.dp_shard=8", "model.dim=180"],
            "parallelism.dp_shard",
            "parallelism.dp_shard=6, 9 or 10",
        ),
        (
            ["parallelism.tp=2", "parallelism.loss_parallel=false", "training.loss_chunk_tokens=64"],
            "training.loss_chunk_tokens",
            "loss_parallel=true",
        ),
        (["parallelism.tp=2", "model.architecture=tests.models.own_model.Bigram"], "parallelism.tp", "dp_shard=2"),
        (["parallelism.async_tp=true"], "parallelism.async_tp", "async_tp=false"),
        (["parallelism.tp=2", "parallelism.async_tp=true"], "parallelism.async_tp", "async_tp=false"),
        (
            ["parallelism.tp=2", "parallelism.cp=2", "parallelism.cp_method=ulysses"],
            "parallelism.cp",
            "cp_method=ring or allgather",
        ),
        # pipeline
        (["parallelism.pp=2"], "", ""),
        *((["parallelism.pp=2", f"parallelism.pp_schedule={name}"], "", "") for name in SCHEDULES),
        (["parallelism.pp=2", "parallelism.pp_schedule=1f1b"], SCHEDULE, "did you mean 1F1B?"),
        (["parallelism.pp_schedule=Looped"], SCHEDULE, "LoopedBFS"),
        (["parallelism.pp=2", "parallelism.pp_schedule=nowhere.csv"], SCHEDULE, "from the current folder"),
        (["parallelism.pp_schedule=nowhere.csv"], "", ""),
        (["parallelism.pp=8"], "parallelism.pp", "pp=4, 5 or 6"),
        (["parallelism.pp=4", "parallelism.pp_schedule=ZBVZeroBubble"], "parallelism.pp", "pp=1, 2 or 3"),
        (["parallelism.pp=2", "parallelism.pp_layers=[3,2]"], "parallelism.pp_layers", "add up to 6"),
        (["parallelism.pp=2", "parallelism.pp_layers=[6,0]"], "", ""),
        (["parallelism.pp=3", "parallelism.pp_layers=[3,0,3]"], "parallelism.pp_layers", "at least 1"),
        (["parallelism.pp=2", "parallelism.pp_layers=[3,1,2]"], "parallelism.pp_layers", "a list of 2 numbers"),
        (
            ["parallelism.pp=2", "parallelism.pp_layers=[3,1,2]", "parallelism.pp_schedule=LoopedBFS"],
            "parallelism.pp_layers",
            "a list of 2, 4 or 6 numbers",
        ),
        (
            ["parallelism.pp=2", "parallelism.pp_layers=[3,1,1,1]"],
            "parallelism.pp_layers",
            "Interleaved1F1B, LoopedBFS or InterleavedZeroBubble",
        ),
        (
            ["parallelism.pp=2", "parallelism.pp_layers_per_stage=2"],
            "parallelism.pp_layers_per_stage",
            "pp_layers_per_stage=3, 4 or 5",
        ),
        (
            ["parallelism.pp=2", "parallelism.pp_layers_per_stage=1", "parallelism.pp_schedule=Interleaved1F1B"],
            "",
            "",
        ),
        (
            ["parallelism.pp=2", "parallelism.pp_layers=[3,3]", "parallelism.pp_last_stage_less=1"],
            "parallelism.pp_last_stage_less",
            "leave out pp_last_stage_less",
        ),
        (["parallelism.pp=2", "parallelism.pp_first_stage_less=6"], "", ""),
        (["parallelism.pp=2", "parallelism.pp_first_stage_less=8"], "parallelism.pp_first_stage_less", "a smaller"),
        (["parallelism.pp_layers=[3,3]"], "parallelism.pp_layers", "parallelism.pp=2"),
        (["parallelism.pp_microbatches=2"], "parallelism.pp_microbatches", "parallelism.pp=2"),
        (["parallelism.pp_last_stage_less=1"], "parallelism.pp_last_stage_less", "leave pp_last_stage_less out"),
        (["parallelism.pp=2", "parallelism.pp_microbatches=4"], "", ""),
        (["parallelism.pp=2", "parallelism.pp_microbatches=3"], "parallelism.pp_microbatches", "=1, 2 or 4"),
        (
            ["parallelism.pp=2", "parallelism.pp_microbatches=8", "training.micro_batch_size=4"],
            "parallelism.pp_microbatches",
            "=1, 2 or 4",
        ),
        (
            ["parallelism.pp=2", "parallelism.pp_schedule=DualPipeV", "training.micro_batch_size=8"],
            "training.micro_batch_size",
            "micro_batch_size=1, 2 or 4",
        ),
        (
            ["parallelism.pp=2", "parallelism.pp_schedule=DualPipeV", "training.global_batch_size=3"],
            "training.global_batch_size",
            "global_batch_size=4",
        ),
        (
            ["parallelism.pp=2", "parallelism.pp_schedule=DualPipeV", "parallelism.pp_microbatches=2"],
            "parallelism.pp_microbatches",
            "=4, 8 or 16",
        ),
        (
            [
                *("parallelism.pp=3", "parallelism.pp_schedule=Interleaved1F1B"),
                *("training.global_batch_size=14", "training.micro_batch_size=2"),
            ],
            "training.micro_batch_size",
            "micro_batch_size=7 or 14, or use parallelism.pp_microbatches=1",
        ),
        *(
            (["parallelism.pp=2", "parallelism.pp_schedule=ZBVZeroBubble", *rest], field, remedy)
            for rest, field, remedy in (
                (["parallelism.reshard_after_forward=always"], "parallelism.reshard_after_forward", "=auto or never"),
                (["parallelism.reshard_after_forward=never"], "", ""),
                (["activation_checkpoint=selective"], "activation_checkpoint.mode", "=full, every_n or none"),
                (["activation_checkpoint=full", "compile=blocks", "compile.backend=aot_eager"], "", ""),
                (["activation_checkpoint=selective", "compile=blocks", "compile.backend=aot_eager"], "", ""),
                (
                    ["activation_checkpoint=selective", "compile=blocks", "compile.backend=eager"],
                    "activation_checkpoint.mode",
                    "every_n or none",
                ),
            )
        ),
        (["parallelism.pp=2", "parallelism.reshard_after_forward=always"], "", ""),
        (["parallelism.pp=2", "activation_checkpoint=selective"], "", ""),
        (["parallelism.pp=2", "model.architecture=tests.models.own_model.Bigram"], "parallelism.pp", "dp_shard=2"),
        (["parallelism.cp=4"], "", ""),
        (["parallelism.cp=3"], "training.seq_len", "252 or 258"),
        (["parallelism.cp=2", "parallelism.cp_method=ulysses"], "", ""),
        (["parallelism.cp=4", "parallelism.cp_method=ulysses"], "parallelism.cp", "parallelism.cp=1 or 2"),
        (
            ["parallelism.cp=2", "parallelism.cp_method=ulysses", "training.seq_len=255"],
            "training.seq_len",
            "254 or 256",
        ),
        (["parallelism.cp=4", "parallelism.cp_ulysses=2"], "", ""),
        (["parallelism.cp=4", "parallelism.cp_ulysses=3"], "parallelism.cp_ulysses", "cp_ulysses=1, 2 or 4"),
        (["parallelism.cp_ulysses=2"], "parallelism.cp_ulysses", "cp_ulysses=1"),
        (["parallelism.cp=8", "parallelism.cp_ulysses=4"], "parallelism.cp_ulysses", "cp_ulysses=1 or 2"),
        (
            ["parallelism.cp=2", "parallelism.cp_method=ulysses", "parallelism.cp_ulysses=2"],
            "parallelism.cp_ulysses",
            "cp_method=ring or allgather",
        ),
        (["parallelism.cp=2", "model.attention_backend=flash"], "", ""),
        (["parallelism.cp=2", "model.attention_backend=math"], "model.attention_backend", "cp_method=ulysses"),
        (["parallelism.cp=2", "parallelism.cp_method=ulysses", "model.attention_backend=math"], "", ""),
        (["parallelism.cp=2", "model.attention_backend=flex"], "model.attention_backend", "auto, flash or math"),
        (["parallelism.cp=2", "model.architecture=tests.models.own_model.Bigram"], "parallelism.cp", "dp_shard=2"),
        (["parallelism.ep=2"], "parallelism.ep", "parallelism.ep=1 parallelism.dp_shard=2"),
        (["parallelism.etp=2"], "parallelism.etp", "parallelism.etp=1"),
        (["optimizer.implementation=triton"], "optimizer.implementation", "implementation=fused"),
        (["compile.cuda_graphs=true"], "compile.cuda_graphs", "compile.cuda_graphs=false"),
        (["model.attention_backend=fa3"], "model.attention_backend", "auto, flash or math"),
        (["quantization=float8_rowwise", "quantization.fused_casts=true"], "quantization.fused_casts", "casts=false"),
        (["quantization=mxfp8", "quantization.fused_casts=true"], "quantization.fused_casts", "float8_rowwise"),
        (["cluster.nodes=2"], "cluster.nodes", "cluster.nodes=1"),
        (["cluster.device=cuda"], "cluster.device", "cluster.device=cpu"),
        (["cluster.gpus_per_node=8"], "cluster.gpus_per_node", "parallelism.dp_shard=8"),
        (["parallelism.dp_shard=8"], "", ""),
        (["parallelism=hsdp"], "", ""),
    ],
)
def test_on_a_machine_without_gpus(overrides: list[str], field: str, remedy: str):
    if not field:
        assert broken(*overrides) == []
        return
    violation = only(*overrides)
    assert violation.field == field
    assert remedy in violation.remedy


def test_every_layer_counts():
    narrow = transformer_layer(replace(_config(), heads=3, kv_heads=1, head_dim=12), out_std=0.02)
    spec = transformer_spec(_config(), (transformer_layer(_config(), out_std=0.02), narrow))
    ulysses = experiment(*BASE, "parallelism.cp=2", "parallelism.cp_method=ulysses").parallelism
    (violation,) = heads_divide(spec, ulysses)
    assert "3 query heads with 1 key and value heads of some layers" in violation.reason
    assert "parallelism.cp=1," in violation.remedy
    ring = replace(ulysses, cp_method="ring")
    assert list(heads_divide(spec, ring)) == []
    (violation,) = kernel_merges(spec, ring, "cuda")
    assert violation.value == 12


def _config() -> Config:
    model = experiment(*BASE).model
    assert isinstance(model, Config)
    return model


def test_qk_clip_needs_a_kernel_without_a_mask_of_its_own(monkeypatch: pytest.MonkeyPatch):
    give_gpus(monkeypatch, 1)
    clipped = ["optimizer=muon", "optimizer.qk_clip=30", "training.mixed_precision=bf16"]
    assert broken(*clipped) == []
    assert only(*clipped, "model.attention_backend=flex").field == QK_CLIP
    assert broken(*clipped, "compile.cuda_graphs=true")[-1].field == QK_CLIP


EXPERTS_IN_FLOAT8 = [
    *("model=qwen3_moe_debug", "training.mixed_precision=bf16"),
    *("quantization=float8_tensorwise", "quantization.smallest_gemm=0", "quantization.emulate=true"),
]
DIVIDED = ["parallelism.tp=2", "parallelism.etp=2"]


@pytest.mark.parametrize(("version", "refused"), [("0.17.0", True), ("0.18.0", False), ("0.19.0.dev3+git", False)])
def test_nvfp4_on_gpus_names_the_torchao_that_it_needs(version: str, refused: bool, monkeypatch: pytest.MonkeyPatch):
    give_gpus(monkeypatch, 8)
    monkeypatch.setattr(torch_features, "torchao_version", lambda: version)
    tiles = [*TILES, "training.mixed_precision=bf16"]
    assert broken(*tiles, "quantization.emulate=true") == []
    assert broken("quantization=mxfp8", "training.mixed_precision=bf16", "quantization.smallest_gemm=0") == []
    assert broken(*tiles, "cluster.device=cpu") == []
    if not refused:
        assert broken(*tiles) == []
        return
    violation = only(*tiles)
    assert violation.field == "quantization.recipe"
    assert "torchao 0.18 or newer, and you have torchao 0.17.0" in violation.reason
    assert "pip install 'torchao>=0.18', or use quantization.emulate=true" in violation.remedy


@pytest.mark.parametrize(
    ("overrides", "field", "remedy"),
    [
        ([], "", ""),
        (["parallelism.dp_shard=16"], "parallelism.dp_shard", "dp_shard=2, 4 or 8"),
        (
            ["parallelism.dp_replicate=16", "parallelism.dp_shard=1"],
            "parallelism.dp_replicate",
            "dp_replicate=2, 4 or 8",
        ),
        (["parallelism.dp_replicate=2", "parallelism.dp_shard=8"], "parallelism.dp_shard", "dp_shard=1, 2 or 4"),
        (["parallelism.dp_replicate=3"], "parallelism.dp_shard", "1, 2, 4 or 8"),
        (["cluster.gpus_per_node=16", "parallelism.dp_shard=8"], "cluster.gpus_per_node", "gpus_per_node=8"),
        (["cluster.gpus_per_node=4"], "", ""),
        (["cluster.device=cpu", "parallelism.dp_shard=16"], "", ""),
        (["model.attention_backend=flash", "training.mixed_precision=bf16"], "", ""),
        (["model.attention_backend=flash"], "model.attention_backend", "mixed_precision=bf16"),
        (["model.attention_backend=cudnn"], "model.attention_backend", "mixed_precision=bf16"),
        (
            ["model.attention_backend=flash", "training.mixed_precision=bf16", "data.document_mask=true"],
            "model.attention_backend",
            "document_mask=false",
        ),
        (["model.attention_backend=cudnn", "training.mixed_precision=bf16", "data.document_mask=true"], "", ""),
        (
            ["model.attention_backend=cudnn", "training.mixed_precision=bf16", DETERMINISTIC],
            "model.attention_backend",
            "=auto, which takes flash",
        ),
        *(
            (
                [f"model.attention_backend={name}", "training.mixed_precision=bf16", "training.deterministic=true"],
                "",
                "",
            )
            for name in ("auto", "flash")
        ),
        (["model.attention_backend=flex"], "", ""),
        (["model.attention_backend=fa3", "training.mixed_precision=bf16"], "model.attention_backend", "hopper"),
        (["model.attention_backend=fa4", "training.mixed_precision=bf16"], "model.attention_backend", "flash-attn-4"),
        (
            [*MIXED, "model.attention_backend=flash", "training.mixed_precision=bf16"],
            "model.attention_backend",
            "auto, efficient or flex",
        ),
        (
            [*MIXED, "model.attention_backend=cudnn", "training.mixed_precision=bf16"],
            "model.attention_backend",
            "auto, efficient or flex",
        ),
        ([*MIXED, "model.attention_backend=flex"], "", ""),
        (
            ["model.attention_backend=flash", "training.mixed_precision=bf16", "model.head_dim=288"],
            "model.attention_backend",
            "auto, efficient or flex",
        ),
        (
            ["model.attention_backend=cudnn", "training.mixed_precision=bf16", "model.head_dim=36"],
            "model.attention_backend",
            "auto, flash or flex",
        ),
        (
            ["model.attention_backend=efficient", "training.mixed_precision=bf16", "model.head_dim=36"],
            "model.head_dim",
            "32 or 40, or use model.attention_backend=auto",
        ),
        (["model.attention_backend=efficient", "training.mixed_precision=fp32", "model.head_dim=36"], "", ""),
        (
            ["model.attention_backend=efficient", "training.mixed_precision=fp32", "model.head_dim=34"],
            "model.head_dim",
            "36",
        ),
        (["model.attention_backend=cudnn", "training.mixed_precision=bf16", "model.head_dim=64"], "", ""),
        (["model.attention_backend=flash", "training.mixed_precision=bf16", "model.head_dim=36"], "", ""),
        (
            [*SINKS, "model.attention_backend=flash", "training.mixed_precision=bf16", "model.head_dim=36"],
            "model.attention_backend",
            "auto or flex",
        ),
        ([*SINKS, "model.attention_backend=flash", "training.mixed_precision=bf16", "model.head_dim=64"], "", ""),
        (["compile=blocks", "compile.backend=cudagraphs"], "", ""),
        (["compile=all", "compile.backend=cudagraphs"], "compile.components", "compile.backend=inductor"),
        (["compile=all", "compile.components=[loss]", "parallelism.cp=2"], "", ""),
        (["compile=blocks", "compile.backend=cudagraphs", "parallelism.cp=2"], "compile.backend", "aot_eager"),
        (["compile=blocks", "compile.backend=cudagraphs", "parallelism.pp=2"], "compile.backend", "aot_eager"),
        (["parallelism.cp=2"], "", ""),
        (["compile=blocks", "compile.backend=cudagraphs", "parallelism.tp=2"], "compile.backend", "aot_eager"),
        (ASYNC_TP, "", ""),
        (["compile=none", "parallelism.tp=2", "parallelism.async_tp=true"], "parallelism.async_tp", "compile=blocks"),
        (["parallelism.tp=2", "parallelism.async_tp=true"], "", ""),
        (
            ["compile=blocks", "parallelism.tp=2", "parallelism.async_tp=true", "parallelism.sequence_parallel=false"],
            "parallelism.async_tp",
            "sequence_parallel=true",
        ),
        (
            [*ASYNC_TP, "quantization=mxfp8", "quantization.smallest_gemm=0", "training.mixed_precision=bf16"],
            "parallelism.async_tp",
            "float8_rowwise",
        ),
        ([*ASYNC_TP, "quantization=mxfp8", "quantization.smallest_gemm=0", "quantization.emulate=true"], "", ""),
        (["optimizer.implementation=triton"], "", ""),
        (["quantization=float8_rowwise", "quantization.fused_casts=true", "quantization.smallest_gemm=0"], "", ""),
        (
            ["quantization=float8_rowwise", "quantization.fused_casts=true", "quantization.emulate=true"],
            "quantization.fused_casts",
            "emulate=auto",
        ),
        (["optimizer.implementation=triton", "optimizer.state_precision=bf16", "parallelism.tp=2"], "", ""),
        (
            ["optimizer.implementation=triton", "optimizer.state_precision=int8"],
            "optimizer.implementation",
            "state_precision=bf16",
        ),
        (
            ["optimizer.implementation=triton", "parallelism.cpu_offload=true"],
            "optimizer.implementation",
            "cpu_offload=false",
        ),
        (["optimizer=muon", "parallelism.cpu_offload=true"], "optimizer.name", "cpu_offload=false"),
        (["optimizer=lion", "parallelism.cpu_offload=true"], "", ""),
        (
            ["optimizer.implementation=triton", "optimizer.name=torch.optim.SGD"],
            "optimizer.implementation",
            "name=adamw",
        ),
        (["parallelism.cp=2", "model.attention_backend=flex"], "model.attention_backend", "cp_method=ulysses"),
        (["parallelism.cp=2", "model.attention_backend=efficient"], "", ""),
        (["parallelism.cp=2", "model.head_dim=36"], "model.head_dim", "32 or 40"),
        (["parallelism.cp=2", "parallelism.cp_method=ulysses", "model.head_dim=36"], "", ""),
        (["parallelism.cp=2", "parallelism.cp_method=ulysses", "model.attention_backend=flex"], "", ""),
        # torchao's NVFP4 kernels need larger multiples than the format
        (
            [
                "quantization=nvfp4",
                "training.mixed_precision=bf16",
                "quantization.smallest_gemm=0",
                "quantization.filter=['*.attention.*', '*.down']",
            ],
            "quantization.recipe",
            "use quantization.emulate=true, for which multiples of 16",
        ),
        (["quantization=nvfp4", "quantization.emulate=true"], "", ""),
        ([*TILES], "training.mixed_precision", "quantization.emulate=true"),
        ([*TILES, "training.mixed_precision=bf16"], "", ""),
        ([*EXPERTS_IN_FLOAT8, *DIVIDED], "", ""),
        ([*EXPERTS_IN_FLOAT8, *DIVIDED, "quantization.power_of_two_scales=false"], "", ""),
        (["quantization=mxfp8", *EXPERTS_IN_FLOAT8[:2], *EXPERTS_IN_FLOAT8[3:], "parallelism.tp=2"], "", ""),
        (
            [*TILES, "training.mixed_precision=bf16", "training.seq_len=192", "training.micro_batch_size=1"],
            "training.seq_len",
            "128 or 256",
        ),
    ],
)
def test_on_a_machine_with_eight_gpus(overrides: list[str], field: str, remedy: str, monkeypatch: pytest.MonkeyPatch):
    give_gpus(monkeypatch, 8)
    monkeypatch.setattr(torch_features, "torchao_version", lambda: "0.18.0")
    if not field:
        assert broken(*overrides) == []
        return
    violation = only(*overrides)
    assert violation.field == field
    assert remedy in violation.remedy


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        ([], ""),
        (["training.mixed_precision=bf16", "compile=all", "data.document_mask=true", "evaluation.every=5"], ""),
        (["training.micro_batch_size=2", "activation_checkpoint=full", "optimizer.implementation=triton"], ""),
        (["quantization=float8_rowwise", "quantization.smallest_gemm=0", "activation_checkpoint=selective"], ""),
        (["parallelism.dp_shard=2"], "parallelism.dp_shard=1"),
        (["parallelism.dp_shard=-1"], "parallelism.dp_shard=1"),
        (["parallelism.dp_replicate=2"], "one rank: parallelism.dp_replicate=1"),
        (["parallelism.tp=2", "parallelism.dp_shard=2"], "one rank: parallelism.dp_shard=1 parallelism.tp=1"),
        (["parallelism.cp=2"], "one rank: parallelism.cp=1"),
        (["parallelism.pp=2"], "one rank: parallelism.pp=1"),
        (["parallelism.cpu_offload=true"], "parallelism.cpu_offload=false"),
        (["compile=blocks", "compile.backend=cudagraphs"], "compile.backend=inductor"),
        (["model.architecture=tests.models.own_model.Bigram"], "model.architecture=llama"),
        (["model.attention_backend=flex"], "model.attention_backend=auto, cudnn, flash"),
        (["quantization=mxfp8", "quantization.smallest_gemm=0", "quantization.emulate=true"], "float8_tensorwise"),
        (["training.mixed_precision=bf16", "training.fp32_modules=[norm]"], ""),
        (["model=qwen3_moe_debug", "training.mixed_precision=bf16"], ""),
        (["model=qwen3_moe_debug"], "training.mixed_precision=bf16"),
        (["model=qwen3_moe_debug", "training.mixed_precision=bf16", "model.dim=196"], "multiples of 8"),
        ([*EXPERTS_IN_FLOAT8], "quantization.filter=['*.experts.*']"),
        ([*EXPERTS_IN_FLOAT8, "quantization.filter=['*.experts.*']"], ""),
        (
            ["model=qwen3_moe_debug", "parallelism.dp_shard=2", "parallelism.ep=2", "training.mixed_precision=bf16"],
            "one rank: parallelism.dp_shard=1 parallelism.ep=1",
        ),
    ],
)
def test_options_of_captured_cuda_graphs(overrides: list[str], remedy: str, monkeypatch: pytest.MonkeyPatch):
    """CUDA graphs need one GPU, and passes that do the same for all tokens at the same addresses."""
    give_gpus(monkeypatch, 8)
    words = ["parallelism.dp_shard=1", *overrides]
    assert broken(*words) == []
    if not remedy:
        assert broken(*words, "compile.cuda_graphs=true") == []
        return
    violation = only(*words, "compile.cuda_graphs=true")
    assert violation.field == "compile.cuda_graphs"
    assert violation.remedy.startswith("use compile.cuda_graphs=false, or ")
    assert remedy in violation.remedy


def test_flash_attention_3_and_4_where_they_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    give_gpus(monkeypatch, 8)
    (tmp_path / "flash_attn_interface.py").touch()
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    bf16 = "training.mixed_precision=bf16"
    for name in ("fa3", "fa4"):
        backend = f"model.attention_backend={name}"
        assert broken(backend, bf16) == []
        assert "mixed_precision=bf16" in only(backend).remedy
        assert "document_mask=false" in only(backend, bf16, "data.document_mask=true").remedy
        assert "cp_method=ulysses" in only(backend, bf16, "parallelism.cp=2").remedy
        assert broken(backend, bf16, "parallelism.cp=2", "parallelism.cp_method=ulysses") == []
    assert "fa3" in only("model.attention_backend=fa4", bf16, "model.head_dim=192").remedy
    assert broken("model.attention_backend=fa3", bf16, "model.head_dim=192") == []


def test_our_kernels_take_triton(monkeypatch: pytest.MonkeyPatch):
    give_gpus(monkeypatch, 8)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("titan_exp.config.devices.torch_build", lambda: ("2.11.0", "13.0"))
    assert "pip install triton" in only("optimizer.implementation=triton").remedy
    # A torch without CUDA plans and submits runs of another machine.
    monkeypatch.setattr("titan_exp.config.devices.torch_build", lambda: ("2.11.0+cpu", None))
    assert broken("optimizer.implementation=triton") == []


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.access", lambda place, mode: False)
    typed = f"paths.runs={tmp_path}/runs"
    found = violations(experiment(typed), lambda _: False)
    assert [violation.field for violation in found] == ["paths.runs"]
    assert broken(typed) == []  # a prediction writes nothing there


def test_compiling_for_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "install g++" in only("compile=blocks").remedy
    assert broken("compile=blocks", "compile.backend=aot_eager") == []


@pytest.mark.parametrize(
    ("text", "overrides", "field", "says"),
    [
        ("0F0,0F1,,,0B0,,0B1\n,1F0,1B0,1F1,1B1", [], "", ""),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1", ["parallelism.pp_microbatches=2"], "", ""),
        (
            "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1",
            ["parallelism.pp_microbatches=4"],
            "pp_microbatches",
            "2 micro-batches in a pass",
        ),
        (
            "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1",
            ["training.micro_batch_size=16"],
            "micro_batch_size",
            "2 micro-batches in a pass",
        ),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1", ["parallelism.pp_layers=[1,2,3]"], "pp_layers", "2 stages"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1", ["parallelism.pp=3"], "pp_schedule", "2 rows"),
        ("0F0,0B0\n1F0,1I0", [], "pp_schedule", "1F0, 1I0"),
        ("0F0,0B0,1F0,1B0\n,,", [], "pp_schedule", "row 2 has no action"),
        ("0F0,zero\n1F0,1B0", [], "pp_schedule", "cell 2 of row 1 is 'zero'"),
        ("0B0,0F0\n1F0,1B0", [], "pp_schedule", "deadlocks"),
        ("0F0,0I0,0W0\n1F0,1I0,1W0", ["activation_checkpoint=selective"], "mode", "twice"),
    ],
)
def test_a_schedule_from_a_file(text: str, overrides: list[str], field: str, says: str):
    Path("own.csv").write_text(text)
    given = ("parallelism.pp=2", "parallelism.pp_schedule=own.csv", *overrides)
    if not field:
        assert broken(*given) == []
        return
    violation = only(*given)
    assert violation.field.endswith(field)
    assert says in violation.reason


@pytest.mark.parametrize("as_folder", [False, True])
@pytest.mark.parametrize("vocabulary", [{"a": 0, "b": 399}, [["a", 0.0]] * 400])
def test_the_vocabulary_of_a_tokenizer_file(tmp_path: Path, vocabulary: object, as_folder: bool):
    path = tmp_path / "own" / "tokenizer.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": [{"id": 400, "content": "</s>"}]}))
    violation = only(f"data.tokenizer={path.parent if as_folder else path}")
    assert violation.field == "model.vocab_size"
    assert "vocab_size=401" in violation.remedy
    assert broken(f"data.tokenizer={path}", "model.vocab_size=401") == []


@pytest.mark.parametrize("end", ["", "/tokenizer.json"])
def test_a_tokenizer_that_is_not_there_yet_can_be_downloaded(end: str):
    remedy = only(f"data.tokenizer=downloads/Llama-3.1-70B{end}").remedy
    assert "titan-exp download OWNER/Llama-3.1-70B files=tokenizer target=downloads/Llama-3.1-70B, or " in remedy


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model": {"vocab": 3}}'])
def test_a_file_that_is_no_tokenizer(tmp_path: Path, text: str):
    (tmp_path / "tokenizer.json").write_text(text)
    assert "tokenizers cannot read" in only("data.tokenizer=tokenizer.json").reason


def test_user_model_has_its_own_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_model.py").write_text("class Mamba: ...\n")
    shape = ("model.head_dim=33", "model.ffn_dim=7", "training.seq_len=5000", "+model.options.state=4")
    assert broken("model.architecture=own_model.Mamba", *shape) == []


def test_all_violations_are_reported():
    with pytest.raises(UserError) as caught:
        check(
            experiment(
                *BASE,
                "model.kv_heads=4",
                "parallelism.ep=2",
                "lr_schedule.decay=cosin",
                "training.global_batch_size=15",
                "parallelism.dp_shard=2",
            )
        )
    assert {violation.field for violation in caught.value.violations} == {
        "model.kv_heads",
        "parallelism.ep",
        "lr_schedule.decay",
        "training.global_batch_size",
    }
    assert caught.value.exit_code == 2
    assert "model.kv_heads=4: 6 query heads" in str(caught.value)


def test_rules_are_checked_if_the_layout_cannot_be_resolved(monkeypatch: pytest.MonkeyPatch):
    give_gpus(monkeypatch, 8)
    assert [violation.field for violation in broken("parallelism.dp_replicate=3", "model.kv_heads=4")] == [
        "parallelism.dp_shard",
        "model.kv_heads",
    ]


def test_check_returns_what_it_was_given():
    run = experiment()
    assert check(run) is run


def test_refusals_name_existing_keys_and_values():
    """Format strings of the table are filled in only where a rule is violated."""
    values = Values(resolve_layout(experiment(*BASE), 1))
    values["found"] = MagicMock()
    for refusal in [rule.check for rule in (*always_rules(), *layout_rules()) if isinstance(rule.check, Refuse)]:
        assert annotation_of(refusal.field) is not None, refusal
        assert "{" not in refusal.reason.format_map(values) + refusal.remedy.format_map(values), refusal


def test_data_below_a_closed_folder_may_exist(tmp_path: Path):
    closed, root = tmp_path / "closed", os.geteuid() == 0
    closed.mkdir(mode=0)
    data = replace(experiment().data, source="text", paths=(f"{closed}/mine/corpus.txt",))
    if root:  # who may look into any folder
        os.setresuid(65534, 65534, 0)
    try:
        (found,) = source_has_input(data)
    finally:
        if root:
            os.setresuid(0, 0, 0)
    assert "which you may not open" in found.remedy
