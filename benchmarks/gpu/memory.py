"""Planned against measured memory: real steps of one rank of a large layout, in a fake process group on one GPU.

The kernels and the caching allocator are real; the collectives send nothing. Each case is planned and measured in
processes of their own, so that neither sees the other's memory. `benchmarks/stub_memory.py` does so without a GPU.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

GIB = 2**30
STEPS = 3
"""Measured steps; optimizer state exists from the second on."""
COMMON = (
    *(
        "model=llama3_8b",
        "cluster=slurm_h100",
        "compile=none",
        "training.seq_len=8192",
        "training.mixed_precision=bf16",
    ),
    *("data.virtual_shards=128", "checkpoint=none", "training.evaluate_every=0"),
)
TINY = (
    *(
        "model=llama_debug",
        "cluster=slurm_h100",
        "compile=none",
        "training.seq_len=64",
        "training.mixed_precision=bf16",
    ),
    *("data.virtual_shards=128", "checkpoint=none", "training.evaluate_every=0"),
    "optimizer.implementation=fused",  # a CPU has no Triton
)
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


@dataclass(frozen=True)
class Peaks:
    """Peaks of allocated and reserved bytes; None where they cannot be read."""

    allocated: int | None
    reserved: int | None


def experiment_of(name: str, *, tiny: bool) -> Any:
    """Resolved and checked experiment of a case, or of overrides, for GPUs that need not be here."""
    from titan_exp.config.hydra.compose import compose
    from titan_exp.config.layout.resolved_layout import resolve_layout
    from titan_exp.config.machine.devices import offered_devices
    from titan_exp.config.schema.typed_config import to_experiment
    from titan_exp.rules import check

    long = ("training.seq_len", "model.context")
    overrides = [word for word in CASES.get(name, name).split() if not (tiny and word.startswith(long))]
    experiment = to_experiment(compose([*(TINY if tiny else COMMON), *overrides]))
    return resolve_layout(check(experiment), offered_devices(experiment.cluster))


def planned(name: str, *, tiny: bool, rank: int = 0) -> Peaks:
    """Peaks of a pipeline rank as the planner predicts them."""
    from benchmarks.versus.planned import present_device
    from titan_exp.plan.predict import predict

    (plan,) = predict(experiment_of(name, tiny=tiny), present_device(), [rank]).ranks
    assert plan.allocator is not None, "it is planned for CUDA"
    return Peaks(plan.allocator.allocated, plan.allocator.reserved)


def measured(name: str, *, tiny: bool, rank: int = 0) -> Peaks:
    """Peaks of real steps of a pipeline rank's first data rank, as torch's allocator reports them; without a GPU the
    steps run on the CPU."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from benchmarks.gpu.balanced_experts import balance_experts
    from titan_exp.config.layout.resolved_layout import ResolvedLayout
    from titan_exp.config.machine.devices import allocator_environment
    from titan_exp.plan.trace.fake_world import FakeRank, fake_batches
    from titan_exp.trainer.train_state import assemble

    experiment = experiment_of(name, tiny=tiny)
    os.environ.update(allocator_environment(experiment.cluster, experiment.compile, os.environ))
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
    if not cuda:
        return Peaks(None, None)
    torch.cuda.synchronize()
    return Peaks(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def table(found: Sequence[tuple[str, Peaks | str, Peaks | str]]) -> str:
    """Markdown table of names, planned and measured peaks; a string is the reason for which there are none."""
    lines = ["| rank 0 of | allocated GiB, planned / measured | reserved GiB, planned / measured |", "|---|--:|--:|"]
    for name, plan, fact in found:
        if isinstance(plan, str) or isinstance(fact, str):
            reason = next(it for it in (plan, fact) if isinstance(it, str))
            lines.append(f"| {name} | failed: {reason.replace('|', '/')} | |")
            continue
        cells = [_pair(plan.allocated, fact.allocated), _pair(plan.reserved, fact.reserved)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _pair(plan: int | None, fact: int | None) -> str:
    if plan is None or fact is None:
        return f"{'–' if plan is None else f'{plan / GIB:.2f}'} / {'–' if fact is None else f'{fact / GIB:.2f}'}"
    return f"{plan / GIB:.2f} / {fact / GIB:.2f} ({plan / fact - 1:+.1%})"


def main() -> int:
    """Plan or measure one case; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("planned", "measured"))
    parser.add_argument("case", help=f"overrides, or one of {', '.join(CASES)}")
    parser.add_argument("--rank", type=int, default=0, help="pipeline rank")
    parser.add_argument("--tiny", action="store_true", help="a debug model, on a CPU too")
    options = parser.parse_args()
    peaks = {"planned": planned, "measured": measured}[options.what](options.case, tiny=options.tiny, rank=options.rank)
    print(json.dumps({"allocated": peaks.allocated, "reserved": peaks.reserved}), flush=True)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Without the interpreter's end, at which a thread of torch's sometimes aborts on the stub device.
    os._exit(code)
