"""Microbenchmarks: matmuls, attention, copies, launches, collectives and the disk, compared with data sheets."""

import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan_exp.config.devices import command_lines
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.ops.attention.sdpa import SDPA_BACKENDS, CausalAttention, activate, runs_here
from titan_exp.tracking.run_folder.run import Run
from titan_exp.tracking.throughput import peak_by_name
from titan_exp.trainer.distributed import RunOnRanks, serve

MIN_CALLS, MAX_CALLS = 3, 50  # minimum and maximum number of samples
SAMPLE_SECONDS = 0.05
"""Seconds of a sample on a GPU: calls without a pause between them, at the clock that its power limit sustains."""
GEMMS = {
    "cuda": ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 4096, 14336), (16384, 2048, 8192)),
    "cpu": ((256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 1024, 4096)),
}
"""Matmul shapes (M, K, N): squares, and a feed-forward projection of an 8B and a 1B model."""
ATTENTIONS = {"cuda": ((1, 32, 8, 8192, 128), (1, 32, 8, 8192, 64)), "cpu": ((1, 4, 2, 512, 64),)}
"""Batch, query heads, KV heads, sequence length, head dimension."""
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
FLOAT8 = ("float8_tensorwise", "float8_rowwise", "mxfp8")
DTYPES = ("fp32", "bf16", *FLOAT8)  # matmul dtypes, and recipes of float8 matmuls
MX_BLOCK, MX_TILE = 32, (128, 4)
"""Elements of a row that share an MXFP8 scale, and the rows and columns to which cuBLAS pads scales."""
OPERATORS = 1000  # operators launched by one call of the launch benchmark
SIZES = {"cuda": (2**12, 2**20, 2**24, 2**28), "cpu": (2**10, 2**16, 2**20, 2**24)}
"""Message sizes in bytes: all-reduce input, all-gather output. The smallest shows the latency."""
BLOCK_BYTES, MAX_BYTES = 2**24, 2**32  # bytes per write, and in total

# Memory bandwidth in GB/s (10⁹ bytes) by torch device name, from the data sheets listed in
# `tracking.throughput.PEAK_TFLOPS`. The whole name must match.
BANDWIDTHS: tuple[tuple[str, float], ...] = (
    (r"(NVIDIA )?A100-SXM4-40GB", 1555.0),
    (r"(NVIDIA )?A100-SXM4-80GB", 2039.0),
    (r"(NVIDIA )?A100(-PCIE-40GB| 40GB PCIe)", 1555.0),
    (r"(NVIDIA )?A100 80GB PCIe", 1935.0),
    (r"NVIDIA H100 80GB HBM3", 3350.0),
    (r"NVIDIA H100 PCIe", 2000.0),
    (r"NVIDIA H100 NVL", 3900.0),
    (r"NVIDIA H800", 3350.0),
    (r"NVIDIA H200( NVL)?", 4800.0),
    (r"NVIDIA H20", 4000.0),
    (r"NVIDIA (B200|GB200)", 8000.0),
    (r"NVIDIA L40S?", 864.0),
    (r"NVIDIA L4", 300.0),
    (r"NVIDIA A10", 600.0),
    (r"NVIDIA A40", 696.0),
    (r"NVIDIA RTX A6000", 768.0),
    (r"NVIDIA RTX 6000 Ada Generation", 960.0),
    (r"NVIDIA GeForce RTX 3090", 936.0),
    (r"NVIDIA GeForce RTX 4090", 1008.0),
    (r"NVIDIA GeForce RTX 5090", 1792.0),
    (r"AMD Instinct MI300[AX]", 5300.0),
    (r"AMD Instinct MI325X", 6000.0),
)


@dataclass(frozen=True)
class Measurement:
    """Measured rate, or the reason why it could not be measured."""

    kind: str  # `gemm`, `attention`, `copy`, `host copy`, `launch`, `memory`, `link` or `disk`
    name: str
    value: float | None  # median rate in `unit`; None if it cannot be measured on this machine
    unit: str  # `TFLOP/s`, `GB/s` with 10⁹ bytes, `M/s` (10⁶) or `GiB`
    seconds: float | None = None
    expected: float | None = None
    note: str = ""  # reason for a missing value, or a remark


