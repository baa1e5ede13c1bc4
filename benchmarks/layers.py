"""Layer benchmarks: a mixture of experts against a plain loop, and attention under masks; forward and backward."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bench import Output, benchmark, composed, in_turns, option, repeated, threads
from titan_exp.models.blocks.feed_forward import MoEFeedForward
from titan_exp.models.spec.lookup import model_spec
from titan_exp.ops.attention.mask_pattern import CAUSAL, MaskPattern
from titan_exp.ops.attention.sdpa import CausalAttention, choose_backend
from titan_exp.ops.moe import permutation
from titan_exp.ops.moe.permutation import permute, sort_by_expert

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
"""Heads of the attention under masks."""


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
    Case("30B-A3B with 32 experts, 8 of them, 2048 × 768", ("model=qwen3_30b_a3b", "model.moe.experts=32"), 512, 8192),
    Case("30B-A3B, 8 of 128 experts, 2048 × 768", ("model=qwen3_30b_a3b",), 0, 16384),
)
"""A case without tokens is left out."""


def device_here() -> torch.device:
    """First GPU, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class ExpertOptions:
    seconds: float = option(4.0, "time per variant of each case", smallest=0.0)
    only: str = option("", "cases whose name holds this word", smallest="laptop")
    threads: int = option(threads(), "threads of a CPU")


@benchmark
def experts(options: ExpertOptions, out: Output) -> None:
    """Mixture-of-experts layer: tokens per second, forward and backward, against the plainest loop over experts.

    The loop masks, indexes, multiplies and adds by index, one expert after the other. Ours is the model's own layer:
    rows sorted by expert, grouped matmuls, weights inside SwiGLU, sums in one order. Both have the same router, weights
    and tokens, and take turns in one process. `matmuls alone` are the layer's grouped matmuls on rows that are sorted
    already: the layer cannot be faster. With one thread, seconds are its CPU time. On CUDA, `ours, no kernels` runs
    torch's operators in place of our Triton kernels, and memory is the peak over that of weights and gradients.
    """
    torch.set_num_threads(options.threads)
    for case in CASES:
        tokens = case.cuda_tokens if torch.cuda.is_available() else case.tokens
        if tokens and options.only in case.name:
            for dtype in (torch.float32, torch.bfloat16):
                measure(case, tokens, dtype, seconds=options.seconds, out=out)


def measure(case: Case, tokens: int, dtype: torch.dtype, *, seconds: float, out: Output) -> None:
    """Time the variants of a case by turns and print their rates."""
    device = device_here()
    layer, x = build(case, tokens, dtype, device)
    calls: dict[str, Callable[[], Tensor | list[Tensor]]] = {
        "loop over experts": lambda: loop_over_experts(layer, x),
        "ours": lambda: layer(x),
        "matmuls alone": matmuls_alone(layer, x),
    }
    if device.type == "cuda":
        calls["ours, no kernels"] = lambda: layer(x)

    def turn(name: str) -> tuple[float, int | None]:
        with torch_operators(name == "ours, no kernels"):
            return run(calls[name], layer, x)

    variants = {name: partial(turn, name) for name in calls}
    warm = in_turns(variants, 1)
    found = in_turns(variants, 3, seconds=seconds * len(variants))
    form = {"tokens/s": ",.0f", "ratio": ".2f", "MiB": ",.0f"}
    title = f"{case.name}, {tokens} tokens, {str(dtype).removeprefix('torch.')}, {len(found['ours'])} rounds"
    table = out.table({"layer": ""} | form, title)
    medians = {name: statistics.median(seconds for seconds, _ in results) for name, results in found.items()}
    for name, median in medians.items():
        peak = warm[name][0][1]
        memory = None if peak is None else peak / 2**20
        table.add(name, tokens / median, medians["loop over experts"] / median, memory)


def build(case: Case, tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[MoEFeedForward, Tensor]:
    """First mixture of the case's model, and tokens [1, tokens, dim]."""
    torch.manual_seed(0)
    spec = model_spec(composed(*case.overrides).model)
    assert spec is not None, "a built-in family"
    module = MoEFeedForward(next(layer for layer in spec.layers if layer.router))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    module.router.reset_buffers()
    x = torch.randn(1, tokens, module.router.weight.shape[1], device=device, dtype=dtype, requires_grad=True)
    return module.to(device, dtype), x


def run(call: Callable[[], Tensor | list[Tensor]], layer: MoEFeedForward, x: Tensor) -> tuple[float, int | None]:
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
    return elapsed, torch.cuda.max_memory_allocated() - before - gradients if cuda else None


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


@dataclass(frozen=True)
class MaskOptions:
    seq_len: int = option(4096, "tokens of the sequence", smallest=256)
    seconds: float = option(2.0, "length of each measurement", smallest=0.0)
    threads: int = option(threads(), "threads of torch on a CPU")


@benchmark
def attention_masks(options: MaskOptions, out: Output) -> None:
    """Attention masks: tokens/s of windows, chunks, documents and sinks against causal attention, in one run.

    Forward and backward of one layer's attention alone, with the kernel that `auto` takes on this machine. `keys` is
    the mean number of visible keys of a query, whose ratio to causal attention bounds the speed-up.
    """
    torch.set_num_threads(options.threads)
    device, seq = device_here(), options.seq_len
    cases = [
        ("causal", CAUSAL, False, None),
        ("causal, sinks", CAUSAL, True, None),
        *((f"window {seq // part}", MaskPattern(window=seq // part), False, None) for part in (4, 8, 32)),
        (f"window {seq // 32}, sinks", MaskPattern(window=seq // 32), True, None),
        *((f"chunks of {seq // part}", MaskPattern(chunk=seq // part), False, None) for part in (2, 8)),
        (f"documents of {seq // 8}", CAUSAL, False, seq // 8),
    ]
    causal = 0.0
    title = f"{seq:,} tokens, {HEADS} heads of {HEAD_DIM}, {KV_HEADS} of keys, {device.type}"
    table = out.table({"mask": "", "keys": ".0f", "tokens/s": ",.0f", "ratio": ".2f"}, title)
    for name, pattern, has_sinks, document in cases:
        rate = tokens_per_second(pattern, seq, device, has_sinks=has_sinks, document=document, seconds=options.seconds)
        causal, keys = causal or rate, pattern.visible_per_query(document or seq)
        table.add(name, keys, rate, rate / causal)


def tokens_per_second(
    pattern: MaskPattern, seq: int, device: torch.device, *, has_sinks: bool, document: int | None, seconds: float
) -> float:
    """Rate of forward and backward, the mask built once; `document` is the length of documents in tokens."""
    masked, bf16 = has_sinks or not pattern.is_causal, device.type == "cuda"
    backend = choose_backend("auto", device, head_dims=[HEAD_DIM], bf16=bf16, documents=bool(document), masked=masked)
    core, dtype = CausalAttention(backend, pattern=pattern), torch.bfloat16 if bf16 else torch.float32
    shapes = [(1, heads, seq, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]
    sinks = torch.zeros(HEADS, device=device, dtype=dtype).requires_grad_() if has_sinks else None
    documents = torch.arange(seq, device=device)[None] // document if document else None
    mask = core.mask(documents, seq=seq, device=device)
    gradient = torch.randn_like(inputs[0])

    def step() -> None:
        core(inputs[0], inputs[1], inputs[2], mask, sinks).backward(gradient)
        if device.type == "cuda":
            torch.cuda.synchronize()

    step()
    times = repeated(step, seconds)
    return len(times) * seq / sum(times)
