"""What a search has found, in print: a table of layouts, what was left out and why, and the commands; or JSON."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.plan_table import print_unwrapped
from titan_exp.plan.search.layout_cost import LayoutCost
from titan_exp.plan.search.layouts import SearchSpace, command_line
from titan_exp.plan.search.search import HEADROOM, SearchResult

GIB = 2**30


def print_search(
    found: SearchResult,
    tried: SearchSpace,
    device: Device,
    *,
    typed: Sequence[str],
    more: Mapping[str, Any],
    tokens: int | None,
) -> None:
    """Print a search for people.

    Args:
        found: what it has come to.
        tried: what it began with.
        device: what layouts run on.
        typed: overrides, which the commands repeat.
        more: keys that the commands set besides.
        tokens: of the whole run; None asks for none.
    """
    console, first = Console(), found.rows[0].experiment
    training = first.training
    console.print(
        f"{first.model.name} on {ResolvedLayout.of(first).world_size} x {device.name}: "
        f"{training.global_batch_size} sequences of {training.seq_len} tokens a step",
        highlight=False,
    )
    print_unwrapped(console, _table(found, tokens))
    for line in _left_out(found, tried):
        console.print(line, highlight=False, soft_wrap=True)
    console.print("\nTo launch them:", highlight=False)
    for number, row in enumerate(found.rows, 1):
        console.print(f"{number:>3}  {command_line(row.experiment, typed, more)}", highlight=False, soft_wrap=True)
    console.print(
        f"\n{found.traces} profiles traced, {found.looked_at} layouts put together from them, in {found.seconds:.0f} s",
        style="dim",
        highlight=False,
    )


def search_json(
    found: SearchResult, tried: SearchSpace, typed: Sequence[str], more: Mapping[str, Any], tokens: int | None
) -> dict[str, Any]:
    """A search for programs: bytes, seconds."""
    return {
        "layouts": [
            {
                "tokens_per_second_per_device": row.tokens_per_second,
                "step_seconds": row.step_seconds,
                "bubble": row.bubble,
                "peak_allocated_bytes": row.peak_bytes,
                "peak_pipeline_rank": row.peak_rank,
                "peak_during": row.peak_where,
                "on_front": front,
                "gpu_hours": None if tokens is None else gpu_hours(row, tokens),
                "days": None if tokens is None else days(row, tokens),
                "command": command_line(row.experiment, typed, more),
            }
            for row, front in zip(found.rows, found.front, strict=True)
        ],
        "tried": tried.tried,
        "left_out": {
            "by_rules": {example.field: count for count, example in tried.left_out},
            "not_known": dict(found.unknown),
            "state_does_not_fit": found.floor,
            "does_not_fit": found.too_large,
            "slower_than_the_last": found.slower,
        },
        "traces": found.traces,
        "seconds": found.seconds,
    }


def gpu_hours(row: LayoutCost, tokens: int) -> float:
    """Of a run of so many tokens."""
    return tokens / row.tokens_per_second / 3600


def days(row: LayoutCost, tokens: int) -> float:
    """Of a run of so many tokens."""
    return gpu_hours(row, tokens) / ResolvedLayout.of(row.experiment).world_size / 24


def steps_for(experiment: Experiment, tokens: int) -> int:
    """Optimizer steps that see so many tokens."""
    return math.ceil(tokens / (experiment.training.global_batch_size * experiment.training.seq_len))


def _table(found: SearchResult, tokens: int | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = ["", "tokens/s/GPU", "GiB", "", "replicate", "shard", "tp", "cp", "pp", "schedule", "micro", "recompute"]
    for name in [*columns, "bubble", *(["GPU-hours", "days"] if tokens else [])]:
        table.add_column(name, justify="left" if name in ("schedule", "recompute", "") else "right", no_wrap=True)
    for number, (row, front) in enumerate(zip(found.rows, found.front, strict=True), 1):
        parallelism, training = row.experiment.parallelism, row.experiment.training
        degrees = [getattr(parallelism, name) for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp")]
        cells = [
            *(number, f"{row.tokens_per_second:,.0f}", f"{row.peak_bytes / GIB:.1f}", "*" if front else "", *degrees),
            parallelism.pp_schedule if parallelism.pp > 1 else "",
            f"{ResolvedLayout.of(row.experiment).gradient_accumulation} x {training.micro_batch_size}",
            row.experiment.activation_checkpoint.mode,
            f"{row.bubble:.0%}",
            *([f"{gpu_hours(row, tokens):,.0f}", f"{days(row, tokens):,.1f}"] if tokens else []),
        ]
        table.add_row(*map(str, cells))
    return table


def _left_out(found: SearchResult, tried: SearchSpace) -> list[str]:
    broken = sum(count for count, _ in tried.left_out)
    return [
        "* no faster layout takes less memory. Times are estimates; GiB are of tensors, and fit within "
        f"{HEADROOM:.0%} of the device.",
        f"Of {tried.tried:,} layouts {broken:,} break a rule" + (":" if broken else "."),
        *(f"    {count:>6,}  {example.field}: {example.reason}, for example" for count, example in tried.left_out[:4]),
        *(
            f"  {count:,} are not known, because {reason}: titan-exp plan takes one of them;"
            for reason, count in found.unknown
        ),
        f"  {found.floor:,} do not fit, by what parameters, gradients and activations take at least, "
        f"{found.too_large:,} of {found.looked_at:,} that were looked at do not fit with all else;",
        f"  {found.slower:,} cannot be faster than the last row, by what their blocks compute, move and send at least.",
    ]
