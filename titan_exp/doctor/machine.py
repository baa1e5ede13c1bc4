"""The verb `titan-exp doctor`: what this machine can do, against what its data sheet says, in about a minute."""

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from titan_exp.config.command_line.parse_options import HELP
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.doctor.compute import attention_rates, copy_rates, gemm_rates
from titan_exp.doctor.disk_and_scheduler import disk_rate, scheduler
from titan_exp.doctor.interconnect import link_rates
from titan_exp.doctor.timing import Measurement
from titan_exp.tracking.device_rates import DeviceRates, device_name, peak_by_name, write_rates
from titan_exp.trainer.rank_call import RunOnRanks

USAGE = """\
titan-exp doctor [--seconds N] [--json] [paths.runs=FOLDER] [cluster.device=cpu]
  measures what this machine can do: matmuls, attention by every backend, copies, links between its devices, the disk
  of the runs; and says which scheduler answers. What it finds is kept in .cache/doctor under paths.runs, where runs
  look for it.
    --seconds N   time for measuring, 60 without; starting processes comes on top
    --json        print what is kept, and nothing else

titan-exp doctor --numerics [RUN|FOLDER] quantization=RECIPE ...
  which layers a numeric recipe harms; titan-exp doctor --numerics --help says more.
"""

SHARES = {"gemm": 0.3, "attention": 0.25, "copy": 0.15, "link": 0.2, "disk": 0.1}
"""Of the time, by what is measured."""
SECONDS, LEAST = 60.0, 1.0
"""For measuring, where nothing else is said; and the least that may be asked for."""
LOW = 0.6
"""Share of the data sheet's number below which a rate is marked."""


def machine_command(arguments: Sequence[str], spread: RunOnRanks) -> int:
    """Run the verb; returns the exit code.

    Args:
        arguments: the words typed.
        spread: starts the ranks between which links are measured.

    Raises:
        UserError: a word is wrong, or there is no such device.
    """
    if set(arguments) & set(HELP):
        print(USAGE, end="")
        return 0
    words, seconds, as_json = _read(arguments)
    experiment = to_experiment(compose(words))
    if experiment.cluster.device == "cuda" and not torch.cuda.is_available():
        raise UserError("cluster.device=cuda: torch finds no CUDA GPU on this machine")
    on_gpu = torch.cuda.is_available() and experiment.cluster.device != "cpu"
    device, runs = torch.device("cuda", 0) if on_gpu else torch.device("cpu"), Path(experiment.paths.runs).expanduser()
    console = Console(highlight=False, stderr=as_json)
    measured = measure(device, runs, seconds, spread, console.print)
    try:
        kept = f"kept in {write_rates(runs / '.cache', measured)}"
    except OSError as error:
        kept = f"not kept: {runs} cannot be written ({error.strerror or error})"
    if as_json:
        print(json.dumps(asdict(measured), indent=1))
    else:
        console.print(_table(measured))
        for line in [*_partitions(measured), _mfu_line(device, experiment.cluster.peak_tflops, measured), kept]:
            console.print(line, markup=False, soft_wrap=True)
    return 0


def measure(
    device: torch.device, runs: Path, seconds: float, spread: RunOnRanks, say: Callable[[str], None]
) -> DeviceRates:
    """Measure everything in about `seconds`.

    Args:
        device: what trains; of several GPUs the first one, and the links between all.
        runs: folder whose disk is measured.
        seconds: for measuring.
        spread: starts ranks.
        say: takes a line about what is being done.
    """
    began = time.perf_counter()
    name, rates = device_name(device), list[Measurement]()

    def take(kind: str, found: Callable[[float], Iterable[Measurement]]) -> None:
        say(f"{kind} ({SHARES[kind] * seconds:.0f} s) ...")
        rates.extend(found(SHARES[kind] * seconds))

    take("gemm", lambda limit: gemm_rates(device, limit))
    take("attention", lambda limit: attention_rates(device, limit))
    take("copy", lambda limit: copy_rates(device, limit))
    ranks = torch.cuda.device_count() if device.type == "cuda" else min(2, len(os.sched_getaffinity(0)))
    if ranks > 1:
        take("link", lambda limit: link_rates(spread, ranks=ranks, device=device.type, limit=limit))
    take("disk", lambda limit: [disk_rate(runs, limit)])
    say(f"measured in {time.perf_counter() - began:.0f} s")
    return DeviceRates(
        device=name,
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        torch=torch.__version__,
        tflops={dtype: best for dtype in ("fp32", "bf16", "fp8") if (best := _best(rates, "gemm", dtype)) is not None},
        copy=_best(rates, "copy", "within"),
        link=_best(rates, "link", "all-reduce"),
        rates=[asdict(rate) for rate in rates],
        scheduler=scheduler(),
    )


def _read(arguments: Sequence[str]) -> tuple[list[str], float, bool]:
    words, seconds, as_json = [], SECONDS, False
    rest = iter(arguments)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag == "--seconds":
            given = value if equals else next(rest, "")
            try:
                seconds = float(given)
            except ValueError:
                seconds = 0.0
            if not LEAST <= seconds < float("inf"):
                raise UserError(f"--seconds {given}: it takes a number of seconds, at least {LEAST:g}\n{USAGE}")
        elif word == "--json":
            as_json = True
        elif equals and not word.startswith("-"):
            words.append(word)
        else:
            raise UserError(f"{word}: doctor takes no such word.\n{USAGE}")
    return words, seconds, as_json


def _best(rates: Iterable[Measurement], kind: str, beginning: str) -> float | None:
    return max(
        (it.value for it in rates if it.kind == kind and it.name.startswith(beginning) and it.value), default=None
    )


def _table(measured: DeviceRates) -> Table:
    title = f"{measured.device}, torch {measured.torch}"
    table = Table("", "what", "measured", "unit", "data sheet", "share", title=title)
    for column in (2, 4, 5):
        table.columns[column].justify = "right"
    before = ""
    for each in measured.rates:
        rate = Measurement(**each)
        share = rate.value / rate.expected if rate.value and rate.expected else None
        colour = "" if share is None else "[red]" if share < LOW else "[green]"
        value = "–" if rate.value is None else _number(rate.value)
        note = f"{rate.name} ({rate.note})" if rate.note else rate.name
        table.add_row(
            rate.kind if rate.kind != before else "",
            note.replace("[", r"\["),
            value,
            rate.unit if rate.value is not None else "",
            "" if rate.expected is None else _number(rate.expected),
            "" if share is None else f"{colour}{100 * share:.0f} %",
        )
        before = rate.kind
    return table


def _partitions(measured: DeviceRates) -> list[str]:
    if not measured.scheduler:
        return ["scheduler: no SLURM answers here, so runs start with cluster=local"]
    return ["scheduler: SLURM, so cluster=slurm submits to", *(f"  {line}" for line in measured.scheduler)]


def _mfu_line(device: torch.device, configured: float | None, measured: DeviceRates) -> str:
    if configured is not None:
        return f"MFU is over {configured:g} TFLOP/s, as cluster.peak_tflops says"
    if device.type != "cuda":
        return (
            "MFU: none is reported on a CPU unless cluster.peak_tflops is given; the note after a run uses these rates"
        )
    known = peak_by_name(device_name(device))
    if known is not None:
        return f"MFU is over {known:g} TFLOP/s, the data sheet's dense bf16 peak"
    if "bf16" in measured.tflops:
        best = measured.tflops["bf16"]
        return f"MFU is over {best:.1f} TFLOP/s, the best bf16 matmul measured here: no data sheet is known"
    return "MFU: no peak is known; give cluster.peak_tflops"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.3g}"
