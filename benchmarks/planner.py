"""Planner benchmarks: predictions beside measured and published runs of other trainers, and the cost of planning."""

import os
import resource
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from benchmarks.bench import GIB, Output, benchmark, call_words, option, resolved, result_of
from benchmarks.bench import titan_exp as command
from benchmarks.published_recipe import published_operators, torch_context_parallelism, torch_operators
from titan_exp.plan.devices import DEVICES
from titan_exp.plan.predict import Plan, predict

EAGER = ("cluster=slurm_h100", "compile=none", "training.mixed_precision=bf16")
LLAMA_8B = ("model=llama3_8b", *EAGER, "training.seq_len=8192")
LLAMA_405B = ("model=llama3_405b", *LLAMA_8B[1:], "training.global_batch_size=512")
PIPELINE = (*LLAMA_405B, "parallelism.tp=8", "parallelism.pp=8", "parallelism.dp_shard=8", "activation_checkpoint=full")
TINY = ("model=llama3_8b", "model.layers=8", "training.seq_len=1024", "training.global_batch_size=64")
"""Overrides of a plan and of a search at their smallest."""
# The published trainer's attention was flash on these GPUs, and its context parallelism gathered keys and values.
PUBLISHED_COMMON = (
    *(*EAGER, "data.virtual_shards=128"),
    *("model.attention_backend=flash", "parallelism.cp_method=allgather"),
)
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
class MeasuredAnchor:
    """A measured run."""

    name: str
    overrides: str
    """Overrides of our closest configuration."""
    measured: tuple[float, float, float]
    """GiB allocated, reserved in segments, reserved in expandable segments."""


SELECTIVE = "activation_checkpoint=selective"
EIGHT_RANKS = "parallelism.dp_shard=8 training.global_batch_size"
MANY_RANKS = "parallelism.dp_shard=128 data.virtual_shards=128 training.global_batch_size"
MEASURED = [
    MeasuredAnchor(*words)
    for words in (
        (
            "full recompute, 2 sequences, world 8",
            f"{EIGHT_RANKS}=16 activation_checkpoint=full",
            (39.998, 53.742, 49.357),
        ),
        ("no recompute, 1 sequence, world 8", f"{EIGHT_RANKS}=8", (68.164, 77.201, 75.855)),
        ("selective, 2 sequences, world 8", f"{EIGHT_RANKS}=16 {SELECTIVE}", (67.060, 81.555, 77.346)),
        ("selective, 2 sequences, world 128", f"{MANY_RANKS}=256 {SELECTIVE}", (56.551, 66.627, 63.146)),
        (
            "selective and inductor, 2 sequences, world 8",
            f"{EIGHT_RANKS}=16 {SELECTIVE} compile=blocks",
            (63.060, 75.801, 72.971),
        ),
    )
]


@dataclass(frozen=True)
class AnchorOptions:
    only: str = option("", "anchors whose names have this in them", smallest="no recompute")
    overrides: tuple[str, ...] = option((), "overrides of every anchor", smallest=("model.layers=2",), positional=True)


@benchmark
def measured_anchors(options: AnchorOptions, out: Output) -> None:
    """Planned memory beside that of another trainer, measured on a GPU.

    Plans an 8B model at 8,192 tokens a sequence, sharded by FSDP2 over worlds of 8 and 128, and prints GiB beside those
    of a plain trainer of the same model on an H200 with a fake process group (torch 2.11). Shapes, precision and layout
    are equal; modules, loss and the selective activation checkpointing policy differ, so the errors include the
    difference between two trainers.
    """
    columns = {"planned / measured, GiB": "", "allocated": "", "reserved, segments": "", "reserved, expandable": ""}
    table = out.table(columns | {"planned in, s": ".0f"}, "Llama 3 8B, 8,192 tokens")
    for anchor in (anchor for anchor in MEASURED if options.only in anchor.name):
        began = time.perf_counter()
        experiment = resolved(*LLAMA_8B, *anchor.overrides.split(), *options.overrides, ranks=None)
        (rank,) = predict(experiment, DEVICES["h200"]).ranks
        took = time.perf_counter() - began
        assert rank.allocator is not None, "it is planned for CUDA"
        assert rank.expandable, "the default"
        planned = (rank.allocator.allocated, rank.other_segments, rank.bytes)
        cells = [beside(guess / GIB, fact, ".2f") for guess, fact in zip(planned, anchor.measured, strict=True)]
        table.add(anchor.name, *cells, took)


def beside(planned: float, found: float, form: str) -> str:
    """Cell with a planned number, the found one and the error."""
    return f"{planned:{form}} / {found:{form}} ({planned / found - 1:+.1%})"


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


