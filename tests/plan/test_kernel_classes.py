"""Kernels of a planned step by class: launches, FLOPs and bytes against counts by hand, and their rates."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.plan.layouts import experiment_of
from tests.ranks import run_ranks
from titan_exp.ops.adamw import adamw_update
from titan_exp.ops.cross_entropy import row_statistics, write_row_gradient
from titan_exp.plan.devices import DEVICES
from titan_exp.plan.predict import predict
from titan_exp.plan.roofline import class_times, rank_time
from titan_exp.plan.tables import plan_to_json, print_plan
from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.plan.trace.op_costs import count_bytes

H200 = DEVICES["h200"]
CUDA = (
    "cluster=slurm cluster.device=cuda cluster.nodes=1 cluster.gpus_per_node=1 compile=none "
    "training.mixed_precision=bf16"
)


class _Bytes(TorchDispatchMode):
    """Sums the bytes of every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.total += 0 if func.is_view else count_bytes(func, args, kwargs or {}, outputs)
        return out


def _moved(call: Callable[[], object]) -> int:
    with _Bytes() as found:
        call()
    return found.total


def test_bytes_are_those_that_a_kernel_reads_and_writes():
    x, y = torch.ones(8, 16), torch.ones(8, 16)
    one = x.numel() * x.element_size()
    assert _moved(lambda: torch.empty_like(x)) == _moved(lambda: x.new_empty(4)) == 0
    assert _moved(lambda: torch.empty_strided((4, 4), (1, 4))) == 0
    assert _moved(lambda: x + y) == _moved(lambda: x.add_(y)) == _moved(lambda: torch.add(x, y, out=x)) == 3 * one
    assert _moved(lambda: torch.mul(x, 2.0, out=y)) == _moved(lambda: x.copy_(y)) == 2 * one
    assert _moved(x.zero_) == _moved(lambda: torch._foreach_zero_([x])) == one
    # A lookup reads the rows that it returns, not the table.
    tokens = torch.zeros(4, dtype=torch.int64)
    looked_up = 4 * 8 + 2 * 4 * 16 * 4
    assert _moved(lambda: torch.nn.functional.embedding(tokens, torch.ones(1000, 16))) - looked_up == 1000 * 16 * 4


def test_a_fused_optimizer_reads_and_writes_every_tensor_once():
    weight, first, second = (torch.zeros(4096) for _ in range(3))
    words: Any = {"rates": torch.ones(2), "decay": 0.0, "betas": (0.9, 0.9), "eps": 1e-8}
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (weight, first, second)]
        gradient, copy = (torch.empty(4096, dtype=torch.bfloat16) for _ in range(2))
        rates = {**words, "rates": torch.empty(2)}

        def update() -> None:
            adamw_update(fakes[0], gradient, *fakes[1:], **rates, copy=copy)

        # Weight and moments in and out, gradient in, compute weight out.
        assert _moved(update) == pytest.approx(4096 * (6 * 4 + 2 * 2), rel=1e-3)


def test_a_loss_reads_the_logits_twice_and_writes_their_gradient():
    with torch._subclasses.FakeTensorMode():
        logits = torch.empty(64, 4096, dtype=torch.bfloat16)
        labels, numbers = torch.zeros(64, dtype=torch.int64), torch.zeros(64)
        one = logits.numel() * logits.element_size()
        assert _moved(lambda: row_statistics(logits, labels, None)) == pytest.approx(one, rel=0.01)
        for out in (logits, torch.empty_like(logits)):
            call = partial(write_row_gradient, logits, numbers, labels, numbers, z_loss=0.0, first=0, out=out)
            assert _moved(call) == pytest.approx(2 * one, rel=0.01)


def _planned(words: str) -> dict[str, Any]:
    """Kernels of a planned step by class, with its totals and the printed plan."""
    experiment, text = experiment_of(f"{CUDA} {words}"), StringIO()
    plan = predict(experiment, H200)
    (rank,) = plan.ranks
    assert rank.time is not None
    print_plan(plan, Console(file=text, width=120), kernels=True)
    totals = rank.trace.costs.flops, rank.trace.costs.bytes_moved, rank.time.matmuls + rank.time.elementwise
    return {
        "kernels": {part.name: part for part in rank.kernels},
        "json": plan_to_json(plan)["ranks"][0]["kernels"],
        "totals": totals,
        "text": text.getvalue(),
        "model": experiment.model,
    }


