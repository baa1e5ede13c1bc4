"""`titan-exp doctor`: microbenchmarks this machine and compares it with data sheets, in about a minute."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import torch
from annotated_types import Interval
from rich.table import Table

from titan_exp.config.command_line.options import take_options
from titan_exp.config.command_line.output import answer
from titan_exp.config.command_line.terminal import Terminal
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.doctor import microbenchmarks as bench
from titan_exp.doctor import usage
from titan_exp.tracking.throughput import DeviceRates, device_name, peak_by_name, write_rates
from titan_exp.trainer.distributed import RunOnRanks, require_usable_cuda

SHARES = {"gemm": 0.3, "attention": 0.25, "copy": 0.12, "launch": 0.03, "link": 0.2, "disk": 0.1}
"""Fraction of the measuring time by kind."""
LOW_SHARE = 0.6  # fraction of the data-sheet rate below which a measurement is highlighted


@dataclass(frozen=True)
class DoctorOptions:
    """Options of `titan-exp doctor`."""

    seconds: Annotated[float, Interval(ge=1, le=86400)] = 60.0
    """Measuring time in seconds, without the start of processes."""
    json: bool = False
    """Print only the saved results."""


def machine_command(arguments: Sequence[str], run_on_ranks: RunOnRanks) -> int:
    """Run `titan-exp doctor`; returns the exit code. Raises UserError about an invalid argument or a missing device."""
    options, overrides = take_options(DoctorOptions, arguments)
    if wrong := [word for word in overrides if "=" not in word]:
        raise UserError(f"{wrong[0]}: there is no such argument.\n{usage()}")
    experiment = to_experiment(compose(overrides))
    if experiment.cluster.device == "cuda" and not torch.cuda.is_available():
        raise UserError("cluster.device=cuda: torch finds no CUDA GPU on this machine. Use cluster.device=cpu.")
    if experiment.cluster.device == "auto" and not torch.cuda.is_available():
        require_usable_cuda()
    on_gpu = torch.cuda.is_available() and experiment.cluster.device != "cpu"
    device, runs = torch.device("cuda", 0) if on_gpu else torch.device("cpu"), Path(experiment.paths.runs).expanduser()
    console = Terminal(markup=True, stderr=options.json)
    measured = measure(device, runs, options.seconds, run_on_ranks, console.print)
    try:
        saved = f"saved in {write_rates(runs / '.cache', measured)}"
    except OSError as error:
        saved = f"not saved, since we cannot write to {runs} ({error.strerror or error})"
    if options.json:
        answer(asdict(measured))
    else:
        console.print(_table(measured))
        partitions = ["scheduler: no SLURM found, so start runs with cluster=local"]
        if measured.scheduler:
            partitions = [
                "scheduler: SLURM, and cluster=slurm submits to",
                *(f"  {line}" for line in measured.scheduler),
            ]
        for line in [*partitions, _mfu_line(device, experiment.cluster.peak_tflops, measured), saved]:
            console.print(line, markup=False, soft_wrap=True)
    return 0


def measure(
    device: torch.device, runs: Path, seconds: float, run_on_ranks: RunOnRanks, report: Callable[[str], None]
) -> DeviceRates:
    """Measure a device (the first GPU), the links between all devices and the disk of `runs`, in about `seconds`.
    `report` receives progress lines."""
    start = time.perf_counter()
    rates = list[bench.Measurement]()

    def take(kind: str, measurements: Callable[[float], Iterable[bench.Measurement]]) -> None:
        report(f"{kind} ({SHARES[kind] * seconds:.0f} s) ...")
        rates.extend(measurements(SHARES[kind] * seconds))

    take("gemm", lambda limit: bench.gemm_rates(device, limit))
    take("attention", lambda limit: bench.attention_rates(device, limit))
    take("copy", lambda limit: bench.copy_rates(device, limit))
    take("launch", lambda limit: [bench.launch_rate(device, limit)])
    if device.type == "cuda":
        rates.append(bench.context_memory(device))
    ranks = torch.cuda.device_count() if device.type == "cuda" else min(2, len(os.sched_getaffinity(0)))
    if ranks > 1:
        take("link", lambda limit: bench.link_rates(run_on_ranks, ranks=ranks, device=device.type, limit=limit))
    take("disk", lambda limit: [bench.disk_rate(runs, limit)])
    report(f"done in {time.perf_counter() - start:.0f} s")
    return DeviceRates(
        device=device_name(device),
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        torch=torch.__version__,
        tflops={dtype: best for dtype in bench.DTYPES if (best := _best(rates, "gemm", f"{dtype} ")) is not None},
        attention=_attention(rates),
        copy=_best(rates, "copy", "within"),
        link=_best(rates, "link", "all-reduce"),
        message_us=_microseconds(rates, "link", f"all-reduce of {bench.SIZES[device.type][0] / 2**10:g} KiB"),
        launch_us=_microseconds(rates, "launch", ""),
        context_gib=_best(rates, "memory", "CUDA"),
        communicator_gib=_best(rates, "memory", "buffers"),
        rates=[asdict(rate) for rate in rates],
        scheduler=bench.scheduler(),
    )


def _best(rates: Iterable[bench.Measurement], kind: str, prefix: str) -> float | None:
    values = [rate.value for rate in rates if rate.kind == kind and rate.name.startswith(prefix) and rate.value]
    return max(values, default=None)


def _microseconds(rates: Iterable[bench.Measurement], kind: str, prefix: str) -> float | None:
    found = [rate.seconds for rate in rates if rate.kind == kind and rate.name.startswith(prefix) and rate.seconds]
    return 1e6 * min(found) if found else None


def _attention(rates: Iterable[bench.Measurement]) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    for rate in rates:
        if rate.kind == "attention" and rate.value is not None:
            backend, size = rate.name.partition(",")[0].split()[-1], rate.name.rpartition(" ")[2]
            found.setdefault(backend, {}).setdefault(size, []).append(rate.value)
    return {
        backend: {size: values for size, values in by_size.items() if len(values) == 2}
        for backend, by_size in found.items()
    }


def _table(measured: DeviceRates) -> Table:
    title = f"{measured.device}, torch {measured.torch}"
    table = Table("", "measurement", "measured", "unit", "data sheet", "share", title=title)
    for column in (2, 4, 5):
        table.columns[column].justify = "right"
    previous = ""
    for row in measured.rates:
        rate = bench.Measurement(**row)
        share = rate.value / rate.expected if rate.value and rate.expected else None
        colour = "" if share is None else "[red]" if share < LOW_SHARE else "[green]"
        note = f"{rate.name} ({rate.note})" if rate.note else rate.name
        table.add_row(
            rate.kind if rate.kind != previous else "",
            note.replace("[", r"\["),
            "–" if rate.value is None else _number(rate.value),
            rate.unit if rate.value is not None else "",
            "" if rate.expected is None else _number(rate.expected),
            "" if share is None else f"{colour}{100 * share:.0f} %",
        )
        previous = rate.kind
    return table


def _mfu_line(device: torch.device, configured: float | None, measured: DeviceRates) -> str:
    if configured is not None:
        return f"MFU is relative to {configured:g} TFLOP/s (cluster.peak_tflops)"
    if device.type != "cuda":
        return "MFU: a CPU has none unless you set cluster.peak_tflops (the note after a run uses the rates above)"
    known = peak_by_name(device_name(device))
    if known is not None:
        return f"MFU is relative to {known:g} TFLOP/s, the dense bf16 peak of the data sheet"
    if "bf16" in measured.tflops:
        best = measured.tflops["bf16"]
        return f"MFU is relative to {best:.1f} TFLOP/s, the best bf16 matmul measured here (we know no data sheet)"
    return "MFU: we know no peak, so set cluster.peak_tflops"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.3g}"