def measure_rate(
    kind: str,
    name: str,
    call: Callable[[], object],
    *,
    amount: float,
    unit: str,
    device: torch.device,
    limit: float,
    expected: float | None = None,
) -> Measurement:
    """Measure the rate of a call that does `amount` of work (TFLOP or GB), for about `limit` seconds."""
    try:
        seconds = median_seconds(call, device, limit)
    except (RuntimeError, NotImplementedError, ValueError, ImportError, TypeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].partition(". ")[0]
        return Measurement(kind, name, None, unit, note=f"not supported here: {reason[:80]}")
    return Measurement(kind, name, amount / seconds, unit, seconds, expected)


def median_seconds(
    call: Callable[[], object], device: torch.device, limit: float, agree: Callable[[int], int] = lambda calls: calls
) -> float:
    """Median seconds per call of samples that end with a synchronization, after one warm-up call. The first timed call
    determines the size and number of samples; `agree` makes them equal on all ranks if the call is a collective."""

    def timed(calls: int = 1) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) / calls

    timed()
    first = timed()
    calls = agree(max(1, int(SAMPLE_SECONDS / max(first, 1e-6)))) if device.type == "cuda" else 1
    samples = agree(min(MAX_CALLS, max(MIN_CALLS, int(limit / calls / max(first, 1e-6)))))
    return statistics.median([first if calls == 1 else timed(calls), *(timed(calls) for _ in range(samples - 1))])


def gemm_rates(device: torch.device, limit: float) -> Iterator[Measurement]:
    """Measure matmuls of every dtype and shape in `limit` seconds; skips shapes that would take too long."""
    shapes = GEMMS[device.type]
    call_limit = limit / len(shapes) / len(DTYPES)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    for dtype in DTYPES:
        previous, expected = 0.0, peak_of_type(_peak(device), dtype, capability)
        common: dict[str, Any] = {"unit": "TFLOP/s", "device": device, "limit": call_limit, "expected": expected}
        for rows, inner, columns in shapes:
            name, work = f"{dtype} {rows}×{inner}×{columns}", 2.0 * rows * inner * columns
            # Larger shapes reach a higher FLOP rate, by an unknown factor.
            if previous and (1 + MIN_CALLS) * work / previous > 16 * call_limit:
                yield Measurement("gemm", name, None, "TFLOP/s", note="skipped: too slow")
                continue
            multiply = _gemm(dtype, rows, inner, columns, device)
            rate = measure_rate("gemm", name, multiply, amount=work / 1e12, **common)
            previous = 1e12 * (rate.value or 0.0)
            yield rate


def attention_rates(device: torch.device, limit: float) -> Iterator[Measurement]:
    """Measure causal bf16 attention of every backend and head size, both ways; FLOPs count the causal half."""
    backends = [name for name in SDPA_BACKENDS if runs_here(name, device)]
    backends += ["flex"] if device.type == "cuda" else []
    shapes = ATTENTIONS[device.type]
    for backend in backends:
        activate(backend, device)
        for shape in shapes:
            yield from _attention_rates(backend, shape, device, limit / len(backends) / len(shapes))
    activate("auto", device)


def _attention_rates(
    backend: str, shape: tuple[int, int, int, int, int], device: torch.device, limit: float
) -> Iterator[Measurement]:
    batch, heads, kv_heads, seq, head_dim = shape
    work = 2.0 * batch * heads * seq * seq * head_dim / 1e12  # two matmuls, causal half

    def random(heads: int) -> torch.Tensor:
        size = (batch, heads, seq, head_dim)
        return torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True)

    core = CausalAttention(backend)  # type: ignore[arg-type]  # one of Backend
    inputs, gradient = (random(heads), random(kv_heads), random(kv_heads)), random(heads).detach()
    name = f"{backend}, {heads} heads ({kv_heads} KV), {seq} tokens, head dim {head_dim}"
    common: dict[str, Any] = {"unit": "TFLOP/s", "device": device, "limit": limit / 2, "expected": _peak(device)}
    forward = measure_rate("attention", f"forward {name}", lambda: core(*inputs), amount=work, **common)
    yield forward
    if forward.seconds is None:
        return
    # Two matmuls forward, five backward.
    both = measure_rate(
        "attention",
        f"backward {name}",
        lambda: torch.autograd.grad(core(*inputs), inputs, gradient),
        amount=2.5 * work,
        **common,
    )
    if both.seconds is not None:
        seconds = max(both.seconds - forward.seconds, 1e-9)
        both = replace(both, value=2.5 * work / seconds, seconds=seconds, note="both passes less forward")
    yield both


