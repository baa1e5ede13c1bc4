"""Comparison with torchtitan 0.2.2 on one GPU, and the planner's table of its rows."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.bench import (
    GIB,
    CannotRun,
    Output,
    benchmark,
    machine,
    markdown,
    number,
    option,
    temporary,
    threads,
    write_whole,
)
from benchmarks.versus.cases import MEMORY_GOAL, PEER, Case, Job, case_of, read_planned, rows_named, too_large
from benchmarks.versus.turns import Budget, Results, Session
from titan_exp.config.devices import command_lines, gpu_names
from titan_exp.plan.devices import DEVICES, Device, device_reported_as
from titan_exp.plan.predict import predict
from titan_exp.plan.roofline import ClassTime

CLUSTER = ("cluster=slurm", "cluster.device=cuda", "cluster.nodes=1", "cluster.gpus_per_node=1")
"""One GPU that need not be here."""
H200 = DEVICES["h200"]
"""Device of torchtitan's measured values."""
WARMUP, TIMED = 10, 15
"""Minimum numbers of warm-up and timed steps."""
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "titan_exp" / "versus_torchtitan"
"""Default folder of initial weights."""
FILL = "first write weights and compile every row, so many at a time; without, 2 on 100 GiB, else 1; 0 if tiny"


@dataclasses.dataclass(frozen=True)
class PlannedRow:
    """Prediction of one row."""

    row: str
    """Row, as in `case_of`."""
    allocated: float
    """Peak of allocated GiB."""
    reserved: float
    """Peak of reserved GiB."""
    speed: float
    """Estimated tokens/s."""
    seconds: float
    """Duration of the prediction."""
    kernels: Sequence[ClassTime] = ()
    """Kernels of the step by class."""
    device: Device = H200
    """Device that it is planned for."""

    @property
    def case(self) -> Case:
        """Case of the row."""
        return case_of(self.row)

    @property
    def memory_ratio(self) -> float | None:
        """Reserved memory over torchtitan's measured."""
        return None if self.case.peer_memory is None else self.reserved / self.case.peer_memory

    @property
    def speed_ratio(self) -> float | None:
        """Estimated tokens/s over torchtitan's measured; None on another device."""
        if self.case.peer_speed is None or self.device is not H200:
            return None
        return self.speed / self.case.peer_speed

    @property
    def misses(self) -> list[str]:
        """Goals that the prediction misses, and by how much."""
        found = []
        if self.memory_ratio is not None and self.memory_ratio > MEMORY_GOAL:
            above = self.reserved - MEMORY_GOAL * (self.case.peer_memory or 0.0)
            found.append(f"memory by {above:.1f} GiB")
        if self.speed_ratio is not None and self.case.goal is not None and self.speed_ratio < self.case.goal:
            found.append(f"speed by {100 * (self.case.goal / self.speed_ratio - 1):.1f} %")
        return found