@pytest.mark.night
def test_classes_of_a_compiled_step_are_those_counted_by_hand():
    words = "model.vocab_size=4096 model.tied_embeddings=false training.seq_len=512 training.global_batch_size=2"
    [planned] = run_ranks(1, _planned, f"{words} compile=blocks", limit=300)
    found, model, tokens = planned["kernels"], planned["model"], 2 * 512
    heads, width, dim = model.heads, model.head_dim, model.dim
    attention, fused = (heads + 2 * model.kv_heads) * width, 2 * model.ffn_dim
    block, layers = dim * (attention + heads * width + fused + model.ffn_dim), model.layers
    assert found["matmuls in blocks"].flops == 3 * 2 * tokens * block * layers
    assert found["matmuls in blocks"].launches == 3 * 4 * layers
    assert found["matmuls of the head"].flops == 3 * 2 * tokens * dim * 4096
    causal = 2 * tokens * 512 * heads * width * layers // 2
    assert (found["attention, forward"].flops, found["attention, backward"].flops) == (2 * causal, 5 * causal)
    # Per block: norm 2, residual and norm 3, two residuals 4, RoPE and SwiGLU read and write their tensors, in bf16.
    forward = 2 * tokens * (9 * dim + 2 * attention + fused + model.ffn_dim) * layers
    # The final norm follows the last block.
    forward += 2 * tokens * 2 * dim
    assert found["elementwise in blocks, forward"].bytes == pytest.approx(forward, rel=0.02)
    assert found["elementwise in blocks, forward"].launches == 5 * layers + 1
    parameters = (block + 2 * dim) * layers + dim + 2 * 4096 * dim
    # Master and moments in and out, bf16 gradient in, bf16 weight out, but for the embedding; the norm reads gradients.
    assert found["optimizer"].bytes == pytest.approx(28 * parameters - 2 * 4096 * dim, rel=0.01)
    assert found["norm and clip"].bytes == pytest.approx(2 * parameters, rel=0.01)
    assert "compute weights" not in found
    assert found["gradients"].bytes < 100, "sums of metrics only"

    flops, size, seconds = planned["totals"]
    assert sum(part.flops for part in found.values()) == flops
    assert sum(part.bytes for part in found.values()) == size
    assert sum(part.seconds for part in found.values()) == pytest.approx(seconds)
    assert [part["name"] for part in planned["json"]] == [*found]
    assert "elementwise in blocks, backward" in planned["text"]


def test_attention_and_passes_over_all_weights_have_rates_of_their_own():
    attention = OpCosts(flops=10**15, kernels={("attention, backward", "flops"): 10**15})
    matmul = OpCosts(flops=10**15, kernels={("matmuls in blocks", "flops"): 10**15})
    slower = rank_time(attention, {}, H200, 1).matmuls / rank_time(matmul, {}, H200, 1).matmuls
    assert slower == pytest.approx(680 / 491)
    passes, fast = (
        OpCosts(bytes_moved=10**12, kernels={("optimizer", "bytes"): 10**12}),
        replace(H200, copy_tbs=2 * H200.copy_tbs),
    )
    assert rank_time(passes, {}, H200, 1).elementwise == pytest.approx(2 * rank_time(passes, {}, fast, 1).elementwise)
    assert class_times(OpCosts(), H200) == []


@pytest.mark.night
def test_casts_of_another_optimizer_are_classes_of_their_own():
    [planned] = run_ranks(1, _planned, "optimizer.implementation=fused", limit=300)
    found = planned["kernels"]
    assert found["compute weights"].bytes > 0
    # One micro-batch leaves gradients in bf16, and this optimizer wants them in fp32.
    assert found["gradients"].bytes > 0


def test_a_kernel_of_ours_moves_its_arguments_and_results():
    [(cast, copies)] = run_ranks(1, _bytes_of_kernels)
    assert cast == 64 * 32 * (2 + 1 + 1) + 2 * 4
    assert copies == (8 + 8 * 3) * 16 * 2 + 8 * 3 * 8


def _bytes_of_kernels() -> list[int]:
    """Bytes of the float8 cast and of tokens' copies to the rows of their experts, each of one launch."""
    from types import SimpleNamespace

    from titan_exp.ops.float8 import dual_cast
    from titan_exp.ops.moe.permutation import copy_tokens
    from titan_exp.plan.fake_kernels import fake_cuda_kernels
    from titan_exp.plan.trace.dispatch_mode import CostMode
    from titan_exp.plan.trace.memory_tracker import MemoryTracker

    axes = SimpleNamespace(mesh_dim_names=())
    mesh: Any = SimpleNamespace(world=axes, sharding=axes, experts=None)

    def moved(call: Callable[[], object]) -> int:
        with CostMode(MemoryTracker(), mesh) as mode:
            call()
        launches = sum(count for (_, measure), count in mode.costs.kernels.items() if measure == "launches")
        # Views and allocations launch nothing.
        assert launches == mode.costs.operators == 1
        return mode.costs.bytes_moved

    with torch._subclasses.FakeTensorMode(), fake_cuda_kernels():
        matrix, scale = torch.empty(64, 32, dtype=torch.bfloat16), torch.empty(())
        tokens, rows = torch.empty(8, 16, dtype=torch.bfloat16), torch.empty(8, 3, dtype=torch.int64)
        return [
            moved(lambda: dual_cast(matrix, scale, scale, torch.float8_e4m3fn)),
            moved(lambda: copy_tokens(tokens, rows, None)),
        ]


def test_an_uncompiled_loss_is_two_kernels_over_the_logits():
    words = "model.vocab_size=32768 model.tied_embeddings=false training.seq_len=512 training.global_batch_size=2"
    [planned] = run_ranks(1, _planned, words, limit=300)
    logits, found = 2 * 512 * 32768 * 2, planned["kernels"]["loss"]
    assert found.bytes == pytest.approx(3 * logits, rel=0.02)
    assert found.launches < 30
