"""Output of `titan-exp plan search`: table of layouts, reasons for pruned layouts, and commands; or JSON."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from titan_exp.config.errors.user_error import shown
from titan_exp.config.groups import batch_ramp
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.layout.axes import DEGREES
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.plan_table import groups_of, print_unwrapped
from titan_exp.plan.search.layout_cost import LayoutCost, short_key
from titan_exp.plan.search.layouts import SearchSpace, train_command
from titan_exp.plan.search.search import SearchResult
from titan_exp.tracking.number_format import GIB


def print_search(
    result: SearchResult,
    space: SearchSpace,
    device: Device,
    *,
    typed: Sequence[str],
    more: Mapping[str, Any],
    tokens: int | None,
) -> None:
    """Print a search result on a terminal, with GPU-hours if the run's number of tokens is known.

    Commands repeat the `typed` overrides and add `more` keys.
    """
    console, first = Console(), result.rows[0].candidate
    training = first.experiment.training
    console.print(
        f"{first.experiment.model.name} on {groups_of(first.experiment)}{first.layout.world_size} x {device.name}: "
        f"{training.global_batch_size} sequences of {training.seq_len} tokens per step",
        highlight=False,
    )
    print_unwrapped(console, _table(result, tokens))
    for line in _left_out(result, space):
        console.print(line, highlight=False, soft_wrap=True)
    console.print("\nTo launch them:", highlight=False)
    for number, row in enumerate(result.rows, 1):
        console.print(f"{number:>3}  {train_command(row.candidate, typed, more)}", highlight=False, soft_wrap=True)
    console.print(
        f"\n{result.traces} profiles traced, {result.looked_at} layouts extrapolated, in {result.seconds:.0f} s",
        style="dim",
        highlight=False,
    )


def search_json(
    result: SearchResult, space: SearchSpace, typed: Sequence[str], more: Mapping[str, Any], tokens: int | None
) -> dict[str, Any]:
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
                "command": train_command(row.candidate, typed, more),
            }
            for row, front in zip(result.rows, result.front, strict=True)
        ],
        "tried": space.tried,
        "left_out": {
            "by_rules": {example.field: count for count, example in space.left_out},
            "not_known": dict(result.unknown),
            "estimated_not_to_fit": result.floor,
            "does_not_fit": result.too_large,
            "estimated_slower_than_the_last": result.slower,
        },
        "stopped": result.stopped,
        "traces": result.traces,
        "seconds": result.seconds,
    }


def gpu_hours(row: LayoutCost, tokens: int) -> float:
    """GPU-hours of a run of `tokens` tokens."""
    return tokens / row.tokens_per_second / 3600


def days(row: LayoutCost, tokens: int) -> float:
    """Days of a run of `tokens` tokens."""
    return gpu_hours(row, tokens) / row.candidate.devices / 24


def steps_for(training: TrainingConfig, tokens: int) -> int:
    """Optimizer steps of a run of `tokens` tokens."""
    return batch_ramp.steps_for(training.batch_ramp, training.global_batch_size, math.ceil(tokens / training.seq_len))


def _table(result: SearchResult, tokens: int | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    degrees_shown = [*DEGREES, *(["ep", "etp"] if result.rows[0].candidate.experts is not None else [])]
    columns = ["", "tokens/s/GPU", "GiB", "", *(key.removeprefix("dp_") for key in degrees_shown), "schedule", "micro"]
    for name in [*columns, "recompute", "more", "bubble", *(["GPU-hours", "days"] if tokens else [])]:
        table.add_column(
            name, justify="left" if name in ("schedule", "recompute", "more", "") else "right", no_wrap=True
        )
    for number, (row, front) in enumerate(zip(result.rows, result.front, strict=True), 1):
        candidate, parallelism = row.candidate, row.candidate.parallelism
        degrees = [getattr(parallelism, name) for name in degrees_shown]
        cells = [
            *(number, f"{row.tokens_per_second:,.0f}", _size(row), "*" if front else "", *degrees),
            parallelism.pp_schedule if parallelism.pp > 1 else "",
            f"{candidate.layout.gradient_accumulation} x {candidate.layout.micro_batch_size}",
            candidate.mode,
            " ".join(f"{short_key(key)}={shown(value)}" for key, value in candidate.refined),
            f"{row.bubble:.0%}",
            *([f"{gpu_hours(row, tokens):,.0f}", f"{days(row, tokens):,.1f}"] if tokens else []),
        ]
        table.add_row(*map(str, cells))
    return table


def _size(row: LayoutCost) -> str:
    return f"{row.needed / GIB:.1f}{'?' if row.reserved is None else '~' if row.retries else ''}"


def _rooms(result: SearchResult) -> str:
    rooms = sorted({f"{row.room / GIB:.1f}" for row in result.rows})
    return f"{' to '.join(dict.fromkeys((rooms[0], rooms[-1])))} GiB"


def _left_out(result: SearchResult, space: SearchSpace) -> list[str]:
    broken = sum(count for count, _ in space.left_out)
    return [
        "* on the Pareto front: no faster layout needs less memory. Times are estimates; GiB are reserved by torch's "
        f"allocator, for which {_rooms(result)} of the device are left beside CUDA's context and NCCL's buffers.",
        *["~ with the allocator under pressure, which waits for the GPU."] * any(row.retries for row in result.rows),
        *["? not planned yet: GiB are tensors."] * any(row.reserved is None for row in result.rows),
        f"{broken:,} of {space.tried:,} layouts break a rule" + (":" if broken else "."),
        *(f"    {count:>6,}  {example.field}, for example: {example.reason}" for count, example in space.left_out[:4]),
        *(
            f"  {count:,} cannot be extrapolated, because {reason}: titan-exp plan predicts one of them;"
            for reason, count in result.unknown
        ),
        f"  {result.floor:,} are estimated not to fit, and "
        f"{result.too_large:,} of {result.looked_at:,} extrapolated ones do not fit;",
        f"  {result.slower:,} are not looked at, and some may be faster: the search was stopped."
        if result.stopped
        else f"  {result.slower:,} are estimated to be slower than the last row.",
    ]
