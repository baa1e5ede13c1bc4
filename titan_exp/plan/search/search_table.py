"""Output of `titan-exp plan search`: table of layouts, reasons for pruned layouts, and commands; or JSON."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from titan_exp.config.command_line.terminal import Terminal
from titan_exp.config.errors.user_error import shown
from titan_exp.config.groups import batch_ramp
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.layout.axes import DEGREES
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.exchange import exchange_of
from titan_exp.plan.plan_table import print_lines, print_unwrapped, table_of
from titan_exp.plan.search.search import LayoutCost, SearchResult, short_key
from titan_exp.tracking.number_format import GIB


def print_search(result: SearchResult, device: Device, commands: Sequence[str], tokens: int | None) -> None:
    """Print a search result on a terminal, with the command of each row, and GPU-hours if the run's number of tokens is
    known."""
    console, first = Terminal(), result.rows[0].candidate
    training = first.experiment.training
    devices = f"{exchange_of(first.experiment).title}{first.layout.world_size} x {device.name}"
    step = f"{training.global_batch_size} sequences of {training.seq_len} tokens per step"
    console.print(f"{first.experiment.model.name} on {devices}: {step}", highlight=False)
    print_unwrapped(console, _table(result, tokens))
    print_lines(console, [*_left_out(result), "\nTo launch them:"])
    print_lines(console, (f"{number:>3}  {command}" for number, command in enumerate(commands, 1)))
    took = f"\n{result.planned} layouts planned in {result.seconds:.0f} s"
    console.print(took, style="dim", highlight=False)


def search_json(result: SearchResult, commands: Sequence[str], tokens: int | None) -> dict[str, Any]:
    """Search result as JSON values in bytes and seconds."""
    return {
        "layouts": [
            {
                "tokens_per_second_per_device": row.tokens_per_second,
                "step_seconds": row.step_seconds,
                "bubble": row.bubble,
                "peak_allocated_bytes": row.peak_bytes,
                "peak_reserved_bytes": row.reserved,
                "allocation_retries": row.retries,
                "peak_pipeline_rank": row.peak_rank,
                "peak_during": row.peak_where,
                "on_front": front,
                "gpu_hours": None if tokens is None else gpu_hours(row, tokens),
                "days": None if tokens is None else days(row, tokens),
                "command": command,
            }
            for row, front, command in zip(result.rows, result.front, commands, strict=True)
        ],
        "tried": result.tried,
        "left_out": {
            "by_rules": {example.field: count for count, example in result.left_out},
            "not_known": dict(result.unknown),
            "estimated_not_to_fit": result.floor,
            "does_not_fit": result.too_large,
            "estimated_slower_than_the_last": result.slower,
        },
        "stopped": result.stopped,
        "planned": result.planned,
        "seconds": result.seconds,
    }


def gpu_hours(row: LayoutCost, tokens: int) -> float:
    """GPU-hours of a run of `tokens` tokens."""
    return tokens / row.tokens_per_second / 3600


def days(row: LayoutCost, tokens: int) -> float:
    """Days of a run of `tokens` tokens."""
    return gpu_hours(row, tokens) / row.candidate.layout.devices / 24


def steps_for(training: TrainingConfig, tokens: int) -> int:
    """Optimizer steps of a run of `tokens` tokens."""
    return batch_ramp.steps_for(training.batch_ramp, training.global_batch_size, math.ceil(tokens / training.seq_len))


def _table(result: SearchResult, tokens: int | None) -> Table:
    rows, layouts = result.rows, [row.candidate for row in result.rows]
    degrees = [*DEGREES, *(["ep", "etp"] if layouts[0].spec and layouts[0].spec.has_experts else [])]
    columns: list[tuple[str, Iterable[object]]] = [
        ("", range(1, len(rows) + 1)),
        ("tokens/s/GPU", (f"{row.tokens_per_second:,.0f}" for row in rows)),
        ("GiB", (f"{row.reserved / GIB:.1f}{'~' if row.retries else ''}" for row in rows)),
        ("", ("*" if front else "" for front in result.front)),
        *((key.removeprefix("dp_"), [getattr(each.parallelism, key) for each in layouts]) for key in degrees),
        ("schedule", (each.parallelism.pp_schedule if each.parallelism.pp > 1 else "" for each in layouts)),
        ("micro", (f"{each.layout.gradient_accumulation} x {each.layout.micro_batch_size}" for each in layouts)),
        ("recompute", (each.mode for each in layouts)),
        ("more", (" ".join(f"{short_key(key)}={shown(value)}" for key, value in each.refined) for each in layouts)),
        ("bubble", (f"{row.bubble:.0%}" for row in rows)),
    ]
    if tokens:
        columns.append(("GPU-hours", (f"{gpu_hours(row, tokens):,.0f}" for row in rows)))
        columns.append(("days", (f"{days(row, tokens):,.1f}" for row in rows)))
    headings, cells = zip(*columns, strict=True)
    return table_of(headings, zip(*cells, strict=True), {"", "schedule", "recompute", "more"})


def _left_out(result: SearchResult) -> list[str]:
    broken, rooms = sum(count for count, _ in result.left_out), sorted({f"{row.room / GIB:.1f}" for row in result.rows})
    room = " to ".join(dict.fromkeys((rooms[0], rooms[-1])))
    return [
        "* on the Pareto front: no faster layout needs less memory. Times are estimates; GiB are reserved by torch's "
        f"allocator, for which {room} GiB of the device are left beside CUDA's context and NCCL's buffers.",
        *["~ with the allocator under pressure, which waits for the GPU."] * any(row.retries for row in result.rows),
        f"{broken:,} of {result.tried:,} tried layouts break a rule" + (":" if broken else "."),
        *(f"    {count:>6,}  {example.field}, for example: {example.reason}" for count, example in result.left_out[:4]),
        *(
            f"  {count:,} cannot be extrapolated, because {reason}: titan-exp plan predicts one of them;"
            for reason, count in result.unknown
        ),
        f"  {result.floor:,} are estimated not to fit, and "
        f"{result.too_large:,} of {result.planned:,} planned ones do not fit;",
        f"  {result.slower:,} are not planned, and some may be faster: the search was stopped."
        if result.stopped
        else f"  {result.slower:,} are not planned: their compute alone takes as long as the first row's step.",
    ]
