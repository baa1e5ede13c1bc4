"""Planner predictions beside published measurements of another trainer, and mutations that explain differences.

`python benchmarks/published_anchors.py [--only WORD] [--mutations]` plans runs of TorchTitan's performance reports (in
its repository, benchmarks/llama3_h100_202412_torchtitan.md: Llama 3.1 on H100 with 96 GB of HBM2e at 2.4 TB/s and
500 W, 8 to a host, 400 Gbit/s each; and llama3_8b_h200_2025-06_torchtitan_trainy_whitefiber.md) and prints reserved
memory and tokens/s per GPU beside theirs. Rates of `h100_500w` were fitted to the rows marked so; all others are
predictions. Trainers differ: a mutation plans the row with one thing as in the published run, or without it;
"as published" with all that decides memory there: saved operators, loss, separate matmuls, operators and segments.
"""

import argparse
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.published_recipe import published_operators, torch_context_parallelism, torch_operators
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.machine.devices import offered_devices
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.plan.cuda.devices import DEVICES
from titan_exp.plan.predict import Plan, predict
from titan_exp.rules import check

GIB = 2**30
# The published trainer's attention was flash on these GPUs, and its context parallelism gathered keys and values.
COMMON = [
    "cluster=slurm_h100",
    "compile=none",
    "training.mixed_precision=bf16",
    "data.virtual_shards=128",
    "model.attention_backend=flash",
    "parallelism.cp_method=allgather",
]
COMPILE = " compile=blocks"
ASYNC = " parallelism.async_tp=true"
FLOAT8 = COMPILE + " quantization=float8_tensorwise quantization.float8_all_gather=true"
SMALL = "model=llama3_1_8b training.seq_len=8192 activation_checkpoint=selective training.micro_batch_size=2 "
EIGHT = SMALL + "parallelism.dp_shard=8 training.global_batch_size=16"
MANY = SMALL + "parallelism.dp_shard=128 training.global_batch_size=256"
LONG = "model=llama3_1_8b activation_checkpoint=full training.micro_batch_size=1" + FLOAT8
MEDIUM = (
    "model=llama3_1_70b training.seq_len=8192 activation_checkpoint=full training.micro_batch_size=16 "
    "parallelism.dp_shard=32 parallelism.tp=8 training.global_batch_size=512"
)
LARGE = (
    "model=llama3_1_405b training.seq_len=8192 activation_checkpoint=full training.micro_batch_size=4 "
    "parallelism.dp_shard=8 parallelism.tp=8 parallelism.pp=8 parallelism.pp_microbatches=8 "
    "training.global_batch_size=256"
)
ATTENTION_ONLY = " activation_checkpoint.budget=0"
"""Selective activation checkpointing that saves no float8 matmul; by their memory, the runs of 2024 saved some."""
LARGE_LONG = (
    "model=llama3_1_405b activation_checkpoint=full training.micro_batch_size=1 parallelism.tp=8 parallelism.pp=8 "
    "parallelism.pp_microbatches=8" + FLOAT8 + ASYNC
)


@dataclass(frozen=True)
class Mutation:
    """One change of a plan."""

    name: str
    overrides: str = ""
    """Overrides in addition to the row's."""
    operators: str = ""
    """`torch` plans torch's operators instead of our Triton kernels; `published` those of the published trainer,
    `context` its context parallelism too, and `separate` its matmuls too."""


@dataclass(frozen=True)
class Anchor:
    """A published run."""

    name: str
    overrides: str
    """Overrides of our closest configuration."""
    memory: float
    """Reserved GiB, maximum over GPUs."""
    speed: float
    """Tokens/s per GPU."""
    mutations: Sequence[Mutation] = ()
    fitted: bool = False
    """True if a rate of the device was fitted to this row."""
    device: str = "h100_500w"


