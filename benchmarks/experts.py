"""Mixture-of-experts layer: tokens per second, forward and backward, against the plainest loop over experts.

    python benchmarks/experts.py [--seconds 4] [--only laptop] [--threads 2]

The loop masks, indexes, multiplies and adds by index, one expert after the other. Ours is the model's own layer: rows
sorted by expert, grouped matmuls, weights inside SwiGLU, sums in one order. Both have the same router, weights and
tokens, and take turns in one process. `matmuls alone` are the layer's grouped matmuls on rows that are sorted already:
the layer cannot be faster. With one thread, seconds are its CPU time. On CUDA, `ours, no kernels` runs torch's
operators in place of our Triton kernels, and memory is the peak over that of weights and gradients.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.models.blocks.feed_forward import MoEFeedForward
from titan_exp.models.spec.lookup import model_spec
from titan_exp.ops.moe import permutation
from titan_exp.ops.moe.permutation import permute, sort_by_expert


@dataclass(frozen=True)
class Case:
    """Layer and number of tokens."""

    name: str
    """Name in the table."""
    overrides: tuple[str, ...]
    """Overrides of the composed model."""
    tokens: int
    """Tokens on a CPU."""
    cuda_tokens: int
    """Tokens on a GPU."""


CASES = (
    Case("laptop, 2 of 16 experts, 192 × 256", ("model=qwen3_moe_laptop",), 4096, 65536),
    Case(
        "30B-A3B with 32 experts, 8 of them, 2048 × 768",
        ("model=qwen3_30b_a3b", "model.moe.experts=32"),
        512,
        8192,
    ),
    Case("30B-A3B, 8 of 128 experts, 2048 × 768", ("model=qwen3_30b_a3b",), 0, 16384),
)
"""A case without tokens is left out."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="time per variant of each case")
    parser.add_argument("--only", default="", help="cases whose name holds this word")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of a CPU")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    hardware = torch.cuda.get_device_name() if cuda else f"{platform.processor() or platform.machine()}"
    print(f"{hardware}, {options.threads} threads, load {os.getloadavg()[0]:.1f}; torch {torch.__version__}\n")
    for case in CASES:
        tokens = case.cuda_tokens if cuda else case.tokens
        if tokens and options.only in case.name:
            for dtype in (torch.float32, torch.bfloat16):
                measure(case, tokens, dtype, device, options.seconds)


def measure(case: Case, tokens: int, dtype: torch.dtype, device: torch.device, seconds: float) -> None:
    """Time the variants of a case by turns and print their rates."""
    layer, x = build(case, tokens, dtype, device)
    variants: dict[str, Callable[[], Tensor | list[Tensor]]] = {
        "loop over experts": lambda: loop_over_experts(layer, x),
        "ours": lambda: layer(x),
        "matmuls alone": matmuls_alone(layer, x),
    }
    if device.type == "cuda":
        variants["ours, no kernels"] = lambda: layer(x)
    times: dict[str, list[float]] = {name: [] for name in variants}
    peaks = dict.fromkeys(variants, 0)
    for name, call in variants.items():
        with torch_operators(name == "ours, no kernels"):
            peaks[name] = run(call, layer, x)[1]
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds * len(variants) or len(times["ours"]) < 3:
        for name, call in variants.items():
            with torch_operators(name == "ours, no kernels"):
                times[name].append(run(call, layer, x)[0])
    base = statistics.median(times["loop over experts"])
    print(f"{case.name}, {tokens} tokens, {str(dtype).removeprefix('torch.')}, {len(times['ours'])} rounds")
    for name, found in times.items():
        median = statistics.median(found)
        memory = f"  {peaks[name] / 2**20:9,.0f} MiB" if device.type == "cuda" else ""
        print(f"  {name:18} {tokens / median:12,.0f} tokens/s  {base / median:6.2f}×{memory}", flush=True)
    print()


def build(case: Case, tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[MoEFeedForward, Tensor]:
    """First mixture of the case's model, and tokens [1, tokens, dim]."""
    torch.manual_seed(0)
    spec = model_spec(to_experiment(compose(list(case.overrides))).model)
    assert spec is not None, "a built-in family"
    module = MoEFeedForward(next(layer for layer in spec.layers if layer.router))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    module.router.reset_buffers()
    x = torch.randn(1, tokens, module.router.weight.shape[1], device=device, dtype=dtype, requires_grad=True)
    return module.to(device, dtype), x


def run(call: Callable[[], Tensor | list[Tensor]], layer: MoEFeedForward, x: Tensor) -> tuple[float, int]:
    """Seconds of forward and backward, and on CUDA the peak of allocated bytes over those before."""
    layer.zero_grad(set_to_none=True)
    x.grad = None
    cuda = x.is_cuda
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    # One thread's time on the CPU leaves out that of others.
    clock = time.thread_time if not cuda and torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    out = call()
    outputs = [out] if isinstance(out, Tensor) else out
    torch.autograd.backward(outputs, [torch.ones_like(tensor) for tensor in outputs])
    if cuda:
        torch.cuda.synchronize()
    elapsed = clock() - begin
    gradients = sum(p.numel() * p.element_size() for p in (x, *layer.parameters()))
    return elapsed, torch.cuda.max_memory_allocated() - before - gradients if cuda else 0


def loop_over_experts(layer: MoEFeedForward, x: Tensor) -> Tensor:
    """Mixture of experts by definition."""
    routing, tokens = layer.router(x), x.flatten(0, 1)
    out = torch.zeros_like(tokens)
    # Gradients of views that are taken one by one would each be as large as all weights.
    weights = zip(layer.experts.gate_up.weight.unbind(), layer.experts.down.weight.unbind(), strict=True)
    for expert, (gate_up, down) in enumerate(weights):
        token, choice = (routing.experts == expert).nonzero(as_tuple=True)
        gate, up = F.linear(tokens[token], gate_up).chunk(2, dim=-1)
        rows = F.linear(F.silu(gate) * up, down)
        out.index_add_(0, token, (rows * routing.weights[token, choice, None]).to(out.dtype))
    return out


def matmuls_alone(layer: MoEFeedForward, x: Tensor) -> Callable[[], list[Tensor]]:
    """Grouped matmuls of the layer on sorted rows; half of the channels stand for SwiGLU's output."""
    with torch.no_grad():
        order, inverse, ends = sort_by_expert(layer.router(x).experts, layer.experts.count)
        rows = permute(x.flatten(0, 1), order, inverse)
    rows.requires_grad_()
    hidden = torch.randn(
        rows.shape[0], layer.experts.down.in_features, device=x.device, dtype=x.dtype, requires_grad=True
    )

    def call() -> list[Tensor]:
        rows.grad = hidden.grad = None
        return [layer.experts.gate_up(rows, ends), layer.experts.down(hidden, ends)]

    return call


@contextmanager
def torch_operators(chosen: bool) -> Iterator[None]:
    """Use torch's operators in place of our kernels of permutation."""
    module: Any = permutation
    original = module.runs_kernel
    try:
        if chosen:
            module.runs_kernel = lambda _: False
        yield
    finally:
        module.runs_kernel = original


if __name__ == "__main__":
    main()
