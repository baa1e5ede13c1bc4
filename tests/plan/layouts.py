"""Small layouts, their predictions, and measurements on real ranks."""

import gc
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.proofs import note
from tests.ranks import run_ranks
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import ResolvedLayout, resolve_layout
from titan_exp.config.schema.typed_config import load_experiment, to_experiment, to_yaml
from titan_exp.plan.trace.torch_patches import uses_inductor
from titan_exp.plan.trace.trace_step import (
    DEVICE,
    FakeRank,
    Trace,
    fake_batches,
    fake_rank,
    pipeline_ranks,
    trace_step,
)
from titan_exp.rules import check
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.trainer.part import Parts
from titan_exp.trainer.parts import acting_parts
from titan_exp.trainer.train_state import assemble

SMALL = [
    "model=llama_debug",
    "training.steps=4",
    "training.seq_len=64",
    "training.global_batch_size=8",
    "evaluation.every=0",
    "checkpoint=none",
    "cluster.device=cpu",
]

BY_HAND = Path(__file__).with_name("by_hand.csv")
"""Two stages on two ranks: all forward passes first on one, one by one on the other."""

LAYOUTS = {
    "one device": "",
    "one device, bf16": "training.mixed_precision=bf16 training.fp32_modules=[blocks.*.attention_norm]",
    "one device, bf16, accumulated": "training.mixed_precision=bf16 training.micro_batch_size=2",
    "fsdp 2, accumulated": "parallelism.dp_shard=2 training.micro_batch_size=1",
    "fsdp 4, bf16, full recompute": "parallelism.dp_shard=4 training.mixed_precision=bf16 activation_checkpoint=full",
    "fsdp 2, chunked loss": "parallelism.dp_shard=2 training.loss_chunk_tokens=37",
    "hsdp 2x2": "parallelism=hsdp activation_checkpoint=every_n activation_checkpoint.every=2",
    "ddp 2, bf16": "parallelism=ddp training.mixed_precision=bf16 optimizer.implementation=foreach",
    "tp 2": "parallelism.tp=2 parallelism.dp_shard=1",
    "tp 2, no sequence parallelism, bf16": "parallelism.tp=2 parallelism.sequence_parallel=false "
    "parallelism.loss_parallel=false training.mixed_precision=bf16",
    "fsdp 2 x tp 2, selective": "parallelism.dp_shard=2 parallelism.tp=2 activation_checkpoint=selective",
    "pp 2, 1F1B": "parallelism.pp=2 parallelism.pp_microbatches=4",
    "pp 2 x fsdp 2, ZBV": "parallelism.pp=2 parallelism.dp_shard=2 parallelism.pp_schedule=ZBVZeroBubble "
    "parallelism.pp_microbatches=4",
    "cp 2, ring": "parallelism.cp=2",
    "cp 2, all-gather, document mask": "parallelism.cp=2 parallelism.cp_method=allgather data.document_mask=true",
    "cp 2, Ulysses": "parallelism.cp=2 parallelism.cp_method=ulysses",
    "pp 2 x cp 2 x tp 2": "parallelism.pp=2 parallelism.cp=2 parallelism.tp=2 parallelism.pp_microbatches=2",
    "8-bit moments, offload": "parallelism.dp_shard=2 optimizer.state_precision=int8 parallelism.cpu_offload=true",
    # Sharding
    "fsdp 4, always resharded, two blocks ahead": "parallelism.dp_shard=4 parallelism.reshard_after_forward=always "
    "parallelism.prefetch_blocks=2",
    "fsdp 2, never resharded, uneven vocabulary": "parallelism.dp_shard=2 parallelism.reshard_after_forward=never "
    "training.micro_batch_size=2 model.vocab_size=321",
    "fsdp 2, bf16, modules in fp32": "parallelism.dp_shard=2 training.mixed_precision=bf16 "
    "training.fp32_modules=[blocks.*.attention_norm,blocks.1.feed_forward]",
    "hsdp 2x2, bf16, accumulated": "parallelism=hsdp training.mixed_precision=bf16 training.micro_batch_size=1",
    "fsdp 2, tied, z-loss": "parallelism.dp_shard=2 model.tied_embeddings=true training.z_loss=0.01",
    # Optimizers
    "bf16 moments": "optimizer.state_precision=bf16",
    "fsdp 2, fp8 moments, never clipped": "parallelism.dp_shard=2 optimizer.state_precision=fp8 "
    "training.max_grad_norm=null",
    "tp 2 x fsdp 2, Muon": "parallelism.tp=2 parallelism.dp_shard=2 optimizer=muon",
    "fsdp 2, Muon, QK-Clip": "parallelism.dp_shard=2 optimizer=muon optimizer.qk_clip=0.1 training.micro_batch_size=1",
    "cp 2, document mask, Muon, QK-Clip": "parallelism.cp=2 data.document_mask=true optimizer=muon "
    "optimizer.qk_clip=0.1",
    "tp 2 x fsdp 2, Muon by head in bf16": "parallelism.tp=2 parallelism.dp_shard=2 optimizer=muon "
    "optimizer.split_attention=head optimizer.precision=bf16",
    "Qwen3-MoE, fsdp 2 x tp 2, Muon": "model=qwen3_moe_debug parallelism.dp_shard=2 parallelism.tp=2 optimizer=muon",
    "fsdp 2, Dion": "parallelism.dp_shard=2 optimizer=dion",
    "Qwen3-MoE, fsdp 2 x tp 2, Dion": "model=qwen3_moe_debug parallelism.dp_shard=2 parallelism.tp=2 optimizer=dion",
    "tp 2 x fsdp 2, SOAP": "parallelism.tp=2 parallelism.dp_shard=2 optimizer=soap optimizer.precondition_every=1",
    "Qwen3-MoE, fsdp 2 x tp 2, SOAP": "model=qwen3_moe_debug parallelism.dp_shard=2 parallelism.tp=2 optimizer=soap "
    "optimizer.precondition_every=1",
    "tp 2 x fsdp 2, Lion": "parallelism.tp=2 parallelism.dp_shard=2 optimizer=lion",
    "tp 2 x fsdp 2, Adafactor": "parallelism.tp=2 parallelism.dp_shard=2 optimizer=adafactor",
    "Qwen3-MoE, fsdp 2 x tp 2, Adafactor": "model=qwen3_moe_debug parallelism.dp_shard=2 parallelism.tp=2 "
    "optimizer=adafactor",
    "fsdp 2, momentum of Lion in bf16": "parallelism.dp_shard=2 optimizer=lion optimizer.state_precision=bf16",
    "tp 2 x fsdp 2, SGD": "parallelism.tp=2 parallelism.dp_shard=2 optimizer=sgd",
    "pp 2 x fsdp 2, schedule-free AdamW": "parallelism.pp=2 parallelism.dp_shard=2 parallelism.pp_microbatches=4 "
    "optimizer=schedule_free_adamw",
    "fsdp 2, schedule-free AdamW": "parallelism.dp_shard=2 optimizer=schedule_free_adamw",
    "fsdp 2, another optimizer, for loop": "parallelism.dp_shard=2 optimizer.name=torch.optim.SGD "
    "optimizer.implementation=for_loop +optimizer.options.momentum=0.9",
    # Averages, clipping, accumulation
    "fsdp 2 x tp 2, average of weights": "parallelism.dp_shard=2 parallelism.tp=2 weight_average=ema",
    "fsdp 2, AdaGC": "parallelism.dp_shard=2 grad_clip=adagc",
    "pp 2, clamped": "parallelism.pp=2 parallelism.pp_microbatches=4 grad_clip=value",
    "fsdp 2, bf16 sums": "parallelism.dp_shard=2 training.mixed_precision=bf16 training.micro_batch_size=1 "
    "training.accumulation_precision=bf16",
    # Recipes
    "fsdp 2, float8 tensorwise": "parallelism.dp_shard=2 quantization=float8_tensorwise",
    "tp 2 x fsdp 2, float8 rowwise, bf16": "parallelism.tp=2 parallelism.dp_shard=2 quantization=float8_rowwise "
    "training.mixed_precision=bf16",
    "cp 2, float8 rowwise, wide weight gradients": "parallelism.cp=2 quantization=float8_rowwise_gw_hp",
    "tp 2, MXFP8": "parallelism.tp=2 quantization=mxfp8",
    # Pipelines
    "pp 2, GPipe, uneven stages": "parallelism.pp=2 parallelism.pp_schedule=GPipe parallelism.pp_layers=[3,1] "
    "parallelism.pp_microbatches=2",
    "pp 2 x fsdp 2, Interleaved1F1B": "parallelism.pp=2 parallelism.dp_shard=2 "
    "parallelism.pp_schedule=Interleaved1F1B parallelism.pp_microbatches=4",
    "pp 2, LoopedBFS in passes, resharded": "parallelism.pp=2 parallelism.dp_shard=2 "
    "parallelism.pp_schedule=LoopedBFS parallelism.pp_microbatches=2 training.micro_batch_size=1 "
    "parallelism.reshard_after_forward=always",
    "pp 2 x ddp 2, InterleavedZeroBubble": "parallelism=ddp parallelism.pp=2 "
    "parallelism.pp_schedule=InterleavedZeroBubble parallelism.pp_microbatches=4",
    "pp 2, DualPipeV, tied": "parallelism.pp=2 parallelism.pp_schedule=DualPipeV parallelism.pp_microbatches=4 "
    "model.tied_embeddings=true",
    "pp 2, schedule in a file, z-loss": f"parallelism.pp=2 parallelism.pp_schedule={BY_HAND} training.z_loss=0.01 "
    "training.micro_batch_size=4",
    "pp 4, two layers fewer at the end": "model.layers=6 parallelism.pp=4 parallelism.pp_microbatches=4 "
    "parallelism.pp_last_stage_less=1 activation_checkpoint=full",
    # Documents and context
    "document mask, positions from its start": "data.document_mask=true data.reset_positions=true",
    "attention by plain operators": "model.attention_backend=math",
    "attention by plain operators, document mask": "model.attention_backend=math data.document_mask=true",
    "fsdp 2 x cp 2, ring, document mask": "parallelism.dp_shard=2 parallelism.cp=2 data.document_mask=true",
    "cp 4, Ulysses in a ring": "parallelism.cp=4 parallelism.cp_ulysses=2",
    # Multi-token prediction
    "fsdp 2, multi-token prediction": "model=deepseek_debug model.mtp.depth=1 parallelism.dp_shard=2",
    "pp 2 x tp 2, multi-token prediction": "model=deepseek_debug model.mtp.depth=1 parallelism.pp=2 parallelism.tp=2 "
    "parallelism.pp_microbatches=4 training.loss_chunk_tokens=37",
    # Families
    "Qwen3, fsdp 2 x tp 2": "model=qwen3_debug parallelism.dp_shard=2 parallelism.tp=2",
    "OLMo 2, fsdp 2 x tp 2": "model=olmo2_debug parallelism.dp_shard=2 parallelism.tp=2",
    "Qwen3-MoE, fsdp 2 x tp 2": "model=qwen3_moe_debug parallelism.dp_shard=2 parallelism.tp=2",
    "GPT-OSS, fsdp 2 x tp 2": "model=gpt_oss_debug parallelism.dp_shard=2 parallelism.tp=2",
    "Llama 4, pp 2 x fsdp 2": "model=llama4_debug parallelism.pp=2 parallelism.dp_shard=2 "
    "parallelism.pp_microbatches=2",
    "Qwen3-Next, fsdp 2 x tp 2": "model=qwen3_next_debug parallelism.dp_shard=2 parallelism.tp=2",
    "Qwen3-Next, bf16, fsdp 2 x cp 2": "model=qwen3_next_debug parallelism.dp_shard=2 parallelism.cp=2 "
    "training.mixed_precision=bf16",
    "Kimi Linear, pp 2 x fsdp 2, full recompute": "model=kimi_linear_debug parallelism.pp=2 parallelism.dp_shard=2 "
    "parallelism.pp_microbatches=2 activation_checkpoint=full",
    # Mixtures
    "tp 2 x cp 2, chunked loss": "parallelism.tp=2 parallelism.cp=2 training.loss_chunk_tokens=37",
    "hsdp 2x2 x tp 2, bf16": "parallelism=hsdp parallelism.tp=2 training.mixed_precision=bf16",
    "pp 2 x fsdp 2 x tp 2, selective, bf16": "parallelism.pp=2 parallelism.dp_shard=2 parallelism.tp=2 "
    "parallelism.pp_microbatches=4 activation_checkpoint=selective training.mixed_precision=bf16",
    "pp 2 x fsdp 2 x cp 2 x tp 2, ZBV": "parallelism.pp=2 parallelism.dp_shard=2 parallelism.cp=2 parallelism.tp=2 "
    "parallelism.pp_schedule=ZBVZeroBubble parallelism.pp_microbatches=4",
}
"""Overrides by name."""

