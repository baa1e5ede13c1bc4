"""Rates of one device by itself: matmuls, attention forward and backward, copies within it and to the host."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from titan_exp.doctor.datasheet import bandwidth, peak_of_type
from titan_exp.doctor.timing import Measurement, measure_rate
from titan_exp.ops.attention.flash_attention import activate, runs_here
from titan_exp.ops.attention.sdpa import SDPA_BACKENDS, CausalAttention
from titan_exp.tracking.device_rates import peak_by_name

GEMMS = {
    "cuda": ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 4096, 14336), (16384, 2048, 8192)),
    "cpu": ((256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 1024, 4096)),
}
"""Rows, contracted and columns of matmuls: squares, and a feed-forward projection of an 8B and a 1B model."""
ATTENTIONS = {"cuda": (1, 32, 8, 8192, 128), "cpu": (1, 4, 2, 512, 64)}
"""Batch, query heads, key heads, sequence, channels of a head."""
COPIED = {"cuda": 2**30, "cpu": 2**27}
"""Bytes of a copy."""
LEAST = 4
"""Calls that measuring makes at least, the first one included."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
"""What is multiplied; fp8 with one scale for each matrix."""


def gemm_rates(device: torch.device, limit: float) -> Iterator[Measurement]:
    """Matmuls in every type at every shape, in `limit` seconds; what a shape would overrun is left out, in words."""
    shapes = GEMMS[device.type]
    each = limit / len(shapes) / len(DTYPES)
    for dtype in DTYPES:
        usual = 0.0
        for rows, inner, columns in shapes:
            name, work = f"{dtype} {rows}×{inner}×{columns}", 2.0 * rows * inner * columns
            # A larger shape is quicker per operation, by how much is not known.
            if usual and LEAST * work / usual > 16 * each:
                yield Measurement("gemm", name, None, "TFLOP/s", note="left out: it would take too long")
                continue
            rate = measure_rate(
                "gemm",
                name,
                _gemm(dtype, rows, inner, columns, device),
                amount=work / 1e12,
                unit="TFLOP/s",
                device=device,
                limit=each,
                expected=peak_of_type(_peak(device), dtype, _capability(device)),
            )
            usual = 1e12 * (rate.value or 0.0)
            yield rate


def attention_rates(device: torch.device, limit: float) -> Iterator[Measurement]:
    """Causal attention in bf16, forward and backward, by every backend; the FLOPs are those of the causal half."""
    batch, heads, kv_heads, seq, channels = ATTENTIONS[device.type]
    work = 2.0 * batch * heads * seq * seq * channels  # two matmuls, of which the causal half
    backends = [name for name in SDPA_BACKENDS if runs_here(name, device)]
    backends += ["flex"] if device.type == "cuda" else []

    def made(count: int) -> Tensor:
        shape = (batch, count, seq, channels)
        return torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    for backend in backends:
        activate(backend, device)
        core = CausalAttention(backend)  # type: ignore[arg-type]  # one of Backend
        query, key, value = made(heads), made(kv_heads), made(kv_heads)
        name = f"{backend}, {heads} heads ({kv_heads} of keys), {seq} tokens, {channels} channels"
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
    """Copies within the device, counted as read and written, and between it and the host."""
    size = COPIED[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    yield measure_rate(
        "copy",
        f"within the {'device' if device.type == 'cuda' else 'memory'}, read and written",
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
        there = torch.empty(size // 4, dtype=torch.uint8, device=device)
        how = "pinned" if pinned else "pageable"
        calls: dict[str, Callable[[], object]] = {
            "to the device": lambda host=host, there=there: there.copy_(host, non_blocking=True),
            "to the host": lambda host=host, there=there: host.copy_(there, non_blocking=True),
        }
        for way, call in calls.items():
            full = f"{way}, {how} memory"
            yield measure_rate("host copy", full, call, amount=size / 4e9, unit="GB/s", device=device, limit=limit / 6)


def _gemm(dtype: str, rows: int, inner: int, columns: int, device: torch.device) -> Callable[[], object]:
    """A product of random matrices, the second one laid out as the weight of a linear layer."""

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(DTYPES[dtype])

    left, right = made(rows, inner), made(columns, inner).t()
    if dtype != "fp8":
        return lambda: left @ right
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16)


def _peak(device: torch.device) -> float | None:
    return peak_by_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