PUBLISHED_RUNS = [
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
    Anchor("70B, fsdp 32 x tp 8, compile, float8", MEDIUM + FLOAT8, 71.9, 829, mutations=(PUBLISHED, FLOAT8_GATHER)),
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


def plan_of(anchor: Anchor, mutation: Mutation, *words: str) -> Plan:
    """Plan a row with a mutation, and with more overrides."""
    overrides = [*anchor.overrides.split(), *mutation.overrides.split(), *words]
    experiment = resolved(*PUBLISHED_COMMON, *overrides, ranks=None)
    with OPERATORS[mutation.operators]():
        return predict(experiment, DEVICES[anchor.device])


FEW = ("8B, fsdp 128", "8B, 64k")
"""Anchors that have every kind of mutation."""


@dataclass(frozen=True)
class PublishedOptions:
    only: tuple[str, ...] = option(("",), "anchors whose names have one of these in them", smallest=FEW)
    mutations: bool = option(False, "plan every mutation of these anchors too", smallest=True)
    overrides: tuple[str, ...] = option((), "overrides of every anchor", smallest=("model.layers=2",), positional=True)


@benchmark
def published_anchors(options: PublishedOptions, out: Output) -> None:
    """Planned memory and speed beside another trainer's published ones, and mutations that explain differences.

    Plans runs of TorchTitan's performance reports (in its repository, benchmarks/llama3_h100_202412_torchtitan.md:
    Llama 3.1 on H100 with 96 GB of HBM2e at 2.4 TB/s and 500 W, 8 to a host, 400 Gbit/s each; and
    llama3_8b_h200_2025-06_torchtitan_trainy_whitefiber.md) and prints reserved memory and tokens/s per GPU beside
    theirs. Rates of `h100_500w` were fitted to the rows marked so; all others are predictions. Trainers differ: a
    mutation plans the row with one thing as in the published run, or without it; "as published" with all that decides
    memory there: saved operators, loss, separate matmuls, operators and segments.
    """
    columns = {"planned / published, on one GPU": "", "GiB reserved": "", "tokens/s": "", "planned in, s": ".0f"}
    table = out.table(columns)
    for anchor in (anchor for anchor in PUBLISHED_RUNS if any(word in anchor.name for word in options.only)):
        for mutation in (Mutation(""), *(anchor.mutations if options.mutations else ())):
            began = time.perf_counter()
            plan = plan_of(anchor, mutation, *options.overrides)
            memory = beside(max(rank.bytes for rank in plan.ranks) / GIB, anchor.memory, ".1f")
            speed = beside(plan.tokens_per_second or 0.0, anchor.speed, ",.0f")
            name = f"– {mutation.name}" if mutation.name else anchor.name + (" (fitted)" if anchor.fitted else "")
            table.add(name, memory, speed, time.perf_counter() - began)


def traced(layers: int, shortcut: bool) -> dict[str, float]:
    """Seconds of a plan of one of 64 ranks, with or without extrapolation."""
    from titan_exp.plan.extrapolate.extrapolated_trace import TraceExtrapolator
    from titan_exp.plan.predict import as_traced
    from titan_exp.plan.trace.trace_step import fake_rank, trace_step

    words = [*LLAMA_8B, f"model.layers={layers}", "parallelism.dp_shard=64", "activation_checkpoint=full"]
    words += ["training.global_batch_size=256", "training.micro_batch_size=1"]
    experiment = as_traced(resolved(*words, ranks=None), None)
    began = time.process_time()
    if shortcut:
        TraceExtrapolator(experiment, cuda=True).trace(0)
    else:
        with fake_rank(experiment, 0) as it:
            trace_step(it.state, it.step, warmup_step=it.warmup_step, cuda=True)
    return {"seconds": time.process_time() - began}


def cost(words: Sequence[str], cores: int) -> dict[str, Any]:
    """Run a command on `cores` cores; returns its JSON, and its wall-clock and processor seconds and memory."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    chosen = ",".join(map(str, sorted(os.sched_getaffinity(0))[:cores]))
    found = result_of(["taskset", "--cpu-list", chosen, *words], OMP_NUM_THREADS="1")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # Maximum over all children so far: rows are in ascending order of expected memory.
    most = after.ru_maxrss / 2**20
    return {"processor s": used, "wall s": time.perf_counter() - began, "GiB": most, **found}


@dataclass(frozen=True)
class PlanningOptions:
    gpus: int = option(512, "GPUs of the last search, and most of the others", smallest=1)
    cores: int = option(2, "cores of a process")
    layers: tuple[int, ...] = option((8, 32, 126), "layers of traces", smallest=(2,))
    overrides: tuple[str, ...] = option((), "overrides of plans and searches", smallest=TINY, positional=True)


@benchmark
def planning(options: PlanningOptions, out: Output) -> None:
    """Planner cost: seconds by layers, of plans and of searches, and peak memory of the planner.

    Every row is a fresh process: CPU seconds with those of its children, wall-clock seconds, and the peak memory of one
    process. Traces of 8B shapes, one rank, full recomputation, 4 micro-batches; the ratio is that of the whole trace to
    the extrapolated one in one run. Needs no GPU.
    """
    table = out.table({"layers": "", "whole trace, s": ".1f", "extrapolated, s": ".1f", "ratio": ".1f"})
    for layers in options.layers:
        whole, short = (
            cost(call_words(traced, layers=layers, shortcut=shortcut), 1)["seconds"] for shortcut in (False, True)
        )
        table.add(str(layers), whole, short, whole / short)
    columns = {"wall s": ".0f", "processor s": ".0f", "GiB": ".2f"}
    plans = {"eager": ("compile=none",), "compiled, float8_rowwise": ("compile=blocks", "quantization=float8_rowwise")}
    table = out.table({"plan": ""} | columns, "Plans of all 8 pipeline ranks of 405B on 512 GPUs")
    for name, words in plans.items():
        found = cost(command("plan", *PIPELINE, *words, *options.overrides, "--json"), options.cores)
        table.add(name, *(found[column] for column in columns))
    searches = (
        ("8B, tensor parallelism fixed", (*LLAMA_8B, "parallelism.tp=1", "training.global_batch_size=64"), 16),
        ("8B", (*LLAMA_8B, "training.global_batch_size=64"), 16),
        ("405B", LLAMA_405B, options.gpus),
    )
    table = out.table({"search": "", "layouts": ",", "planned": ","} | columns, "Searches; GiB of the largest process")
    for name, words, most in searches:
        gpus = str(min(most, options.gpus))
        found = cost(command("plan", "search", *words, *options.overrides, "--gpus", gpus, "--json"), options.cores)
        table.add(f"{name} on {gpus}", found["tried"], found["planned"], *(found[column] for column in columns))
