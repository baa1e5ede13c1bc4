"""Layouts that are extrapolated, kinds of their layers, and reasons against it."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan.layouts import experiment_of
from tests.ranks import run_ranks
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.typed_config import load_experiment, to_yaml
from titan_exp.models.spec.lookup import model_spec, parameter_roles
from titan_exp.plan.extrapolate.eligibility import repetition, with_layers

MASKED = "cluster=slurm_h100 compile=none cluster.device=cuda training.mixed_precision=bf16 "
CUDA = MASKED + "model.attention_backend=flash "
BF16 = "training.mixed_precision=bf16 "
ACCUMULATED = "training.micro_batch_size=1 training.global_batch_size=16 "

EXPERTS = "model=qwen3_moe_debug "
LATE = Path(__file__).with_name("late_weight_gradients.csv")
"""Two stages on two ranks, of which the first computes its first weight gradients behind a full backward pass."""

WHOLE = {
    "one device": "model.layers=7",
    "one device on CUDA": CUDA + "model.layers=7",
    "one device on CUDA, accumulated, full": CUDA
    + "model.layers=7 activation_checkpoint=full training.micro_batch_size=2",
    "tp without data parallelism": BF16 + "model.layers=7 parallelism.tp=2 training.micro_batch_size=2",
    "fsdp, accumulated": ACCUMULATED + "model.layers=7 parallelism.dp_shard=4",
    "hsdp, every third recomputed, bf16": ACCUMULATED
    + BF16
    + "model.layers=8 parallelism=hsdp activation_checkpoint=every_n activation_checkpoint.every=3",
    "fsdp x tp on CUDA, full": CUDA
    + ACCUMULATED
    + "model.layers=8 parallelism.dp_shard=4 parallelism.tp=4 activation_checkpoint=full",
    "tp, selective, chunked loss": "model.layers=6 parallelism.dp_shard=2 parallelism.tp=2 "
    "activation_checkpoint=selective training.loss_chunk_tokens=37",
    "cp, ring": "model.layers=6 parallelism.cp=2 training.micro_batch_size=4",
    "cp, Ulysses, always resharded": "model.layers=6 parallelism.cp=2 parallelism.cp_method=ulysses "
    "parallelism.reshard_after_forward=always",
    "a dense layer first, ep on CUDA": CUDA
    + "model=deepseek_debug model.layers=7 parallelism.dp_shard=4 parallelism.ep=2 training.micro_batch_size=1",
    "a dense layer first, ep, multi-token prediction on CUDA": CUDA
    + "model=deepseek_debug model.mtp.depth=1 model.layers=7 parallelism.dp_shard=4 parallelism.ep=2 "
    "training.micro_batch_size=1",
    "experts, symmetric memory, full on CUDA": CUDA
    + EXPERTS
    + "model.layers=7 parallelism.dp_shard=4 parallelism.tp=2 parallelism.ep=4 training.micro_batch_size=1 "
    "parallelism.token_exchange=symmetric_memory activation_checkpoint=full",
    "windows in every second layer, ep on CUDA": MASKED
    + "model=gpt_oss_debug model.layers=9 parallelism.dp_shard=4 parallelism.ep=2 training.micro_batch_size=1",
    "kinds in a period of four on CUDA": MASKED
    + "model=llama4_debug model.layers=17 parallelism.dp_shard=4 parallelism.ep=2 training.micro_batch_size=1",
    "compiled, accumulated": BF16 + "model.layers=6 parallelism.dp_shard=2 training.micro_batch_size=1 compile=blocks",
    "one data rank x tp, a single micro-batch on CUDA": CUDA
    + "model.layers=8 parallelism.dp_shard=1 parallelism.tp=2 training.micro_batch_size=8 activation_checkpoint=full",
    "compiled, async tensor parallelism, accumulated on CUDA": CUDA
    + ACCUMULATED
    + "model.layers=7 parallelism.dp_shard=4 parallelism.tp=4 parallelism.async_tp=true compile=blocks",
    "compiled, float8 tensorwise but for a layer, accumulated on CUDA": CUDA
    + ACCUMULATED
    + "model.layers=7 parallelism.dp_shard=2 compile=all quantization=float8_tensorwise "
    "quantization.smallest_gemm=0 quantization.high_precision_first=1",
    "compiled, experts x ep, selective on CUDA": CUDA
    + EXPERTS
    + "model.layers=7 parallelism.dp_shard=4 parallelism.ep=2 training.micro_batch_size=1 compile=blocks "
    "activation_checkpoint=selective",
    "MXFP8 in every second layer, three blocks ahead": BF16
    + "model.layers=14 parallelism.dp_shard=2 parallelism.reshard_after_forward=always parallelism.prefetch_blocks=3 "
    "quantization=mxfp8 quantization.filter=['blocks.*[13579].feed_forward.*']",
    "modules in fp32, SGD by its import path": BF16 + "model.layers=8 parallelism.dp_shard=2 "
    "training.fp32_modules=[blocks.*.attention_norm,blocks.1.feed_forward,norm] "
    "optimizer.name=torch.optim.SGD optimizer.implementation=for_loop +optimizer.options.momentum=0.9",
    "MXFP8 but for the last two layers, AdaGC, accumulated": ACCUMULATED
    + BF16
    + "model.layers=11 parallelism.dp_shard=2 quantization=mxfp8 quantization.high_precision_last=2 grad_clip=adagc",
    "AdaGC's averages of more layers than in a block of memory on CUDA": CUDA
    + "model.layers=30 parallelism.dp_shard=2 grad_clip=adagc",
    "the last norm of attention in fp32, clipped by value": BF16
    + "model.layers=12 parallelism.dp_shard=2 training.fp32_modules=[blocks.11.attention_norm] grad_clip=value",
    "embedding, first layers and last attention frozen, limited norm of the head, accumulated": ACCUMULATED
    + BF16
    + "model.layers=11 parallelism.dp_shard=2 "
    "+optimizer.groups.first.match=[embedding,blocks.0.*,blocks.1.*,blocks.10.attention.*] "
    "+optimizer.groups.first.frozen=true +optimizer.groups.head.match=[head] +optimizer.groups.head.max_grad_norm=0.5",
    "every second feed-forward frozen, compiled on CUDA": CUDA
    + ACCUMULATED
    + "model.layers=14 parallelism.dp_shard=2 compile=blocks "
    "+optimizer.groups.frozen.match=['blocks.*[13579].feed_forward.*'] +optimizer.groups.frozen.frozen=true",
    "offloaded alone, moments in 8 bits on CUDA": CUDA
    + "model.layers=7 parallelism.dp_shard=1 parallelism.cpu_offload=true optimizer.state_precision=int8",
    "offloaded, accumulated, every third recomputed on CUDA": CUDA
    + ACCUMULATED
    + "model.layers=8 parallelism.dp_shard=2 parallelism.cpu_offload=true activation_checkpoint=every_n "
    "activation_checkpoint.every=3",
    "offloaded, compiled, experts x ep, average of weights on CUDA": CUDA
    + EXPERTS
    + "model.layers=7 parallelism.dp_shard=4 parallelism.ep=2 parallelism.cpu_offload=true compile=blocks "
    "weight_average=ema",
    "experts": EXPERTS + "model.layers=7 parallelism.dp_shard=2 training.micro_batch_size=1",
    "experts x ep on CUDA, full": CUDA
    + EXPERTS
    + "model.layers=7 parallelism.dp_shard=4 parallelism.ep=2 training.micro_batch_size=1 activation_checkpoint=full",
    "experts, ep x etp x tp on CUDA": CUDA
    + EXPERTS
    + "model.layers=6 parallelism.dp_shard=4 parallelism.tp=2 parallelism.ep=2 parallelism.etp=2",
}
"""Overrides without a pipeline, by name."""

PIPELINES = {
    "1F1B": "model.layers=9 parallelism.pp=2 parallelism.pp_microbatches=4",
    "1F1B of single ranks": BF16
    + "model.layers=9 parallelism.pp=2 parallelism.dp_shard=1 parallelism.pp_microbatches=4",
    "1F1B x fsdp x tp, first layer and every down projection in groups on CUDA": CUDA
    + "model.layers=14 parallelism.pp=2 parallelism.dp_shard=2 parallelism.tp=2 parallelism.pp_microbatches=4 "
    "+optimizer.groups.first.match=[blocks.0.attention.*] +optimizer.groups.first.lr_scale=0.1 "
    "+optimizer.groups.down.match=[*.down.weight] +optimizer.groups.down.betas=[0.8,0.9]",
    "1F1B x fsdp, full, bf16": BF16
    + "model.layers=14 training.global_batch_size=16 parallelism.pp=4 parallelism.dp_shard=2 "
    "parallelism.pp_microbatches=8 activation_checkpoint=full",
    "interleaved, every third recomputed": BF16
    + "model.layers=13 parallelism.pp=2 parallelism.dp_shard=2 parallelism.pp_schedule=Interleaved1F1B "
    "parallelism.pp_microbatches=4 activation_checkpoint=every_n activation_checkpoint.every=3",
    "GPipe x tp on CUDA, selective": CUDA
    + "model.layers=8 parallelism.pp=2 parallelism.dp_shard=2 parallelism.tp=2 parallelism.pp_schedule=GPipe "
    "parallelism.pp_microbatches=4 activation_checkpoint=selective",
    "LoopedBFS x hsdp": BF16
    + "model.layers=9 training.global_batch_size=16 parallelism.pp=2 parallelism.dp_shard=2 parallelism.dp_replicate=2 "
    "parallelism.pp_schedule=LoopedBFS parallelism.pp_microbatches=4",
    "compiled, float8 rowwise, full, 1F1B x fsdp x tp on CUDA": CUDA
    + "model.layers=9 parallelism.pp=2 parallelism.dp_shard=2 parallelism.tp=2 parallelism.pp_microbatches=2 "
    "activation_checkpoint=full compile=blocks quantization=float8_rowwise quantization.smallest_gemm=0",
    "compiled, float8 rowwise, async tensor parallelism, selective, 1F1B x fsdp x tp on CUDA": CUDA
    + "model.layers=9 parallelism.pp=2 parallelism.dp_shard=2 parallelism.tp=2 parallelism.pp_microbatches=2 "
    "parallelism.async_tp=true activation_checkpoint=selective compile=blocks quantization=float8_rowwise "
    "quantization.smallest_gemm=0",
    "two layers in high precision, modules in fp32, interleaved x fsdp, two blocks ahead": BF16
    + "model.layers=18 parallelism.pp=2 parallelism.dp_shard=2 parallelism.pp_schedule=Interleaved1F1B "
    "parallelism.pp_microbatches=2 parallelism.prefetch_blocks=2 quantization=float8_rowwise_gw_hp "
    "quantization.high_precision_first=1 training.fp32_modules=[blocks.1.attention_norm]",
    "offloaded, 1F1B x fsdp x tp, AdaGC on CUDA": CUDA
    + "model.layers=9 parallelism.pp=2 parallelism.dp_shard=2 parallelism.tp=2 parallelism.pp_microbatches=4 "
    "parallelism.cpu_offload=true grad_clip=adagc",
    "compiled windows in every second layer, 1F1B on CUDA": MASKED
    + "model=gpt_oss_debug model.layers=12 parallelism.pp=2 parallelism.dp_shard=2 parallelism.pp_microbatches=2 "
    "compile=blocks",
    "stages of one layer": BF16
    + "model.layers=5 parallelism.pp=4 parallelism.dp_shard=2 parallelism.pp_microbatches=4 activation_checkpoint=full",
    "two dense layers first, 1F1B x ep on CUDA": CUDA
    + "model=deepseek_debug model.dense_layers=2 model.layers=13 parallelism.pp=2 parallelism.dp_shard=4 "
    "parallelism.ep=2 parallelism.pp_microbatches=2",
    "one layer like the rest in the first stage, 1F1B x ep on CUDA": CUDA
    + "model=deepseek_debug model.dense_layers=2 model.layers=13 parallelism.pp=2 parallelism.dp_shard=4 "
    "parallelism.ep=2 parallelism.pp_layers=[3,10] parallelism.pp_microbatches=2",
    "windows in every second layer, 1F1B x ep on CUDA": MASKED
    + "model=gpt_oss_debug model.layers=12 parallelism.pp=2 parallelism.dp_shard=4 parallelism.ep=2 "
    "parallelism.pp_microbatches=2",
    "kinds in a period of four, 1F1B on CUDA": MASKED
    + "model=llama4_debug model.layers=24 parallelism.pp=2 parallelism.dp_shard=2 parallelism.pp_microbatches=2 "
    "activation_checkpoint=full",
    "dense layers and layers with experts in turn, 1F1B x ep on CUDA": MASKED
    + "model=llama4_debug model.layers=24 parallelism.pp=2 parallelism.dp_shard=4 parallelism.ep=2 "
    "parallelism.pp_microbatches=2",
    "multi-token prediction, 1F1B x ep on CUDA": CUDA
    + "model=deepseek_debug model.mtp.depth=1 model.layers=9 parallelism.pp=2 parallelism.dp_shard=4 parallelism.ep=2 "
    "parallelism.pp_last_stage_less=1 parallelism.pp_microbatches=2",
    "tied, document mask, in passes": BF16
    + "model.layers=8 model.tied_embeddings=true parallelism.pp=2 data.document_mask=true "
    "parallelism.pp_microbatches=2 training.micro_batch_size=1",
    "experts, 1F1B x ep on CUDA": CUDA
    + EXPERTS
    + "model.layers=9 parallelism.pp=2 parallelism.dp_shard=4 parallelism.ep=2 parallelism.pp_microbatches=2",
    "1F1B x ep, AdaGC, MXFP8 but for the first and last three layers on CUDA": CUDA
    + EXPERTS
    + "model.layers=14 training.global_batch_size=16 parallelism.pp=2 parallelism.dp_shard=4 parallelism.ep=2 "
    "parallelism.pp_microbatches=4 quantization=mxfp8 quantization.smallest_gemm=0 "
    "quantization.high_precision_first=1 quantization.high_precision_last=3 grad_clip=adagc",
}
"""Overrides with a pipeline, by name."""

SPLIT = {
    "ZBV x fsdp x tp on CUDA": CUDA
    + "model.layers=13 parallelism.pp=2 parallelism.dp_shard=2 parallelism.tp=2 parallelism.pp_schedule=ZBVZeroBubble "
    "parallelism.pp_microbatches=4",
    "ZBV x tp": "model.layers=13 parallelism.pp=2 parallelism.tp=2 parallelism.pp_schedule=ZBVZeroBubble "
    "parallelism.pp_microbatches=4",
    "ZBV of single ranks, every third recomputed": BF16
    + "model.layers=13 parallelism.pp=2 parallelism.dp_shard=1 parallelism.pp_schedule=ZBVZeroBubble "
    "parallelism.pp_microbatches=4 activation_checkpoint=every_n activation_checkpoint.every=3",
    "ZBV, experts x ep, full on CUDA": CUDA
    + EXPERTS
    + "model.layers=12 training.global_batch_size=16 parallelism.pp=2 parallelism.dp_shard=4 parallelism.ep=2 "
    "parallelism.pp_schedule=ZBVZeroBubble parallelism.pp_microbatches=4 activation_checkpoint=full",
    "ZBV, compiled, experts x ep on CUDA": CUDA
    + EXPERTS
    + "model.layers=12 training.global_batch_size=16 parallelism.pp=2 parallelism.dp_shard=4 parallelism.ep=2 "
    "parallelism.pp_schedule=ZBVZeroBubble parallelism.pp_microbatches=4 compile=blocks",
    "InterleavedZeroBubble, compiled, float8 rowwise, selective on CUDA": CUDA
    + "model.layers=12 parallelism.pp=2 parallelism.dp_shard=2 parallelism.pp_schedule=InterleavedZeroBubble "
    "parallelism.pp_microbatches=4 compile=blocks activation_checkpoint=selective quantization=float8_rowwise "
    "quantization.smallest_gemm=0",
    "InterleavedZeroBubble on four ranks, in passes": BF16
    + "model.layers=16 training.global_batch_size=16 training.micro_batch_size=1 parallelism.pp=4 "
    "parallelism.dp_shard=2 parallelism.pp_schedule=InterleavedZeroBubble parallelism.pp_microbatches=4",
    "InterleavedZeroBubble, a dense layer first, ep on CUDA": CUDA
    + "model=deepseek_debug model.layers=13 training.global_batch_size=16 parallelism.pp=2 parallelism.dp_shard=4 "
    "parallelism.ep=2 parallelism.pp_schedule=InterleavedZeroBubble parallelism.pp_microbatches=4",
    "DualPipeV": BF16 + "model.layers=9 training.global_batch_size=12 parallelism.pp=2 parallelism.dp_shard=2 "
    "parallelism.pp_schedule=DualPipeV parallelism.pp_microbatches=6",
    "DualPipeV, experts x ep on CUDA": CUDA
    + EXPERTS
    + "model.layers=18 training.global_batch_size=24 parallelism.pp=2 parallelism.dp_shard=4 parallelism.ep=2 "
    "parallelism.pp_schedule=DualPipeV parallelism.pp_microbatches=6",
    "DualPipeV, compiled x hsdp, full on CUDA": CUDA
    + "model.layers=12 training.global_batch_size=24 parallelism.pp=2 parallelism.dp_shard=2 "
    "parallelism.dp_replicate=2 parallelism.pp_schedule=DualPipeV parallelism.pp_microbatches=6 compile=blocks "
    "activation_checkpoint=full",
}
"""Overrides with a pipeline that splits backward passes, by name."""

RESHARDED = {
    "1F1B, always resharded, full on CUDA": CUDA
    + "model.layers=24 training.global_batch_size=16 parallelism.pp=4 parallelism.dp_shard=2 "
    "parallelism.pp_microbatches=8 parallelism.reshard_after_forward=always activation_checkpoint=full",
    "1F1B in passes, resharded but for last blocks": BF16
    + "model.layers=12 training.global_batch_size=16 training.micro_batch_size=1 parallelism.pp=2 "
    "parallelism.dp_shard=2 parallelism.pp_microbatches=4 parallelism.reshard_after_forward=all_but_last",
    "1F1B, compiled, experts x ep, always resharded on CUDA": CUDA
    + EXPERTS
    + "model.layers=14 training.global_batch_size=16 parallelism.pp=2 parallelism.dp_shard=4 parallelism.ep=2 "
    "parallelism.pp_microbatches=4 parallelism.reshard_after_forward=always compile=blocks",
    "1F1B, two blocks ahead, resharded but for last blocks on CUDA": CUDA
    + "model.layers=18 parallelism.pp=2 parallelism.dp_shard=2 parallelism.pp_microbatches=4 "
    "parallelism.prefetch_blocks=2 parallelism.reshard_after_forward=all_but_last",
    "interleaved, always resharded on CUDA": CUDA
    + "model.layers=22 training.global_batch_size=16 parallelism.pp=2 parallelism.dp_shard=2 "
    "parallelism.pp_schedule=Interleaved1F1B parallelism.pp_microbatches=8 parallelism.reshard_after_forward=always",
    "interleaved, resharded but for last blocks": BF16
    + "model.layers=22 parallelism.pp=2 parallelism.dp_shard=2 parallelism.pp_schedule=Interleaved1F1B "
    "parallelism.pp_microbatches=4 parallelism.reshard_after_forward=all_but_last",
    "offloaded, 1F1B, always resharded on CUDA": CUDA
    + "model.layers=14 parallelism.pp=2 parallelism.dp_shard=2 parallelism.pp_microbatches=4 "
    "parallelism.reshard_after_forward=always parallelism.cpu_offload=true",
    "GPipe, experts x ep, resharded but for last blocks on CUDA": CUDA
    + EXPERTS
    + "model.layers=16 training.global_batch_size=16 parallelism.pp=2 parallelism.dp_shard=4 parallelism.ep=2 "
    "parallelism.pp_schedule=GPipe parallelism.pp_microbatches=4 parallelism.reshard_after_forward=all_but_last",
    "LoopedBFS, always resharded": BF16
    + "model.layers=24 training.global_batch_size=16 parallelism.pp=2 parallelism.dp_shard=2 "
    "parallelism.pp_schedule=LoopedBFS parallelism.pp_microbatches=4 parallelism.reshard_after_forward=always",
    "GPipe x hsdp, always resharded": BF16
    + "model.layers=14 training.global_batch_size=16 parallelism.pp=2 parallelism.dp_shard=2 "
    "parallelism.dp_replicate=2 parallelism.pp_schedule=GPipe parallelism.pp_microbatches=4 "
    "parallelism.reshard_after_forward=always",
}
"""Overrides with a pipeline that gathers parameters again for each micro-batch, by name."""
PIPELINES |= SPLIT | RESHARDED


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            f"parallelism.pp=2 parallelism.pp_schedule={LATE}",
            "a full backward pass lies between a stage's first input gradients and its first weight gradients",
        ),
        ("model.layers=16 training.fp32_modules=[blocks.7] training.mixed_precision=bf16", "training.fp32_modules"),
        (
            "model.layers=12 quantization=float8_rowwise quantization.high_precision_last=5",
            "too many layers differ",
        ),
        ("model.layers=5 parallelism.prefetch_blocks=2", "too few layers are alike"),
        (
            "model.layers=16 +optimizer.groups.seventh.match=[blocks.6.*] +optimizer.groups.seventh.frozen=true",
            "optimizer.groups (at most the first 4 and the last 4 may",
        ),
        ("parallelism.pp=2 parallelism.pp_layers=[4,0] parallelism.pp_microbatches=2", "after the first"),
    ],
)
def test_unsupported_runs_have_a_reason(overrides: str, reason: str):
    from titan_exp.plan.extrapolate.eligibility import unsupported_reason

    assert reason in (unsupported_reason(experiment_of(overrides)) or "")
    assert unsupported_reason(experiment_of("")) is None


def test_layers_are_alike_if_their_recipe_and_fp32_modules_are():
    experiment = experiment_of(
        "model.layers=9 quantization=mxfp8 quantization.filter=[blocks.0.*,*.down,'blocks.*[2468].attention.out'] "
        "training.mixed_precision=bf16 training.fp32_modules=[blocks.1.feed_forward_norm,blocks.*.attention_norm,norm]"
    )
    assert repetition(experiment) == (2, 2, 0)
    small = with_layers(experiment, 6)
    assert repetition(small) == (2, 2, 0)
    for number in range(6):
        for name in ("attention.qkv", "attention.out", "feed_forward.gate_up", "feed_forward.down"):
            path = f"blocks.{number}.{name}"
            quantized = experiment.quantization.quantizes(path, 64, 64, layers=9)
            assert small.quantization.quantizes(path, 64, 64, layers=6) is quantized
    each = (f"blocks.{number}.attention_norm" for number in range(6))
    assert sorted(small.training.fp32_modules) == sorted(["norm", "blocks.1.feed_forward_norm", *each])


def test_layers_are_alike_if_their_parameter_groups_are():
    experiment = experiment_of(
        "model.layers=9 +optimizer.groups.low.match=[embedding,blocks.0.*,*.down.weight] "
        "+optimizer.groups.low.lr_scale=0.1 +optimizer.groups.frozen.match=['blocks.*[2468].attention.*'] "
        "+optimizer.groups.frozen.frozen=true"
    )
    assert repetition(experiment) == (1, 2, 0)
    small = with_layers(experiment, 5)
    assert repetition(small) == (1, 2, 0)
    spec = model_spec(small.model)
    assert spec is not None
    for parameter, role in parameter_roles(spec).items():
        whole, few = (
            [name for name, group in run.optimizer.groups.items() if group.has(parameter, role)]
            for run in (experiment, small)
        )
        assert few == whole, parameter


def test_last_layers_may_differ():
    run = "training.mixed_precision=bf16 quantization=mxfp8 quantization.high_precision_first=1 "
    experiment = experiment_of(run + "model.layers=12 quantization.high_precision_last=2")
    assert repetition(experiment) == (1, 1, 2)
    small = with_layers(experiment, 6)
    quantized = [
        small.quantization.quantizes(f"blocks.{number}.attention.qkv", 64, 64, layers=6) for number in range(6)
    ]
    assert quantized == [False, True, True, True, False, False]


def test_axes_equal_those_of_the_mesh(tmp_path: Path):
    experiment = experiment_of(
        "parallelism.dp_replicate=2 parallelism.dp_shard=2 parallelism.tp=2 parallelism.cp=4 parallelism.pp=2 "
        "parallelism.cp_ulysses=2 parallelism.pp_microbatches=2 model.kv_heads=4"
    )
    (tmp_path / "config.yaml").write_text(to_yaml(experiment))
    ((of_mesh, counted),) = run_ranks(1, axes_both_ways, str(tmp_path / "config.yaml"))
    assert counted == of_mesh
    assert len(of_mesh) > 5


def axes_both_ways(path: str) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    from titan_exp.plan.roofline import axis_ranks
    from titan_exp.plan.trace.dispatch_mode import OpCosts, ranks_by_axis
    from titan_exp.plan.trace.trace_step import fake_rank, pipeline_ranks

    experiment = load_experiment(path, trust=True)
    small: Experiment = replace(experiment, model=replace(experiment.model, layers=2))
    with fake_rank(small, pipeline_ranks(ResolvedLayout.of(small))[1]) as fake:
        axes = ranks_by_axis(fake.state.mesh)
    costs = OpCosts()
    for axis in axes:
        costs.messages[axis, "send"] = 1
    return axes, axis_ranks(small.parallelism, 1, costs)
