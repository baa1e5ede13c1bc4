"""Benchmark of linear attention: Gated DeltaNet and Kimi Delta Attention beside transformers' code and attention."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bench import Output, benchmark, in_turns, option, threads
from benchmarks.layers import device_here
from titan_exp.ops.linear_attention import LinearAttentionBackend, choose_linear_attention_backend, gated_delta


@dataclass(frozen=True)
class LinearAttentionOptions:
    seq_len: int = option(1024, "tokens of the sequence", smallest=128)
    heads: int = option(4, "heads of keys and values", smallest=1)
    width: int = option(64, "width of keys and values", smallest=16)
    seconds: float = option(2.0, "time per variant", smallest=0.0)
    threads: int = option(threads(), "threads of torch on a CPU")


@benchmark
def linear_attention(options: LinearAttentionOptions, out: Output) -> None:
    """Linear attention: head-tokens/s forward and backward, and memory kept, beside transformers' chunked code.

    A head-token is one token of one head. All variants take the same queries, keys, values, decays and strengths, in
    fp32 on a CPU and bf16 on a GPU, and turns in one process; with one thread, seconds are its CPU time. `kept` is what
    forward keeps for backward beyond its inputs. `SDPA` is causal attention with a score for every pair of tokens.
    """
    torch.set_num_threads(options.threads)
    device = device_here()
    variants = calls(options, device)
    found = in_turns(variants, 3, seconds=options.seconds * len(variants))
    count = options.seq_len * options.heads
    title = f"{options.seq_len:,} tokens, {options.heads} heads of {options.width}, {device.type}"
    form = {"forward k/s": ",.1f", "backward k/s": ",.1f", "kept, KiB per head-token": ",.2f", "rounds": ".0f"}
    table = out.table({"variant": ""} | form, title)
    for name, results in found.items():
        forward, backward, kept = (statistics.median(column) for column in zip(*results, strict=True))
        table.add(name, count / forward / 1e3, count / backward / 1e3, kept / count / 2**10, len(results))


def calls(options: LinearAttentionOptions, device: torch.device) -> dict[str, Callable[[], tuple[float, float, int]]]:
    """Variants by name."""
    backend, dtype = choose_linear_attention_backend("auto", device), torch.bfloat16 if device.type == "cuda" else None
    random = torch.Generator().manual_seed(0)
    shape = (1, options.seq_len, options.heads, options.width)
    q, k, v = (torch.randn(shape, generator=random).to(device, dtype) for _ in range(3))
    q, k = (F.normalize(x, dim=-1) for x in (q, k))
    decays = {
        name: -0.1 * torch.rand(size, generator=random).to(device)
        for name, size in (("head", shape[:3]), ("channel", shape))
    }
    beta = torch.rand(shape[:3], generator=random).to(device, dtype)
    found: dict[str, Callable[..., Tensor]] = {}
    kernels: list[LinearAttentionBackend] = ["torch", "fla"] if backend == "fla" else ["torch"]
    for kernel in kernels:
        for rule in ("Gated DeltaNet", "Kimi Delta Attention"):
            name = f"{'ours' if kernel == 'torch' else kernel}, {rule}"
            found[name] = lambda *given, kernel=kernel: gated_delta(*given, documents=None, backend=kernel)[0]
    found |= published()
    found["SDPA, causal"] = lambda q, k, v, *_: F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    )
    return {
        name: partial(run, call, [q, k, v, decays["channel" if "Kimi" in name else "head"], beta])
        for name, call in found.items()
    }


def published() -> dict[str, Callable[..., Tensor]]:
    """Chunked functions of transformers, where it has them."""
    found: dict[str, Callable[..., Tensor]] = {}
    for package, function, title in (
        ("qwen3_next", "torch_chunk_gated_delta_rule", "transformers, Gated DeltaNet"),
        ("kimi_linear", "chunk_kimi_delta_attention", "transformers, Kimi Delta Attention"),
    ):
        try:
            module: Any = __import__(f"transformers.models.{package}.modeling_{package}", fromlist=[function])
        except ImportError:
            continue
        found[title] = partial(_outputs, getattr(module, function))
    return found


def _outputs(call: Callable[..., tuple[Tensor, Any]], *given: Tensor) -> Tensor:
    return call(*given)[0]


def run(call: Callable[..., Tensor], given: list[Tensor]) -> tuple[float, float, int]:
    """Seconds of forward and of backward, and bytes that forward keeps beside its inputs."""
    inputs, saved = [x.detach().requires_grad_() for x in given], dict[int, int]()
    own = {x.untyped_storage().data_ptr() for x in inputs}
    alone = not inputs[0].is_cuda and torch.get_num_threads() == 1

    def clock() -> float:
        if inputs[0].is_cuda:
            torch.cuda.synchronize()
        return time.thread_time() if alone else time.perf_counter()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        begin = clock()
        out = call(*inputs)
        middle = clock()
    torch.autograd.grad(out, cast("Any", inputs), torch.ones_like(out), allow_unused=True)
    return middle - begin, clock() - middle, sum(saved.values())