BUDGET = Mutation("our list of saved operators", "activation_checkpoint.budget=0.6")
TORCH = Mutation("torch's operators", operators="torch")
BF16_GATHER = Mutation("weights gathered in bf16", "quantization.float8_all_gather=false")
CUDNN = Mutation("cuDNN attention", "model.attention_backend=cudnn")
RING = Mutation("ring attention", "parallelism.cp_method=ring")
WHOLE = "training.loss_chunk_tokens=null cluster.expandable_segments=false"
SAVED = (
    " activation_checkpoint.save=[{}aten._scaled_dot_product_flash_attention,_c10d_functional.reduce_scatter_tensor]"
)
# By their memory, the published runs gathered weights in bf16; one in float8 could not be split into their matmuls.
BF16 = " quantization.float8_all_gather=false"
PUBLISHED = Mutation("as published", WHOLE + " quantization.fused_casts=false" + BF16, "published")
FLOAT8_GATHER = Mutation("as published, but gathered in float8", WHOLE + " quantization.fused_casts=false", "published")
TORCH_CONTEXT = Mutation("the same, torch's context parallelism", PUBLISHED.overrides, "context")
EVERY_SECOND = Mutation("as published", WHOLE + SAVED.format("aten.mm/2,"), "separate")
EVERY_SECOND_FLOAT8 = Mutation("as published", WHOLE + SAVED.format("aten._scaled_mm/2,") + BF16, "separate")
NO_MATMUL = Mutation("as published, no matmul saved", WHOLE + SAVED.format("") + BF16, "separate")
EXPOSED = Mutation("no async TP", "parallelism.async_tp=false")


def _parts(tokens: int, cp: int, batch: int) -> str:
    """Overrides of 8 ranks that share sequences in groups of `cp`, with `batch` sequences of each group."""
    layout = f" training.seq_len={tokens} parallelism.dp_shard={8 // cp} parallelism.cp={cp}"
    layout += f" training.global_batch_size={8 // cp * batch}"
    # The published run does not ask how far the model's positions reach.
    return layout + (f" model.context={tokens}" if tokens > 131072 else "")


def _long(tokens: int, cp: int, memory: float, speed: float, *, fitted: bool = False) -> Anchor:
    mutations = (PUBLISHED, TORCH_CONTEXT, RING) if cp > 1 else (PUBLISHED, CUDNN)
    name = f"8B, {tokens // 1024}k tokens, fsdp {8 // cp} x cp {cp}, compile, float8"
    return Anchor(name, LONG + _parts(tokens, cp, 1), memory, speed, mutations, fitted)


def _long_405b(tokens: int, cp: int, memory: float, speed: float) -> Anchor:
    name = f"405B, {tokens // 1024}k tokens, fsdp {8 // cp} x tp 8 x cp {cp} x pp 8, async TP, 1F1B"
    mutations = (PUBLISHED, TORCH_CONTEXT) if cp > 1 else (PUBLISHED,)
    return Anchor(name, LARGE_LONG + _parts(tokens, cp, 8), memory, speed, mutations)


