"""Memory benchmarks: a rank's planned and measured peaks, on a GPU or a stub of one; the memory gate of CPU runs."""

import atexit
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bench import (
    GIB,
    CannotRun,
    Output,
    ProcessFailed,
    benchmark,
    call_words,
    environment,
    option,
    resolved,
    result_of,
)
from benchmarks.bench import titan_exp as command

if TYPE_CHECKING:
    from torch import Tensor

STEPS = 3
"""Measured steps; optimizer state exists from the second on."""
CAPACITY = 150_000_000_000
"""Bytes of the stub device, an H200."""
SECONDS = 900
"""Limit of a plan or of a rank's steps."""
ALWAYS = (
    *("cluster=slurm_h100", "compile=none", "training.mixed_precision=bf16"),
    *("data.virtual_shards=128", "checkpoint=none", "evaluation.every=0"),
)
COMMON = (*ALWAYS, "model=llama3_8b", "training.seq_len=8192")
# A CPU has no Triton.
TINY = (*ALWAYS, "model=llama_debug", "training.seq_len=64", "optimizer.implementation=fused")
FSDP8 = "parallelism.dp_shard=8 training.global_batch_size"
CASES = {
    "fsdp 8, full recompute, 2 sequences": f"{FSDP8}=16 activation_checkpoint=full",
    "fsdp 8, selective, 2 sequences": f"{FSDP8}=16 activation_checkpoint=selective",
    "fsdp 8, compiled, 1 sequence": f"{FSDP8}=8 compile=blocks",
    "fsdp 8, compiled, float8 tensorwise": f"{FSDP8}=8 compile=blocks quantization=float8_tensorwise",
    "fsdp 128, selective": "parallelism.dp_shard=128 training.global_batch_size=256 activation_checkpoint=selective",
    "tp 4 x fsdp 4": "parallelism.tp=4 parallelism.dp_shard=4 training.global_batch_size=8",
    "pp 4, first of 4 ranks, 1F1B": "parallelism.pp=4 parallelism.dp_shard=2 training.global_batch_size=16 "
    "training.micro_batch_size=1 parallelism.reshard_after_forward=never",
    "cp 4 x fsdp 2, ring, 32k tokens": "parallelism.cp=4 parallelism.dp_shard=2 training.global_batch_size=2 "
    "training.seq_len=32768 model.context=32768",
}
"""Overrides by name, the most common layouts first."""