def launch_rate(device: torch.device, limit: float) -> Measurement:
    """Measure the host time of an eager operator with autograd on a single number, which takes little beside it."""
    number = torch.ones((), device=device, requires_grad=True)

    def launch() -> None:
        value = number
        for _ in range(OPERATORS):
            value = value + number

    name = "eager operators with autograd, host time"
    rate = measure_rate("launch", name, launch, amount=OPERATORS / 1e6, unit="M/s", device=device, limit=limit)
    return rate if rate.seconds is None else replace(rate, seconds=rate.seconds / OPERATORS)


def context_memory(device: torch.device) -> Measurement:
    """Measure the memory of the CUDA context, with kernels' code that ran, and of other processes."""
    free, total = torch.cuda.mem_get_info(device)
    size = (total - free - torch.cuda.memory_reserved(device)) / 2**30
    return Measurement("memory", "CUDA context, and other processes", size, "GiB")


def copy_rates(device: torch.device, limit: float) -> Iterator[Measurement]:
    """Measure copies within the device (read plus write) and between device and host."""
    size = COPY_BYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    on_gpu, common = device.type == "cuda", {"unit": "GB/s", "device": device}
    known = bandwidth(torch.cuda.get_device_name(device)) if on_gpu else None
    within = f"within the {'device' if on_gpu else 'memory'}, read plus write"
    options: dict[str, Any] = {"amount": 2 * size / 1e9, "limit": limit / 3, "expected": known, **common}
    yield measure_rate("copy", within, lambda: target.copy_(source), **options)
    if not on_gpu:
        return
    for pinned in (True, False):
        host = torch.ones(size // 4, dtype=torch.uint8, pin_memory=pinned)
        remote = torch.empty(size // 4, dtype=torch.uint8, device=device)
        how = "pinned" if pinned else "pageable"
        calls: dict[str, Callable[[], object]] = {
            "to the device": lambda host=host, remote=remote: remote.copy_(host, non_blocking=True),
            "to the host": lambda host=host, remote=remote: host.copy_(remote, non_blocking=True),
        }
        for way, call in calls.items():
            yield measure_rate("host copy", f"{way}, {how} memory", call, **common, amount=size / 4e9, limit=limit / 6)


def _gemm(dtype: str, rows: int, inner: int, columns: int, device: torch.device) -> Callable[[], object]:
    """Matmul of random matrices; the second has the layout of a linear weight."""
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(kinds.get(dtype, torch.float8_e4m3fn))

    left, right = random(rows, inner), random(columns, inner).t()
    if dtype not in FLOAT8:
        return lambda: left @ right
    if dtype == "mxfp8":
        # A scale of one for every block, in cuBLAS's padded size.
        height, width = MX_TILE
        blocks = -(-inner // MX_BLOCK // width) * width
        counts = (-(-size // height) * height * blocks for size in (rows, columns))
        scales = [torch.ones(count, device=device).to(torch.float8_e8m0fnu) for count in counts]
    elif dtype == "float8_rowwise":
        scales = [torch.ones(shape, device=device) for shape in ((rows, 1), (1, columns))]
    else:
        scales = [torch.ones((), device=device)] * 2
    fast = {"use_fast_accum": True} if dtype != "mxfp8" else {}
    return lambda: torch._scaled_mm(left, right, *scales, out_dtype=torch.bfloat16, **fast)


def _peak(device: torch.device) -> float | None:
    return peak_by_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def link_rates(run_on_ranks: RunOnRanks, *, ranks: int, device: str, limit: float) -> list[Measurement]:
    """Measure collectives between all devices, one rank each, for `limit` seconds without start-up."""
    layout = [f"parallelism.dp_shard={ranks}", f"training.global_batch_size={ranks}", f"cluster.device={device}"]
    # No training step runs, so a hang is killed after three times hang_kill_minutes.
    layout += ["cluster.hang_warn_minutes=null", "cluster.hang_kill_minutes=1"]
    experiment = resolve_layout(to_experiment(compose([*layout, "model=llama_debug"])), ranks)
    try:
        return [Measurement(**row) for row in run_on_ranks(f"{__name__}.rank_main", experiment, {"limit": limit})]
    except (RuntimeError, UserError) as error:
        last = (str(error).strip() or type(error).__name__).splitlines()[-1]
        return [Measurement("link", f"between {ranks} {device} devices", None, "GB/s", note=f"failed: {last[:200]}")]


def rank_main(run: Run) -> None:
    """Entry point of one rank."""
    serve(run, _measure)


def _measure(_: object, request: Any, device: torch.device) -> list[dict[str, Any]]:

    def of_rank_0(calls: int) -> int:
        shared = torch.tensor(calls)
        dist.broadcast(shared, 0)
        return int(shared)

    ranks, found = dist.get_world_size(), []
    backend = "NCCL" if device.type == "cuda" else "gloo"
    limit = float(request["limit"]) / len(SIZES[device.type]) / 2
    if device.type == "cuda":
        found.append(asdict(_communicator_memory(device)))
    for size in SIZES[device.type]:
        part = torch.ones(size // 4 // ranks, device=device)
        whole = torch.ones(part.numel() * ranks, device=device)
        # Bus bandwidth as in nccl-tests: the bytes that a ring algorithm sends from every rank.
        moved = (ranks - 1) / ranks * whole.numel() * 4 / 1e9
        for name, call, times in (
            ("all-reduce", lambda whole=whole: dist.all_reduce(whole), 2),
            ("all-gather", lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part), 1),
        ):
            seconds = median_seconds(call, device, limit, of_rank_0)
            full = f"{name} of {size / 2**10:g} KiB, {ranks} ranks, {backend}, bus bandwidth"
            found.append(asdict(Measurement("link", full, times * moved / seconds, "GB/s", seconds)))
    return found


def _communicator_memory(device: torch.device) -> Measurement:
    """Memory that a new process group takes on this rank's device with its first collective."""
    group, part = dist.new_group(), torch.ones(1, device=device)
    torch.cuda.synchronize(device)
    before, _ = torch.cuda.mem_get_info(device)
    dist.all_reduce(part, group=group)
    torch.cuda.synchronize(device)
    after, _ = torch.cuda.mem_get_info(device)
    dist.destroy_process_group(group)  # type: ignore[arg-type]  # every rank is a member
    return Measurement("memory", "buffers of one process group", max(0, before - after) / 2**30, "GiB")


def disk_rate(folder: Path, limit: float) -> Measurement:
    """Measure synced writes to a temporary file in `folder` for `limit` seconds."""
    name = f"write to {folder}"
    path = folder / f".doctor.{os.getpid()}.tmp"
    block, written = os.urandom(BLOCK_BYTES), 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            begin = time.perf_counter()
            with path.open("wb", buffering=0) as file:
                while written < MAX_BYTES and time.perf_counter() - begin < limit / 2:
                    written += file.write(block)
                    # Measure the disk, not the page cache.
                    os.fsync(file.fileno())
            seconds = time.perf_counter() - begin
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        return Measurement("disk", name, None, "GB/s", note=f"not writable: {error.strerror or error}")
    return Measurement("disk", name, written / 1e9 / seconds, "GB/s", seconds, note="one file, fsync every 16 MiB")


def scheduler() -> list[str]:
    """SLURM partitions as `name: state, nodes, generic resources`; empty without SLURM."""
    return command_lines("sinfo", "--noheader", "--format=%P: %a, %D nodes, %G, at most %l")


def bandwidth(name: str) -> float | None:
    """Memory bandwidth in GB/s by torch device name; None if unknown."""
    return next((rate for pattern, rate in BANDWIDTHS if re.fullmatch(pattern, name)), None)


def peak_of_type(bf16: float | None, dtype: str, capability: tuple[int, int]) -> float | None:
    """Dense matmul peak in TFLOP/s of `bf16` or a float8 recipe from the bf16 peak; None for fp32. Tensor cores with
    fp8 (compute capability 8.9 and later) run it at twice their bf16 rate."""
    if bf16 is None or dtype == "fp32" or ("8" in dtype and capability < (8, 9)):
        return None
    return 2 * bf16 if "8" in dtype else bf16