ANCHORS = [
    Anchor("8B, fsdp 8", EIGHT, 82.4, 5762, mutations=(TORCH, EVERY_SECOND)),
    Anchor("8B, fsdp 8, compile", EIGHT + COMPILE, 77.0, 6667, mutations=(EVERY_SECOND, CUDNN), fitted=True),
    Anchor(
        "8B, fsdp 8, compile, float8",
        EIGHT + FLOAT8 + ATTENTION_ONLY,
        76.8,
        8532,
        mutations=(EVERY_SECOND_FLOAT8, NO_MATMUL, BF16_GATHER, BUDGET),
        fitted=True,
    ),
    Anchor("8B, fsdp 128", MANY, 67.0, 5605, mutations=(TORCH, EVERY_SECOND)),
    Anchor("8B, fsdp 128, compile", MANY + COMPILE, 62.0, 6514, mutations=(EVERY_SECOND,)),
    Anchor(
        "8B, fsdp 128, compile, float8", MANY + FLOAT8 + ATTENTION_ONLY, 61.8, 8380, mutations=(EVERY_SECOND_FLOAT8,)
    ),
    _long(32768, 1, 83.9, 3890, fitted=True),
    _long(65536, 2, 84.2, 2540),
    _long(131072, 4, 84.0, 1071),
    _long(262144, 8, 84.5, 548),
    Anchor(
        "70B, fsdp 32 x tp 8, compile, float8",
        MEDIUM + FLOAT8,
        71.9,
        829,
        mutations=(PUBLISHED, FLOAT8_GATHER),
    ),
    Anchor(
        "70B, the same, async TP", MEDIUM + FLOAT8 + ASYNC, 67.6, 876, mutations=(PUBLISHED, FLOAT8_GATHER, EXPOSED)
    ),
    Anchor(
        "405B, fsdp 8 x tp 8 x pp 8, async TP, 1F1B",
        LARGE + FLOAT8 + ASYNC,
        82.5,
        100,
        mutations=(PUBLISHED, FLOAT8_GATHER, EXPOSED),
    ),
    Anchor(
        "405B, the same, interleaved",
        LARGE + FLOAT8 + ASYNC + " parallelism.pp_schedule=Interleaved1F1B",
        72.7,
        128,
        mutations=(PUBLISHED, FLOAT8_GATHER, EXPOSED),
    ),
    _long_405b(32768, 1, 75.3, 76),
    _long_405b(65536, 2, 75.9, 47),
    _long_405b(131072, 4, 77.1, 31),
    _long_405b(262144, 8, 84.9, 16),
    Anchor(
        "8B, H200, fsdp 32, compile, float8",
        SMALL + "parallelism.dp_shard=32 training.global_batch_size=64" + FLOAT8 + ATTENTION_ONLY,
        47.96,
        10938,
        mutations=(EVERY_SECOND_FLOAT8, NO_MATMUL, CUDNN),
        device="h200",
    ),
    Anchor(
        "8B, H200, fsdp 64, compile, float8",
        SMALL + "parallelism.dp_shard=64 training.global_batch_size=128" + FLOAT8 + ATTENTION_ONLY,
        46.97,
        10753,
        mutations=(NO_MATMUL,),
        device="h200",
    ),
]


OPERATORS = {
    "": nullcontext,
    "torch": torch_operators,
    "published": lambda: published_operators(separate=False),
    "context": torch_context_parallelism,
    "separate": lambda: published_operators(separate=True),
}


def plan_of(anchor: Anchor, mutation: Mutation) -> Plan:
    """Plan a row with a mutation."""
    experiment = to_experiment(compose([*COMMON, *anchor.overrides.split(), *mutation.overrides.split()]))
    experiment = resolve_layout(check(experiment), offered_devices(experiment.cluster))
    with OPERATORS[mutation.operators]():
        return predict(experiment, DEVICES[anchor.device])


def main() -> None:
    """Plan and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="anchors whose names have this in them")
    parser.add_argument("--mutations", action="store_true", help="plan every mutation of these anchors too")
    arguments = parser.parse_args()
    table = Table(box=box.SIMPLE_HEAD, title="planned / published, on one GPU", title_justify="left")
    for name in ("", "GiB reserved", "tokens/s", "planned in"):
        table.add_column(name, justify="right" if name in ("GiB reserved", "tokens/s", "planned in") else "left")
    for anchor in (anchor for anchor in ANCHORS if arguments.only in anchor.name):
        for mutation in (Mutation(""), *(anchor.mutations if arguments.mutations else ())):
            began = time.perf_counter()
            plan = plan_of(anchor, mutation)
            speed, memory = plan.tokens_per_second or 0.0, max(rank.bytes for rank in plan.ranks) / GIB
            cells = [
                f"{memory:.1f} / {anchor.memory:.1f} ({memory / anchor.memory - 1:+.0%})",
                f"{speed:,.0f} / {anchor.speed:,.0f} ({speed / anchor.speed - 1:+.0%})",
            ]
            name = f"  {mutation.name}" if mutation.name else anchor.name + (" (fitted)" if anchor.fitted else "")
            table.add_row(name, *cells, f"{time.perf_counter() - began:.0f} s")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