COMPILED = {
    "blocks and loss, fsdp 2": "compile=all parallelism.dp_shard=2",
    "full recompute": "compile=blocks activation_checkpoint=full",
    "selective": "compile=blocks activation_checkpoint=selective",
    "budget": "compile=blocks activation_checkpoint=budget",
    "every second, chunked loss": "compile=all activation_checkpoint=every_n training.loss_chunk_tokens=37",
    "fsdp 2 x tp 2": "compile=blocks parallelism.dp_shard=2 parallelism.tp=2",
    "cp 2 x tp 2": "compile=blocks parallelism.cp=2 parallelism.tp=2",
    "pp 2, ZBV": "compile=blocks parallelism.pp=2 parallelism.pp_schedule=ZBVZeroBubble parallelism.pp_microbatches=4",
    "fsdp 2, float8 tensorwise": "compile=blocks parallelism.dp_shard=2 quantization=float8_tensorwise",
    "tp 2, float8 rowwise": "compile=blocks parallelism.tp=2 quantization=float8_rowwise",
}
"""Overrides by name, of runs that inductor compiles parts of. Its code takes memory past everything that watches
operators; torch's own allocator sees it."""


@dataclass(frozen=True)
class Numbers:
    """Compared quantities of one pipeline rank, in bytes but for FLOPs."""

    parameters: int
    gradients: int
    optimizer: int
    messages: dict[tuple[str, str], int]
    flops: int
    peak: int
    passing: int
    """Peak without parameters and optimizer state."""
    between_steps: int
    """The part of it that is allocated between steps: buffers and the batch."""


