"""Single-device microbenchmarks: matmuls, attention forward and backward, copies, operator launches, CUDA context."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from titan_exp.doctor.datasheet import bandwidth, peak_of_type
from titan_exp.doctor.measurement import MIN_CALLS, Measurement, measure_rate
from titan_exp.ops.attention.sdpa import SDPA_BACKENDS, CausalAttention, activate, runs_here
from titan_exp.tracking.device_rates import peak_by_name

GEMMS = {
    "cuda": ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 4096, 14336), (16384, 2048, 8192)),
    "cpu": ((256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 1024, 4096)),
}
"""Matmul shapes (M, K, N): squares, and a feed-forward projection of an 8B and a 1B model."""
ATTENTIONS = {"cuda": ((1, 32, 8, 8192, 128), (1, 32, 8, 8192, 64)), "cpu": ((1, 4, 2, 512, 64),)}
"""Batch, query heads, KV heads, sequence length, head dimension."""
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
FLOAT8 = ("float8_tensorwise", "float8_rowwise", "mxfp8")
DTYPES = ("fp32", "bf16", *FLOAT8)
"""Matmul dtypes, and recipes of float8 matmuls."""
MX_BLOCK, MX_TILE = 32, (128, 4)
"""Elements of a row that share an MXFP8 scale; rows and columns of scales to which cuBLAS pads."""
OPERATORS = 1000
"""Operators launched by one call of the launch benchmark."""


def gemm_rates(device: torch.device, limit: float) -> Iterator[Measurement]:
    """Measure matmuls of every dtype and shape in `limit` seconds; skips shapes that would take too long."""
    shapes = GEMMS[device.type]
    call_limit = limit / len(shapes) / len(DTYPES)
    for dtype in DTYPES:
        previous = 0.0
        for rows, inner, columns in shapes:
            name, work = f"{dtype} {rows}×{inner}×{columns}", 2.0 * rows * inner * columns
            # Larger shapes reach a higher FLOP rate, by an unknown factor.
            if previous and (1 + MIN_CALLS) * work / previous > 16 * call_limit:
                yield Measurement("gemm", name, None, "TFLOP/s", note="skipped: too slow")
                continue
            rate = measure_rate(
                "gemm",
                name,
                _gemm(dtype, rows, inner, columns, device),
                amount=work / 1e12,
                unit="TFLOP/s",
                device=device,
                limit=call_limit,
                expected=peak_of_type(_peak(device), dtype, _capability(device)),
            )
            previous = 1e12 * (rate.value or 0.0)
            yield rate


def attention_rates(device: torch.device, limit: float) -> Iterator[Measurement]:
    """Measure causal bf16 attention, forward and backward, of every backend and head size; FLOPs count the causal
    half."""
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

    def random(heads: int) -> Tensor:
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
    if both.seconds is None:
        yield both
        return
    seconds = max(both.seconds - forward.seconds, 1e-9)
    yield replace(both, value=2.5 * work / seconds, seconds=seconds, note="both passes less forward")


def launch_rate(device: torch.device, limit: float) -> Measurement:
    """Measure the host time of an eager operator on one number, with autograd: far less work than its launch."""
    number = torch.ones((), device=device, requires_grad=True)

    def launch() -> None:
        value = number
        for _ in range(OPERATORS):
            value = value + number

    name = "eager operators with autograd, host time"
    rate = measure_rate("launch", name, launch, amount=OPERATORS / 1e6, unit="M/s", device=device, limit=limit)
    return rate if rate.seconds is None else replace(rate, seconds=rate.seconds / OPERATORS)


def context_memory(device: torch.device) -> Measurement:
    """Measure the memory of the CUDA context, with the code of kernels that ran; other processes' memory counts too."""
    free, total = torch.cuda.mem_get_info(device)
    size = (total - free - torch.cuda.memory_reserved(device)) / 2**30
    return Measurement("memory", "CUDA context, and other processes", size, "GiB")


def copy_rates(device: torch.device, limit: float) -> Iterator[Measurement]:
    """Measure copies within the device (read plus write) and between device and host."""
    size = COPY_BYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    yield measure_rate(
        "copy",
        f"within the {'device' if device.type == 'cuda' else 'memory'}, read plus write",
        lambda: target.copy_(source),
        amount=2 * size / 1e9,
        unit="GB/s",
        device=device,
        limit=limit / 3,
        expected=bandwidth(name),
    )
    if device.type != "cuda":
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
            full = f"{way}, {how} memory"
            yield measure_rate("host copy", full, call, amount=size / 4e9, unit="GB/s", device=device, limit=limit / 6)


def _gemm(dtype: str, rows: int, inner: int, columns: int, device: torch.device) -> Callable[[], object]:
    """Matmul of random matrices, the second in the layout of a linear weight."""
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(kinds.get(dtype, torch.float8_e4m3fn))

    left, right = random(rows, inner), random(columns, inner).t()
    if dtype not in FLOAT8:
        return lambda: left @ right
    if dtype == "mxfp8":
        scales = [_mx_scales(size, inner, device) for size in (rows, columns)]
    elif dtype == "float8_rowwise":
        scales = [torch.ones(shape, device=device) for shape in ((rows, 1), (1, columns))]
    else:
        scales = [torch.ones((), device=device)] * 2
    fast = {"use_fast_accum": True} if dtype != "mxfp8" else {}
    return lambda: torch._scaled_mm(left, right, *scales, out_dtype=torch.bfloat16, **fast)


def _mx_scales(rows: int, inner: int, device: torch.device) -> Tensor:
    """Scales of one for every block, in cuBLAS's padded size."""
    height, width = (-(-size // tile) * tile for size, tile in zip((rows, inner // MX_BLOCK), MX_TILE, strict=True))
    return torch.ones(height * width, device=device).to(torch.float8_e8m0fnu)


def _peak(device: torch.device) -> float | None:
    return peak_by_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