FLASH = "model.attention_backend=flash"
EIGHT = f"{FLASH} model.layers=2 parallelism.dp_shard=8 training.global_batch_size=8"
ONE = f"{FLASH} model.layers=2 parallelism.dp_shard=1 training.global_batch_size=2 training.micro_batch_size=1"
STAGES = (
    f"{FLASH} model.layers=4 parallelism.pp=2 parallelism.dp_shard=2 training.global_batch_size=16 "
    "training.micro_batch_size=1"
)
PARTS = f"{FLASH} model.layers=2 parallelism.dp_shard=2 parallelism.cp=4 training.global_batch_size=2"
TENSOR = f"{FLASH} model.layers=2 parallelism.dp_shard=4 parallelism.tp=4 training.global_batch_size=8"
EXPERTS = "parallelism.dp_shard=8 parallelism.ep=8 training.global_batch_size=8 training.seq_len=4096"
QWEN3 = f"model=qwen3_30b_a3b {FLASH} model.layers=2 {EXPERTS}"
GPT_OSS = (
    "model=gpt_oss_20b model.layers=2 parallelism.dp_shard=4 parallelism.ep=4 training.global_batch_size=4 "
    "training.seq_len=16384 model.context=16384"
)
MICRO4 = "training.global_batch_size=32 training.micro_batch_size=1"
DEEPSEEK = f"model=deepseek_v3_671b model.layers=4 {EXPERTS}"
DEEPSEEK_STAGES = f"{DEEPSEEK} parallelism.pp=2 {MICRO4}"
LLAMA4 = f"model=llama4_scout model.layers=4 {EXPERTS}"
NEXT = f"model=qwen3_next_80b_a3b {FLASH} model.layers=4 {EXPERTS}"
KIMI = f"model=kimi_linear_48b_a3b model.layers=4 {EXPERTS}"
OLMO = f"model=olmo_hybrid_7b {FLASH} model.layers=4 parallelism.dp_shard=8 training.global_batch_size=8"
QWEN3_5 = f"model=qwen3_5_9b {FLASH} model.layers=4 training.global_batch_size=8"
FLOAT8 = "quantization=float8_"
LAYOUTS = {
    "fsdp 8, 2 sequences, selective": f"{EIGHT} training.global_batch_size=16 activation_checkpoint=selective",
    "fsdp 8, 4 micro-batches": f"{EIGHT} training.global_batch_size=32 training.micro_batch_size=1",
    "fsdp 8, whole logits, segments": f"{EIGHT} training.loss_chunk_tokens=null cluster.expandable_segments=false",
    "fsdp 8, compiled": f"{EIGHT} compile=blocks",
    "fsdp 8, compiled, full recomputation": f"{EIGHT} compile=blocks activation_checkpoint=full",
    "fsdp 8, compiled, float8 tensorwise": f"{EIGHT} compile=blocks {FLOAT8}tensorwise",
    "fsdp 8, compiled, float8 rowwise": f"{EIGHT} compile=blocks {FLOAT8}rowwise",
    "fsdp 8, float8 tensorwise, full recomputation": f"{EIGHT} {FLOAT8}tensorwise activation_checkpoint=full",
    "hsdp 2 x 4": f"{EIGHT} parallelism.dp_shard=4 parallelism.dp_replicate=2",
    "ddp 8": f"{EIGHT} parallelism=ddp parallelism.dp_replicate=8 parallelism.dp_shard=1",
    "fsdp 8, parameters offloaded": f"{EIGHT} parallelism.cpu_offload=true",
    "fsdp 8, Muon": f"{EIGHT} optimizer=muon",
    "fsdp 8, Lion": f"{EIGHT} optimizer=lion",
    "fsdp 8, Adafactor": f"{EIGHT} optimizer=adafactor",
    "fsdp 8, schedule-free AdamW": f"{EIGHT} optimizer=schedule_free_adamw",
    "one rank": ONE,
    "one rank, compiled, CUDA graphs": f"{ONE} compile=blocks compile.autotune_gemms=never compile.cuda_graphs=true",
    "tp 4 x fsdp 4": TENSOR,
    "tp 4 x fsdp 4, compiled": f"{TENSOR} compile=blocks",
    "tp 4 x fsdp 4, float8 rowwise": f"{TENSOR} {FLOAT8}rowwise",
    "cp 4 x fsdp 2, ring": f"{PARTS} parallelism.cp_method=ring",
    "cp 4 x fsdp 2, allgather": f"{PARTS} parallelism.cp_method=allgather",
    "cp 4 x fsdp 2, ulysses": f"{PARTS} parallelism.cp_method=ulysses",
    "pp 2 x fsdp 2, 1F1B, first": STAGES,
    "pp 2 x fsdp 2, 1F1B, last": f"rank=1 {STAGES}",
    "pp 2 x fsdp 2, ZBVZeroBubble, last": f"rank=1 {STAGES} parallelism.pp_schedule=ZBVZeroBubble",
    "pp 2 x fsdp 2, DualPipeV, first": f"{STAGES} parallelism.pp_schedule=DualPipeV",
    "pp 2 x fsdp 2, InterleavedZeroBubble, first": f"{STAGES} parallelism.pp_schedule=InterleavedZeroBubble",
    "Qwen3 30B-A3B, fsdp 8": f"{EIGHT} model=qwen3_30b_a3b training.seq_len=4096",
    "GPT-OSS 20B, fsdp 8": f"{EIGHT} model=gpt_oss_20b model.attention_backend=auto training.seq_len=4096",
    "Qwen3 30B-A3B, fsdp 8 x ep 8": QWEN3,
    "Qwen3 30B-A3B, fsdp 8 x ep 8, 4 micro-batches": f"{QWEN3} {MICRO4}",
    "Qwen3 30B-A3B, fsdp 8 x ep 8, full recomputation": f"{QWEN3} activation_checkpoint=full",
    "Qwen3 30B-A3B, fsdp 8 x ep 8, selective": f"{QWEN3} activation_checkpoint=selective",
    "Qwen3 30B-A3B, fsdp 8 x ep 8, compiled": f"{QWEN3} compile=blocks",
    "Qwen3 30B-A3B, fsdp 8 x ep 8, compiled, full recomputation": f"{QWEN3} compile=blocks activation_checkpoint=full",
    "Qwen3 30B-A3B, fsdp 8 x ep 8, compiled, budget": f"{QWEN3} compile=blocks activation_checkpoint=budget",
    "Qwen3 30B-A3B, fsdp 4 x tp 2, ep 8": f"{QWEN3} parallelism.dp_shard=4 parallelism.tp=2",
    "Qwen3 30B-A3B, fsdp 2 x tp 4, ep 8": f"{QWEN3} parallelism.dp_shard=2 parallelism.tp=4",
    "Qwen3 30B-A3B, fsdp 4 x tp 2, ep 8, compiled": f"{QWEN3} parallelism.dp_shard=4 parallelism.tp=2 compile=blocks",
    "GPT-OSS 20B, fsdp 4 x ep 4": GPT_OSS,
    "GPT-OSS 20B, fsdp 4 x ep 4, full recomputation": f"{GPT_OSS} activation_checkpoint=full",
    "GPT-OSS 20B, fsdp 4 x ep 4, selective": f"{GPT_OSS} activation_checkpoint=selective",
    "GPT-OSS 20B, fsdp 4 x ep 4, compiled, selective": f"{GPT_OSS} compile=blocks activation_checkpoint=selective",
    "DeepSeek V3, fsdp 8 x ep 8": DEEPSEEK,
    "DeepSeek V3, fsdp 8 x ep 8, full recomputation": f"{DEEPSEEK} activation_checkpoint=full",
    "DeepSeek V3, fsdp 8 x ep 8, selective": f"{DEEPSEEK} activation_checkpoint=selective",
    "DeepSeek V3, fsdp 8 x ep 8, multi-token prediction": f"{DEEPSEEK} model.mtp.depth=1",
    "DeepSeek V3, fsdp 8 x ep 8, float8 rowwise": f"{DEEPSEEK} {FLOAT8}rowwise",
    "DeepSeek V3, fsdp 8 x ep 8, compiled": f"{DEEPSEEK} compile=blocks",
    "DeepSeek V3, fsdp 8 x ep 8, compiled, float8 rowwise": f"{DEEPSEEK} compile=blocks {FLOAT8}rowwise",
    "DeepSeek V3, pp 2 x fsdp 8 x ep 8, 1F1B, first": DEEPSEEK_STAGES,
    "DeepSeek V3, pp 2 x fsdp 8 x ep 8, 1F1B, last": f"rank=1 {DEEPSEEK_STAGES}",
    "DeepSeek V3, pp 2 x fsdp 8 x ep 8, DualPipeV, first": f"{DEEPSEEK_STAGES} parallelism.pp_schedule=DualPipeV",
    "Llama 4 Scout, fsdp 8 x ep 8": f"{LLAMA4} training.seq_len=8192",
    "Llama 4 Scout, fsdp 8 x ep 8, selective, 16k tokens": f"{LLAMA4} activation_checkpoint=selective "
    "training.seq_len=16384 model.context=16384",
    "Qwen3-Next 80B-A3B, fsdp 8 x ep 8": NEXT,
    "Qwen3-Next 80B-A3B, fsdp 8 x ep 8, selective": f"{NEXT} activation_checkpoint=selective",
    "Qwen3-Next 80B-A3B, fsdp 8 x ep 8, compiled": f"{NEXT} compile=blocks",
    "Qwen3.5 9B, fsdp 8, full recomputation": f"{QWEN3_5} parallelism.dp_shard=8 activation_checkpoint=full",
    "Qwen3.5 9B, tp 4 x fsdp 4": f"{QWEN3_5} parallelism.tp=4 parallelism.dp_shard=4",
    "Qwen3.5 9B, cp 4 x fsdp 2, ring": f"{QWEN3_5} parallelism.cp=4 parallelism.dp_shard=2 parallelism.cp_method=ring",
    "OLMo Hybrid 7B, fsdp 8": OLMO,
    "OLMo Hybrid 7B, fsdp 8, compiled": f"{OLMO} compile=blocks",
    "OLMo Hybrid 7B, pp 2 x fsdp 8, 1F1B, last": f"rank=1 {OLMO} parallelism.pp=2 {MICRO4}",
    "Kimi Linear 48B-A3B, fsdp 8 x ep 8": KIMI,
    "Kimi Linear 48B-A3B, fsdp 8 x ep 8, selective": f"{KIMI} activation_checkpoint=selective",
    **{f"{name}, 32 layers": f"{FLASH} {overrides}" for name, overrides in CASES.items()},
}
"""Overrides of Llama 3 8B by name; `rank` is a pipeline rank. Those with all layers are of `make gpu`."""