def present_device() -> Device:
    """This machine's GPU in the planner's table; an H200 where there is none, or an unknown one."""
    names = gpu_names() or command_lines("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return DEVICES[(device_reported_as(names[0]) if names else None) or "h200"]


def plan_row(row: str, device: Device = H200) -> PlannedRow:
    """Plan our side of a row; the initial weights do not matter."""
    began = time.monotonic()
    plan = predict(Job(row, 10, 15).experiment(*CLUSTER), device)
    (rank,) = plan.ranks
    assert rank.allocator is not None, "it is planned for CUDA"
    assert plan.tokens_per_second is not None, "the device's rates are known"
    took = time.monotonic() - began
    sizes = rank.allocator.allocated / GIB, rank.allocator.reserved / GIB
    return PlannedRow(row, *sizes, plan.tokens_per_second, took, rank.kernels, device)


def plan_table(rows: Sequence[PlannedRow]) -> str:
    """Markdown table of planned rows, with the goals and by what they are missed."""
    head = ["case", "allocated GiB, planned", "reserved, planned", "torchtitan's, measured"]
    head += [
        f"ratio (goal ≤ {MEMORY_GOAL})",
        "tokens/s, estimated",
        "torchtitan's, measured",
        "ratio",
        "goal",
        "misses",
    ]
    lines: list[list[str]] = []
    for row in rows:
        case = row.case
        cells = [case.title, f"{row.allocated:.1f}", f"{row.reserved:.1f}", number(case.peer_memory, ".1f")]
        cells += [number(row.memory_ratio, ".2f"), f"{row.speed:,.0f}", number(case.peer_speed, ",.0f")]
        cells += [number(row.speed_ratio, ".2f"), number(case.goal, ".2f"), " and ".join(row.misses) or "–"]
        lines.append(cells)
    table = markdown(head, lines, right=len(head) - 2)
    return "\n".join([table, "", *{note(row.device): None for row in rows}]) + "\n"


def note(device: Device) -> str:
    """Assumptions of the estimates for a device."""
    forward, backward = (rate / 1e12 for rate in device.attention_rates)
    share = device.elementwise_tbs / device.copy_tbs
    return (
        f"Planned for one {device.name}. The roofline uses its rates (bf16 matmuls {device.gemm['bf16']:.0f} TFLOP/s, "
        f"fp8 {device.fp8_rate / 1e12:,.0f}, attention {forward:.0f} forward and {backward:.0f} backward, copies "
        f"{device.copy_tbs:.2f} TB/s) and assumes that norm, optimizer and casts of weights run at the copies' rate "
        f"and other elementwise kernels at {share:.0%} of it. It counts no gaps and no gain from GEMMs chosen by "
        "autotuning. torchtitan 0.2.2: measured on one H200."
    )


def class_table(rows: Sequence[PlannedRow]) -> str:
    """Markdown table of planned kernels by class: launches, TFLOP, GB and milliseconds of a step."""
    lines = []
    for row in rows:
        parts: list[list[str]] = []
        total = ClassTime(
            "**step**",
            sum(part.launches for part in row.kernels),
            sum(part.flops for part in row.kernels),
            sum(part.bytes for part in row.kernels),
            sum(part.seconds or 0.0 for part in row.kernels),
        )
        for part in (*row.kernels, total):
            tera, giga = part.flops / 1e12 or None, part.bytes / 1e9 or None
            milli = None if part.seconds is None else part.seconds * 1e3
            parts.append([part.name, str(part.launches), *(number(value, ".1f") for value in (tera, giga, milli))])
        table = markdown(["class", "launches", "TFLOP", "GB", "ms"], parts)
        lines += [f"### {row.case.title}", "", table, ""]
    return "\n".join(lines)


def what_is_missing(*, tiny: bool) -> list[str]:
    """Missing requirements of the comparison."""
    missing = []
    if importlib.util.find_spec("torchtitan") is None:
        missing.append(f"torchtitan is not importable: make peer installs {PEER} into .peer, for PYTHONPATH=.peer")
    elif (version := importlib.metadata.version("torchtitan")) != PEER:
        missing.append(f"torchtitan is {version}; the goals are about {PEER}, and so are the option names used here")
    if not tiny and not torch.cuda.is_available():
        missing.append("torch finds no CUDA GPU here; --tiny checks both sides on a CPU, --plan plans the rows")
    return missing


def print_plans(rows: list[str], output: Path | None, out: Output, *, classes: bool = False) -> None:
    """Plan rows and print the table; `plan.md` of the output folder, and reserved GiB in `plan.json`, after each row.

    With `classes`, both have a table of each row's kernels too.
    """

    def text() -> str:
        return plan_table(planned) + (f"\n{class_table(planned)}" if classes else "")

    planned, device = [], present_device()
    for row in rows:
        planned.append(plan_row(row, device))
        print(f"{row}: planned in {planned[-1].seconds:.0f} s", file=sys.stderr, flush=True)
        if output is not None:
            write_whole(output / "plan.md", text())
            write_whole(output / "plan.json", json.dumps({it.row: it.reserved for it in planned}))
    out.say(text())


def processes_that_fill(gib: float) -> int:
    """Number of processes that compile at a time on a GPU of `gib`; each takes up to 50 GiB."""
    return 2 if gib >= 100 else 1


def compare(options: "VersusOptions", rows: list[str], out: Output) -> int:
    """Run the rows of both sides and print the table; returns 1 if a process failed."""
    budget = Budget(options.seconds)  # from here on, the caches' included
    jobs = [Job(row, options.warmup, options.steps, options.tiny, tokenizer=options.tokenizer) for row in rows]
    head = f"{machine()}, {options.warmup} + {options.steps} steps"
    if options.tiny:
        head += ". Tiny shapes in fp32 on a CPU, where the host's time dominates."
    folder = options.output or Path("outputs") / f"versus-{time.strftime('%Y%m%d-%H%M%S')}"
    results = Results(folder, head)
    gib = float("inf") if options.tiny else torch.cuda.get_device_properties(0).total_memory / GIB
    left_out = too_large(rows, gib, read_planned(options.planned))
    for text in left_out.values():
        results.note(text)
    session = Session(budget, results, options.cache, left_out.keys())
    filling = options.fill_caches
    if filling is None:
        filling = 0 if options.tiny else processes_that_fill(gib)
    if filling:
        session.fill_caches(jobs, filling)
    session.run(jobs, options.rounds)
    out.headed = True
    out.say(results.table())
    print(f"Results: {folder / 'rows.jsonl'}, {folder / 'table.md'}", file=sys.stderr)
    return 1 if results.failed else 0


@dataclasses.dataclass(frozen=True)
class VersusOptions:
    rows: str = option("all", "comma-separated: all, options, CASE, CASE+OVERRIDE+...", smallest="8b_bf16_eager")
    seconds: float | None = option(None, "budget; a row that would not fit is left out, with a note")
    rounds: int = option(2, "turns of each side; two are A B B A", smallest=1)
    warmup: int = option(WARMUP, f"steps before timing, at least {WARMUP}", smallest=1)
    steps: int = option(TIMED, f"timed steps, at least {TIMED}", smallest=2)
    output: Path | None = option(None, "folder of results and logs; outputs/versus-TIME without", smallest=temporary)
    cache: Path = option(CACHE, "folder of initial weights", smallest=temporary)
    fill_caches: int | None = option(None, FILL)
    tokenizer: str = option("bytes", "data.tokenizer of both sides: bytes, or a file")
    tiny: bool = option(False, "tiny shapes in fp32 on a CPU", smallest=True)
    plan: bool = option(False, "plan the rows instead of running them")
    planned: Path | None = option(None, "plan.json of --plan; rows of ours beyond the GPU are left out")
    classes: bool = option(False, "with --plan: launches, bytes and time of a step by class")


@benchmark
def versus(options: VersusOptions, out: Output) -> int:
    """Comparison with torchtitan 0.2.2 on one GPU: tokens/s, memory and first losses from the same weights.

    python -m benchmarks versus                     # all rows; needs a GPU and torchtitan==0.2.2
    python -m benchmarks versus --seconds 600 --rows 8b_bf16_compile,options
    python -m benchmarks versus --rows 8b_bf16_compile+compile.cuda_graphs=true
    python -m benchmarks versus --plan              # the planner's table of all rows; needs no GPU
    python -m benchmarks versus --plan --classes    # and kernels of every row: launches, bytes, time
    python -m benchmarks versus --tiny              # tiny shapes on a CPU, to check both sides
    python -m benchmarks versus --tiny --warmup 50 --steps 300    # and the host's time of a step, on an idle machine

    Installs nothing and needs no installed titan_exp. Both train from the same cached weights on the same tokens in the
    same order with the same AdamW and a constant learning rate, in turn (A B B A) in fresh processes. The table
    compares the median step after warm-up, timed by device events without synchronization, and the peak memory of the
    timed steps. Every process's result is flushed to rows.jsonl of the output folder, and table.md is written again
    after each, so that a time limit costs only the last rows.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(threads()))
    try:
        rows = rows_named(options.rows)
    except ValueError as error:
        raise CannotRun(str(error)) from error
    if options.plan:
        print_plans(rows, options.output, out, classes=options.classes)
        return 0
    if missing := what_is_missing(tiny=options.tiny):
        raise CannotRun(*missing)
    if not options.tiny and (options.warmup < WARMUP or options.steps < TIMED):
        raise CannotRun(f"--warmup is at least {WARMUP} and --steps at least {TIMED}")
    return compare(options, rows, out)
