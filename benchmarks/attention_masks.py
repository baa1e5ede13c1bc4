"""Attention mask benchmark: tokens/s of windows, chunks, documents and sinks against causal attention, in one run.

    python benchmarks/attention_masks.py [--seq-len 4096] [--seconds 2] [--threads 2]

Forward and backward of one layer's attention alone, with the kernel that `auto` takes on this machine. `keys` is the
mean number of visible keys of a query, whose ratio to causal attention bounds the speed-up.
"""

import argparse
import os
import platform
import time

import torch

from titan_exp.ops.attention.mask_pattern import CAUSAL, MaskPattern
from titan_exp.ops.attention.sdpa import CausalAttention, choose_backend

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens of the sequence")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measurement")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch on a CPU")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seq = arguments.seq_len
    print(f"{platform.machine()}, {os.cpu_count()} cores, {arguments.threads} threads, {device.type}", end="; ")
    print(f"torch {torch.__version__}; {seq:,} tokens, {HEADS} heads of {HEAD_DIM}, {KV_HEADS} of keys")
    cases = [
        ("causal", CAUSAL, False, None),
        ("causal, sinks", CAUSAL, True, None),
        *((f"window {seq // part}", MaskPattern(window=seq // part), False, None) for part in (4, 8, 32)),
        (f"window {seq // 32}, sinks", MaskPattern(window=seq // 32), True, None),
        *((f"chunks of {seq // part}", MaskPattern(chunk=seq // part), False, None) for part in (2, 8)),
        (f"documents of {seq // 8}", CAUSAL, False, seq // 8),
    ]
    causal = 0.0
    print(f"{'mask':>20} {'keys':>7} {'tokens/s':>12} {'ratio':>6}")
    for name, pattern, has_sinks, document in cases:
        rate = tokens_per_second(
            pattern, seq, device, has_sinks=has_sinks, document=document, seconds=arguments.seconds
        )
        causal, keys = causal or rate, pattern.visible_per_query(document or seq)
        print(f"{name:>20} {keys:7.0f} {rate:12,.0f} {rate / causal:6.2f}")


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
    begin, steps = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        step()
        steps += 1
    return steps * seq / (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