def experiment_of(overrides: str) -> Experiment:
    """A resolved experiment."""
    return check(resolve_layout(to_experiment(compose([*SMALL, *overrides.split()])), 1))


def predicted(experiment: Experiment, path: Path, mutate: Callable[[], None] | None = None) -> list[Numbers]:
    """Predictions of each pipeline rank, by one process."""
    _write(experiment, path)
    (found,) = run_ranks(1, _predict_ranks, str(path), mutate, limit=300)
    note(experiment, {"predicted"})
    return [Numbers(**numbers) for numbers in found]


def measured(experiment: Experiment, path: Path, mutate: Callable[[], None] | None = None) -> list[Numbers]:
    """Measurements of each pipeline rank, on as many processes as the layout has. Each calls `mutate` first."""
    _write(experiment, path)
    results = run_ranks(ResolvedLayout.of(experiment).world_size, _on_rank, str(path), mutate)
    note(experiment, {"measured"})
    return [Numbers(**results[rank]) for rank in pipeline_ranks(ResolvedLayout.of(experiment))]


def plain_step(rank: FakeRank) -> Callable[[], None]:
    """A step of a rank, with nothing beside it."""
    return rank.step


def allocated_peaks(
    experiment: Experiment, path: Path, step_of: Callable[[FakeRank], Callable[[], None]] = plain_step
) -> list[int]:
    """Largest growth of torch's own allocator in a step, for each pipeline rank.

    By one process on real tensors, whose messages go nowhere: gloo's threads would allocate copies of their own.
    """
    _write(experiment, path)
    (found,) = run_ranks(1, _alone, str(path), step_of, limit=300)
    return found