@dataclass(frozen=True)
class Peaks:
    """Peaks of allocated and reserved bytes; None where they cannot be read."""

    allocated: int | None
    reserved: int | None


def experiment_of(name: str, *, tiny: bool) -> Any:
    """Resolved and checked experiment of a case, or of overrides, for GPUs that need not be here."""
    long = ("training.seq_len", "model.context")
    overrides = [word for word in CASES.get(name, name).split() if not (tiny and word.startswith(long))]
    return resolved(*(TINY if tiny else COMMON), *overrides, ranks=None)


def planned(name: str, tiny: bool = False, rank: int = 0) -> dict[str, int | None]:
    """Peaks of a pipeline rank as the planner predicts them."""
    from benchmarks.versus.comparison import present_device
    from titan_exp.plan.predict import predict

    (plan,) = predict(experiment_of(name, tiny=tiny), present_device(), [rank]).ranks
    assert plan.allocator is not None, "it is planned for CUDA"
    return {"allocated": plan.allocator.allocated, "reserved": plan.allocator.reserved}


def measured(name: str, tiny: bool = False, rank: int = 0) -> dict[str, int | None]:
    """Peaks of real steps of a pipeline rank's first data rank, as torch's allocator reports them; without a GPU the
    steps run on the CPU, and have none."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from titan_exp.config.devices import allocator_environment
    from titan_exp.config.layout.resolved_layout import ResolvedLayout

    experiment = experiment_of(name, tiny=tiny)
    # Torch reads its allocator's settings once, at the latest when the trainer is imported.
    os.environ.update(allocator_environment(experiment.cluster, experiment.compile, os.environ))
    from titan_exp.plan.trace.trace_step import FakeRank, fake_batches
    from titan_exp.trainer.train_state import assemble

    layout, cuda = ResolvedLayout.of(experiment), torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    number = rank * layout.world_size // layout.parallelism.pp
    dist.init_process_group("fake", store=FakeStore(), rank=number, world_size=layout.world_size)
    balance_experts()
    # Parameters get memory and no values.
    state = assemble(experiment, layout, device, fake_mode=nullcontext())
    # Torch copies batches to a real device.
    fake = FakeRank(experiment, state, fake_batches(experiment, copied=False))
    for _ in range(STEPS):
        fake.step()
    # Without the interpreter's end, at which a thread of torch's sometimes aborts on the stub device.
    atexit.register(os._exit, 0)
    if not cuda:
        return {"allocated": None, "reserved": None}
    torch.cuda.synchronize()
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def balance_experts() -> None:
    """Exchange as many rows with each rank of a group from now on, whatever the counts on the device are.

    A fake process group receives nothing, and the stub device computes no counts. Plans assume that a rank receives as
    many rows as it sends (`titan_exp.plan.trace.op_costs`); so does this exchange, on CUDA. Only sizes are right.
    """
    from titan_exp.parallel.mesh import all_to_all_rows, return_rows

    for operator in (all_to_all_rows, return_rows):
        operator.register_kernel("cuda", exchange_balanced)


def exchange_balanced(rows: "Tensor", sent: "Tensor", received: "Tensor", size: int | None, group: str) -> "Tensor":
    """Exchange rows in equal parts; returns `size` rows, as many as are sent without."""
    import torch.distributed as dist

    from titan_exp.parallel.mesh import group_named

    found = rows.new_empty((rows.shape[0] if size is None else size, *rows.shape[1:]))
    parts = [balanced(tensor.shape[0], sent.shape[0]) for tensor in (found, rows)]
    dist.all_to_all_single(found, rows.contiguous(), *parts, group=group_named(group))
    return found


def balanced(rows: int, ranks: int) -> list[int]:
    """Numbers of rows for each rank, which differ by one at most."""
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]


HEAD = ("rank of", "allocated GiB, planned / measured", "reserved GiB, planned / measured")


def row(name: str, plan: Peaks | str, fact: Peaks | str) -> tuple[str, str, str]:
    """Row of a name, planned and measured peaks; a string is the reason for which there are none."""
    if isinstance(plan, str) or isinstance(fact, str):
        reason = next(it for it in (plan, fact) if isinstance(it, str))
        return name, f"failed: {reason.replace('|', '/')}", ""
    return name, _pair(plan.allocated, fact.allocated), _pair(plan.reserved, fact.reserved)


def _pair(plan: int | None, fact: int | None) -> str:
    if plan is None or fact is None:
        return f"{'–' if plan is None else f'{plan / GIB:.2f}'} / {'–' if fact is None else f'{fact / GIB:.2f}'}"
    return f"{plan / GIB:.2f} / {fact / GIB:.2f} ({plan / fact - 1:+.1%})"


def rank_and_overrides(layout: str) -> tuple[int, str]:
    """Pipeline rank and overrides of a layout."""
    first, _, rest = layout.partition(" ")
    return (int(first.removeprefix("rank=")), rest) if first.startswith("rank=") else (0, layout)


def peaks(words: Sequence[str], **extra: str) -> Peaks | str:
    """Peaks that a process finds, or the reason for which there are none."""
    try:
        return Peaks(**result_of(words, seconds=SECONDS, OMP_NUM_THREADS="1", **extra))
    except ProcessFailed as error:
        return str(error)


@dataclass(frozen=True)
class RankOptions:
    only: str = option("", "cases whose names have this in them", smallest="selective, 2")
    tiny: bool = option(False, "a debug model, on a CPU too", smallest=True)
    layouts: tuple[str, ...] = option((), "overrides in quotes, or names, instead of the cases", positional=True)


@benchmark
def rank_memory(options: RankOptions, out: Output) -> None:
    """Planned against measured memory: real steps of one rank of a large layout, in a fake process group on one GPU.

    The kernels and the caching allocator are real; the collectives send nothing. Each case is planned while it is
    measured, in processes of their own, so that neither sees the other's memory. `stub-memory` does so without a GPU.
    """
    from titan_exp.config.devices import visible_gpus

    if not options.tiny and not visible_gpus():
        raise CannotRun("this machine shows no NVIDIA GPU; --tiny runs a debug model on a CPU")
    table = out.table(dict.fromkeys(HEAD, ""))
    for name in options.layouts or [name for name in CASES if options.only in name]:
        rank, overrides = rank_and_overrides(name)
        both = [call_words(find, name=overrides, tiny=options.tiny, rank=rank) for find in (planned, measured)]
        with ThreadPoolExecutor(2) as pool:
            plan, fact = pool.map(peaks, both)
        table.add(*row(name, plan, fact))


@dataclass(frozen=True)
class StubOptions:
    only: str = option("", "layouts whose names have this in them", smallest="one rank, compiled")


@benchmark
def stub_memory(options: StubOptions, out: Output) -> None:
    """Planned memory beside that of torch's own operators and allocator for CUDA, without a GPU.

    `make stub-gpu` runs it with a build of torch for CUDA: real steps of a rank on the stub device of `stub-gpu`, in a
    fake process group. Kernels compute nothing, so that only layouts whose memory depends on no values are compared,
    and experts receive as many rows as plans assume. Workspaces of cuDNN and cuSOLVER are unknown to it.
    """
    from benchmarks.stub_gpu import build, words

    folder, table = build(), out.table(dict.fromkeys(HEAD, ""))
    for name, layout in ((name, layout) for name, layout in LAYOUTS.items() if options.only in name):
        rank, overrides = rank_and_overrides(layout)
        plan, fact = (call_words(find, name=overrides, rank=rank) for find in (planned, measured))
        table.add(*row(name, peaks(plan), peaks(words(folder, *fact), STUB_GPU_BYTES=str(CAPACITY))))


DENSE = "model=llama_debug model.dim=1024 model.ffn_dim=4096 model.layers=6 model.heads=16 model.kv_heads=16"
BATCH = "training.seq_len=128 training.global_batch_size=2 training.micro_batch_size=1"
ROWS = "training.seq_len=512 training.global_batch_size=8 training.micro_batch_size=4"
EXPERTS = "model=qwen3_moe_debug model.dim=1024 model.layers=6 model.moe.ffn_dim=1024 model.moe.experts=16"
FLUX = (
    "+experiment=flux_laptop data=images data.paths=[] tracking.images_every=0 model.dim=1024 "
    "model.heads=16 model.rope_axes=[16,24,24] training.global_batch_size=32 training.micro_batch_size=16"
)
GATED = {
    "fp32, async": f"{DENSE} {BATCH}",
    "fp32, async_process": f"{DENSE} {BATCH} checkpoint.mode=async_process",
    "bf16, full recomputation, sync": f"{DENSE} {ROWS} training.mixed_precision=bf16 activation_checkpoint=full "
    "checkpoint.mode=sync",
    "bf16, async": f"{DENSE} {ROWS} training.mixed_precision=bf16",
    "fp32, selective, large logits": f"{DENSE} {ROWS} model.vocab_size=32000 activation_checkpoint=selective",
    "dp_shard=2, async": f"{DENSE} {BATCH} parallelism.dp_shard=2",
    "dp_replicate=2, sync": f"{DENSE} {ROWS} parallelism.dp_replicate=2 checkpoint.mode=sync",
    "tp=2, async": f"{DENSE} {ROWS} parallelism.tp=2",
    "pp=2, 1F1B, async": f"{DENSE} {ROWS} parallelism.pp=2",
    "flux, fp32, async": FLUX,
    "flux, bf16, full, dp_shard=2": f"{FLUX} training.mixed_precision=bf16 activation_checkpoint=full "
    "parallelism.dp_shard=2",
    "experts, ep=2, async": f"{EXPERTS} {ROWS} parallelism.dp_shard=2 parallelism.ep=2",
}
"""Overrides by case."""
GATE_COMMON = "cluster.device=cpu training.steps=4 evaluation.every=0 checkpoint.every=2 plan.predict=always"


@dataclass(frozen=True)
class Outcome:
    """A run in a group."""

    code: int
    """Exit code of the command."""
    peak: int
    """Most bytes of anonymous and shared memory at once, sampled every 20 ms."""
    kills: int
    """Processes killed at the limit."""
    needed: int | None
    """Bytes that the gate predicted; None if the run was not started."""


class Group:
    """Memory cgroup of this benchmark; version 1 and 2 name its files differently."""

    def __init__(self) -> None:
        mount = Path("/sys/fs/cgroup")
        self._old = (mount / "memory" / "memory.limit_in_bytes").exists()
        self.path = (mount / "memory" if self._old else mount) / f"titan_exp_{os.getpid()}"
        if not self._old:
            (mount / "cgroup.subtree_control").write_text("+memory")
        self.path.mkdir()

    def limit(self, size: int) -> None:
        """Set the limit in bytes."""
        (self.path / ("memory.limit_in_bytes" if self._old else "memory.max")).write_text(str(size))

    @property
    def used(self) -> int:
        """Bytes of anonymous and shared memory."""
        values = self._values("memory.stat")
        return sum(values.get(name, 0) for name in (("rss", "shmem") if self._old else ("anon", "shmem")))

    @property
    def kills(self) -> int:
        """Processes killed since the group was made."""
        return self._values("memory.oom_control" if self._old else "memory.events").get("oom_kill", 0)

    def remove(self) -> None:
        """Remove the group, whose processes have ended."""
        for _ in range(50):
            with suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.1)

    def _values(self, name: str) -> dict[str, int]:
        return {key: int(value) for key, value in map(str.split, (self.path / name).read_text().splitlines())}


def gated_run(overrides: str, limit: int | None) -> Outcome:
    """Train in a group of its own."""
    group = Group()
    try:
        if limit is not None:
            group.limit(limit)
        with tempfile.TemporaryDirectory() as folder:
            words = [*overrides.split(), *GATE_COMMON.split(), f"paths.runs={folder}"]
            with (Path(folder) / "log").open("w+") as log:
                joining = ["sh", "-c", 'echo $$ > "$0"; exec "$@"', str(group.path / "cgroup.procs")]
                joining += command("train", *words)
                process = subprocess.Popen(joining, stdout=log, stderr=subprocess.STDOUT, env=environment())
                peak = 0
                while process.poll() is None:
                    peak = max(peak, group.used)
                    time.sleep(0.02)
                log.seek(0)
                if process.returncode:
                    print(log.read()[-1500:])
            plans = [json.loads(path.read_text()) for path in Path(folder).glob("*/*/plan.json")]
            needed = plans[0].get("needed_bytes") if plans else None
            return Outcome(process.returncode, peak, group.kills, needed)
    finally:
        group.remove()


@dataclass(frozen=True)
class GateOptions:
    only: str = option("", "cases whose names have this in them", smallest="fp32, async_process")
    tight: float = option(1.0, "limit over prediction; 0 for no limit")


@benchmark
def memory_gate(options: GateOptions, out: Output) -> None:
    """Runs of the memory gate in memory cgroups: a run that the gate admits at its limit must not be killed.

    Needs root and cgroups (version 1 or 2) on Linux. Each case trains on this machine's CPU for four steps with two
    asynchronous saves, first without a limit, which tells its real peak (anonymous and shared memory of all its
    processes), and then in a group whose limit is `--tight` times what the gate predicts. There the gate reads the
    limit of its own group; it must admit the run, which must not be killed. The last column is the predicted over the
    real peak.
    """
    try:
        Group().remove()
    except OSError as error:
        raise CannotRun(f"it needs root and memory cgroups ({error})") from error
    form = {"predicted GiB": ".3f", "real GiB": ".3f", "limited": "", "killed": "d", "ratio": ".2f"}
    table = out.table({"case": ""} | form)
    for name, overrides in GATED.items():
        if options.only not in name:
            continue
        free = gated_run(overrides, None)
        if free.needed is None:
            table.add(name, *("–" * 2), "was not started", *("–" * 2))
            continue
        ended = kills = None
        if options.tight:
            # A page more, since the gate reads a limit in whole pages.
            bound = gated_run(overrides, round(free.needed * options.tight) + 4096)
            ended = "ran" if bound.code == 0 else "refused" if bound.needed is None else f"code {bound.code}"
            kills = bound.kills
        table.add(name, free.needed / GIB, free.peak / GIB, ended, kills, free.needed / free.peak)
