"""Single-device microbenchmarks: matmuls, attention forward and backward, device and host copies."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from titan_exp.doctor.datasheet import bandwidth, peak_of_type
from titan_exp.doctor.measurement import MIN_CALLS, Measurement, measure_rate
from titan_exp.ops.attention.flash_attention import activate, runs_here
from titan_exp.ops.attention.sdpa import SDPA_BACKENDS, CausalAttention
from titan_exp.tracking.device_rates import peak_by_name

GEMMS = {
    "cuda": ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 4096, 14336), (16384, 2048, 8192)),
    "cpu": ((256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 1024, 4096)),
}
"""Matmul shapes (M, K, N): squares, and a feed-forward projection of an 8B and a 1B model."""
ATTENTIONS = {"cuda": (1, 32, 8, 8192, 128), "cpu": (1, 4, 2, 512, 64)}
"""Batch, query heads, KV heads, sequence length, head dimension."""
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
"""Matmul dtypes; fp8 with tensorwise scales."""


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
    """Measure causal bf16 attention, forward and backward, of every backend; FLOPs count the causal half."""
    batch, heads, kv_heads, seq, head_dim = ATTENTIONS[device.type]
    work = 2.0 * batch * heads * seq * seq * head_dim  # two matmuls, causal half
    backends = [name for name in SDPA_BACKENDS if runs_here(name, device)]
    backends += ["flex"] if device.type == "cuda" else []

    def random(heads: int) -> Tensor:
        shape = (batch, heads, seq, head_dim)
        return torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    for backend in backends:
        activate(backend, device)
        core = CausalAttention(backend)  # type: ignore[arg-type]  # one of Backend
        query, key, value = random(heads), random(kv_heads), random(kv_heads)
        name = f"{backend}, {heads} heads ({kv_heads} KV), {seq} tokens, head dim {head_dim}"
        rates = {
            f"forward {name}": (lambda core=core, q=query, k=key, v=value: core(q, k, v), 1.0),
            f"forward and backward {name}": (
                lambda core=core, q=query, k=key, v=value: core(q, k, v).sum().backward(),
                3.5,  # two matmuls forward, five backward
            ),
        }
        for full, (call, times) in rates.items():
            rate = measure_rate(
                "attention",
                full,
                call,
                amount=times * work / 1e12,
                unit="TFLOP/s",
                device=device,
                limit=limit / len(backends) / 2,
                expected=_peak(device),
            )
            yield rate
            if rate.value is None:
                break
    activate("auto", device)


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

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(DTYPES[dtype])

    left, right = random(rows, inner), random(columns, inner).t()
    if dtype != "fp8":
        return lambda: left @ right
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16)


def _peak(device: torch.device) -> float | None:
    return peak_by_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