def _write(experiment: Experiment, path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    RunFolder(path).config.write_text(to_yaml(experiment))


def _predict_ranks(path: str, mutate: Callable[[], None] | None) -> list[dict[str, Any]]:
    if mutate is not None:
        mutate()
    experiment = load_experiment(RunFolder(path).config, trust=True)
    found = []
    for rank in pipeline_ranks(ResolvedLayout.of(experiment)):
        with fake_rank(experiment, rank) as fake:
            trace = trace_step(
                fake.state,
                fake.step,
                warmup_step=fake.warmup_step,
                beside=fake.exchanges,
                preallocated=fake.preallocated,
                inductor=uses_inductor(experiment.compile),
            )
            found.append(asdict(_numbers(trace)))
    return found


def _numbers(trace: Trace) -> Numbers:
    settled = trace.persistent["parameters"] + trace.persistent["optimizer"]
    return Numbers(
        trace.persistent["parameters"],
        trace.gradients,
        trace.persistent["optimizer"],
        dict(trace.costs.messages),
        trace.costs.flops,
        trace.peak.bytes,
        trace.peak.bytes - settled,
        trace.persistent["other"],
    )


def _on_rank(path: str, mutate: Callable[[], None] | None) -> dict[str, Any]:
    """A step of the trainer, traced."""
    if mutate is not None:
        mutate()
    from titan_exp.trainer.commit import sync_step_flags
    from titan_exp.trainer.distributed import joined
    from titan_exp.trainer.train_step import train_step
    from titan_exp.trainer.trainer import Trainer

    torch.set_num_threads(1)
    folder = RunFolder(path)
    experiment = load_experiment(folder.config, trust=True)
    with joined(experiment.cluster) as device:
        trainer = Trainer(experiment, folder, device)
        trainer.restore()

        batches = [next(trainer.loader) for _ in range(trainer.layout.gradient_accumulation)]
        tokens, _, _ = sync_step_flags(trainer.model.objective, batches, trainer.mesh, stop=False, save=False)

        def step() -> None:
            train_step(trainer.state, trainer.parts, batches, step=1, tokens=tokens, lr=trainer.schedule(1))

        # Gloo's threads release sent tensors late at times, and then the peak is too high.
        traces = (
            trace_step(trainer.state, step, preallocated=[each for batch in batches for each in batch.tensors])
            for _ in range(2)
        )
        numbers = min(map(_numbers, traces), key=lambda found: found.peak)
        trainer.report.close("done")
        return asdict(numbers)


def _alone(path: str, step_of: Callable[[FakeRank], Callable[[], None]]) -> list[int]:
    torch.set_num_threads(1)
    gc.disable()  # as the trainer has it
    experiment = load_experiment(RunFolder(path).config, trust=True)
    found = []
    for rank in pipeline_ranks(ResolvedLayout.of(experiment)):
        dist.init_process_group(
            "fake", store=FakeStore(), rank=rank, world_size=ResolvedLayout.of(experiment).world_size
        )
        state = assemble(experiment, ResolvedLayout.of(experiment), DEVICE)
        state.built.init_weights()
        fake = FakeRank(experiment, state, fake_batches(experiment), parts=Parts(acting_parts(experiment, state)))
        fake.step()
        found.append(allocated_by(step_of(fake), Path(path)))
        dist.destroy_process_group()
        _clear_sharding_prop_cache()
        torch._dynamo.reset()
    return found


def allocated_by(step: Callable[[], None], path: Path) -> int:
    """The largest sum of allocations and frees of a step, as torch's profiler reports them."""
    trace = path / "trace.json"
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    profiler.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    changes = [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]
    return max(itertools.accumulate(changes))
