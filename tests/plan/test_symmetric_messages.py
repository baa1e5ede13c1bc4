"""Plans of async tensor parallelism and of tokens exchanged through symmetric memory, against counts by hand."""

import pytest
import torch

from tests.ranks import run_ranks
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import ResolvedLayout, resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.parallel.mesh import all_gather
from titan_exp.plan.devices import DEVICES, overhead_of
from titan_exp.plan.predict import predict
from titan_exp.plan.roofline import message_seconds, rank_time
from titan_exp.plan.trace.dispatch_mode import CostMode, OpCosts
from titan_exp.plan.trace.memory_tracker import MemoryTracker
from titan_exp.plan.trace.trace_step import fake_rank
from titan_exp.rules import check

H100 = DEVICES["h100"]
TP, LAYERS, TOKENS, MICRO_BATCHES = 2, 3, 128, 2
DIM, HEADS, FFN = 64, 64 + 2 * 32, 256
"""Widths of hidden states, of queries, keys and values together, and of the feed-forward network."""
RUN = (
    "model=llama_debug",
    f"model.layers={LAYERS}",
    "cluster=slurm_h100",
    "compile=none",
    f"training.seq_len={TOKENS}",
    "training.micro_batch_size=1",
    f"training.global_batch_size={MICRO_BATCHES}",
    "training.mixed_precision=bf16",
    "parallelism.dp_shard=1",
    f"parallelism.tp={TP}",
    "compile=blocks",
)


EP, EXPERT_COUNT, CHOSEN = 2, 8, 3
EXPERTS = f"model=qwen3_moe_debug parallelism.dp_shard={EP} parallelism.tp=1 parallelism.ep={EP} compile=none"
EXPERTS += f" training.global_batch_size={EP * MICRO_BATCHES}"
"""A model with experts whose rows are as wide as the dense one's."""


def run(*words: str) -> Experiment:
    return resolve_layout(check(to_experiment(compose([*RUN, *words]))), TP)


Traced = tuple[OpCosts, dict[str, list[int]]]
"""Costs of a step, and ranks by mesh axis."""


def planned(*words: str) -> Traced:
    (rank,) = predict(run(*words), H100).ranks
    return rank.trace.costs, rank.trace.axes


def plain_and_fused() -> tuple[Traced, Traced]:
    return planned(), planned("parallelism.async_tp=true")


def test_messages_beside_matmuls_are_exposed_where_they_take_longer():
    (found,) = run_ranks(1, plain_and_fused)
    compare(found)


def compare(found: tuple[Traced, Traced]) -> None:
    (plain, _), (costs, _) = found
    before, after = (rank_time(*traced, H100, 8) for traced in found)
    shapes = [(DIM, HEADS // TP), (DIM // TP, DIM), (DIM, 2 * FFN // TP), (FFN // TP, DIM)]
    forward = zip(("all-gather", "reduce-scatter") * 2, shapes, strict=True)
    # In backward, a gradient takes the way of its output or input back.
    backward = zip(("reduce-scatter", "all-gather") * 2, [shape[::-1] for shape in shapes], strict=True)
    size, calls = LAYERS * MICRO_BATCHES * TOKENS * DIM * 2, LAYERS * MICRO_BATCHES
    flops = {f"{kind} beside {rows} x {columns}": rows * columns for kind, (rows, columns) in (*forward, *backward)}
    flops = {kind: 2 * calls * TOKENS * numbers for kind, numbers in flops.items()}
    sent = {kind: sent for (axis, kind), sent in costs.messages.items() if axis == "tp" and " beside " in kind}
    assert sent == dict.fromkeys(flops, size)
    assert {kind: costs.kernels[kind, "flops"] for kind in flops} == flops
    assert costs.flops == plain.flops
    alone = {kind: message_seconds(kind.split()[0], size, range(TP), H100, 8, calls=calls) for kind in flops}
    hidden = sum(min(alone[kind], count / H100.matmul_rate) for kind, count in flops.items())
    assert 0 < hidden < sum(alone.values())
    assert after.behind == pytest.approx(before.behind + hidden)
    assert after.exposed == pytest.approx(before.exposed - hidden)


def test_symmetric_memory_lies_beside_the_allocators():
    layouts = [ResolvedLayout.of(run(*words)) for words in ((), ("parallelism.async_tp=true",))]
    plain, fused = (overhead_of(layout, None, H100) for layout in layouts)
    assert fused - plain == 2 * TOKENS // TP * DIM * 2 + 2 * H100.matmul_workspace


def exchanged_twice() -> list[tuple[OpCosts, int]]:
    """Costs of a step and peak memory of experts by all-to-all, and through symmetric memory."""
    found = []
    for way in ("all_to_all", "symmetric_memory"):
        words = f"{EXPERTS} parallelism.token_exchange={way}".split()
        (rank,) = predict(resolve_layout(check(to_experiment(compose([*RUN, *words]))), EP), H100).ranks
        found.append((rank.trace.costs, rank.trace.peak.bytes))
    return found


def test_only_rows_that_come_are_sent_and_multiplied():
    compare_exchanges(exchanged_twice())


def compare_exchanges(found: list[tuple[OpCosts, int]]) -> None:
    (plain, least), (costs, peak) = found
    assert costs.flops == pytest.approx(plain.flops, rel=1e-6)
    sent, received = (
        sum(size for (_, kind), size in each.messages.items() if kind == "all-to-all") for each in (costs, plain)
    )
    # Before the rows, all-to-all sends a number for each expert there and back.
    assert sent == received - LAYERS * MICRO_BATCHES * 8 * EXPERT_COUNT
    room = EP * TOKENS * CHOSEN
    # One layer's rows at least have room for all, where an EP-th of them came.
    assert peak - least > (room - TOKENS * CHOSEN) * DIM * 2
    # Rows are copied to symmetric memory, and results from it, in both directions, forward and backward, where rows of
    # an all-to-all are sorted by expert.
    copied = LAYERS * MICRO_BATCHES * 4 * 2 * room * DIM * 2
    assert costs.bytes_moved - plain.bytes_moved > copied


def test_a_message_is_waited_for_without_a_copy():
    (found,) = run_ranks(1, gathered)
    check_gathered(found)


def gathered() -> tuple[dict[tuple[str, str], int], int, int]:
    """Messages, bytes moved and peak memory of a gathered shard."""
    with fake_rank(run(), 0) as fake:
        mesh, tracker = fake.state.mesh, MemoryTracker()
        with CostMode(tracker, mesh) as mode:
            tracker.begin_step()
            shard = torch.empty(4, 8)
            whole = all_gather(shard, TP, mesh.sharding["tp"].get_group().group_name)
        assert whole.shape == (4 * TP, 8)
        return dict(mode.costs.messages), mode.costs.bytes_moved, tracker.peak().bytes


def check_gathered(found: tuple[dict[tuple[str, str], int], int, int]) -> None:
    size = 4 * 8 * 4
    assert found == ({("tp", "all-gather"): TP * size}, 0, (1 + TP) * size)
