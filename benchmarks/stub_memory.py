"""Planned memory beside that of torch's own operators and allocator for CUDA, without a GPU.

`make stub-gpu` or, with a build of torch for CUDA, `python benchmarks/stub_memory.py [--only WORD]`: real steps of a
rank on the stub device of `benchmarks/gpu/stub`, in a fake process group. Kernels compute nothing, so that only layouts
whose memory depends on no values are compared, and experts receive as many rows as plans assume. Workspaces of cuDNN
and cuSOLVER are unknown to it.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu.memory import CASES, Peaks, table
from benchmarks.gpu.stub.build import build, words

MEMORY = str(Path(__file__).with_name("gpu") / "memory.py")
CAPACITY = 150_000_000_000
"""Bytes of the device, an H200."""
SECONDS = 900
"""Limit of a plan or of a rank's steps."""
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
    **{f"{name}, 32 layers": f"{FLASH} {overrides}" for name, overrides in CASES.items()},
}
"""Overrides of Llama 3 8B by name; `rank` is a pipeline rank. Those with all layers are of `make gpu`."""


def rank_and_overrides(layout: str) -> tuple[str, str]:
    """Pipeline rank and overrides of a layout."""
    first, _, rest = layout.partition(" ")
    return (first.removeprefix("rank="), rest) if first.startswith("rank=") else ("0", layout)


def peaks(what: str, layout: str) -> Peaks | str:
    """Peaks of a layout, `planned` or `measured` on the stub device; in words why there are none."""
    rank, overrides = rank_and_overrides(layout)
    command = [sys.executable, MEMORY, what, "--rank", rank, overrides]
    if what == "measured":
        command = words(build(), *command)
    env = {**os.environ, "STUB_GPU_BYTES": str(CAPACITY), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS, env=env)
    except subprocess.TimeoutExpired:
        return f"{what}: over {SECONDS} s"
    if done.returncode:
        return f"{what}: {(done.stderr.strip() or f'exit code {done.returncode}').splitlines()[-1]}"
    return Peaks(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Plan and measure every layout, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="layouts whose names have this in them")
    only, found = parser.parse_args().only, []
    for name, overrides in LAYOUTS.items():
        if only in name:
            found.append((name, peaks("planned", overrides), peaks("measured", overrides)))
            print(table(found[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
