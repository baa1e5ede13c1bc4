"""Experts in a plan: bytes and FLOPs counted by hand, the assumed load, links of all-to-all, and search of `ep`."""

import json
import shlex

import pytest

from tests.cli.test_plan import planned
from tests.plan.layouts import experiment_of
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.models.spec.lookup import model_spec
from titan_exp.plan.devices import device_named
from titan_exp.plan.layouts import SearchSpace, fixed_keys
from titan_exp.plan.predict import Plan, predict
from titan_exp.plan.roofline import message_seconds, rank_time
from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.plan.trace.op_costs import EXPERT_MATMULS

MOE = "model=qwen3_moe_debug"
LAYERS, DIM, VOCAB, EXPERTS, CHOSEN, WIDTH = 4, 64, 320, 8, 3, 64
HEADS, KV_HEADS, HEAD = 4, 2, 32
ROWS, LENGTH = 8, 64
FP32 = 4

OF_EXPERTS = EXPERTS * 3 * WIDTH * DIM
OTHERS = (HEADS + 2 * KV_HEADS) * HEAD * DIM + HEADS * HEAD * DIM + 2 * HEAD + 2 * DIM + EXPERTS * DIM
"""Weights of attention, norms and router of a layer."""
ENDS = 2 * VOCAB * DIM + DIM
WEIGHTS = LAYERS * (OF_EXPERTS + OTHERS) + ENDS
TENSORS = 9 * LAYERS + 3
ROUTED = ROWS * LENGTH * CHOSEN


def plan_of(overrides: str, *, worst_load: bool = False) -> Plan:
    return predict(experiment_of(f"{MOE} {overrides}"), None, worst_load=worst_load)


def messages(plan: Plan, kind: str) -> int:
    (rank,) = plan.ranks
    return sum(size for (_, of), size in rank.trace.costs.messages.items() if of == kind)


def test_one_rank():
    (rank,) = plan_of("").ranks
    assert rank.trace.persistent["parameters"] == FP32 * WEIGHTS
    # Two moments of each weight, and the steps of each tensor.
    assert rank.trace.persistent["optimizer"] == 2 * FP32 * WEIGHTS + FP32 * TENSORS
    projections = OTHERS - 2 * HEAD - 2 * DIM + CHOSEN * 3 * WIDTH * DIM
    # Two matmuls forward and five backward, of which a causal mask halves.
    attention = 7 * ROWS * HEADS * LENGTH**2 * HEAD
    assert rank.trace.costs.flops == 6 * ROWS * LENGTH * (LAYERS * projections + VOCAB * DIM) + LAYERS * attention


def test_sinks_and_biases_of_fewer_numbers_than_ranks():
    one, many = (
        predict(experiment_of(f"model=gpt_oss_debug {layout}"), None).ranks[0].trace.costs.flops
        for layout in ("", "parallelism.tp=2 parallelism.dp_shard=4")
    )
    assert many == one // 8


def test_sharded_experts_are_gathered():
    plan = plan_of("parallelism.dp_shard=2")
    assert plan.ranks[0].trace.persistent["parameters"] == FP32 * WEIGHTS // 2
    # All but the last block are gathered twice.
    gathered = WEIGHTS + (LAYERS - 1) * (OF_EXPERTS + OTHERS)
    assert messages(plan, "all-gather") == FP32 * gathered
    assert messages(plan, "reduce-scatter") == FP32 * WEIGHTS
    assert messages(plan, "all-to-all") == 0
    assert plan.worst_bytes is None


def test_expert_parallel_ranks_exchange_rows():
    plan = plan_of("parallelism.dp_shard=2 parallelism.ep=2", worst_load=True)
    (rank,) = plan.ranks
    # Half of the experts are on this rank, and nobody else has them.
    assert rank.trace.persistent["parameters"] == FP32 * WEIGHTS // 2
    assert messages(plan, "all-gather") == FP32 * (WEIGHTS - LAYERS * OF_EXPERTS + (LAYERS - 1) * OTHERS)
    assert messages(plan, "reduce-scatter") == FP32 * (WEIGHTS - LAYERS * OF_EXPERTS)
    # Rows there and back, forward and backward, a weight with each row there, and before them the number of rows of
    # each expert.
    rows = (4 * DIM + 2) * ROUTED // 2 * FP32
    assert messages(plan, "all-to-all") == LAYERS * (rows + 8 * EXPERTS)
    (alone,) = plan_of("training.global_batch_size=4").ranks
    assert rank.trace.costs.flops == alone.trace.costs.flops
    # Each further row keeps its input, gate and up, its weight, and its places in both orders for backward.
    assert plan.worst_bytes is not None
    kept = LAYERS * ROUTED // 2 * ((DIM + 2 * WIDTH + 1) * FP32 + 2 * 8)
    # The layer at the peak is in backward of SwiGLU: gradient of the layer's output, SwiGLU's output, gradients of gate
    # and up; and, of a CPU's chunk, which holds all rows, SiLU, its gradient before and after up, and the gate's.
    passing = ROUTED // 2 * 8 * WIDTH * FP32
    assert kept + 0.99 * passing <= plan.worst_bytes - rank.bytes <= kept + passing


def test_mfu_counts_active_parameters():
    """Router, shared experts, chosen experts and head, by hand."""
    experiment = experiment_of(f"{MOE} model.moe.shared_experts=2 training.seq_len={LENGTH}")
    spec = model_spec(experiment.model)
    assert spec is not None
    attention = (HEADS + 2 * KV_HEADS) * HEAD * DIM + HEADS * HEAD * DIM
    layer = attention + EXPERTS * DIM + (CHOSEN + 2) * 3 * WIDTH * DIM
    # Visible keys of a token, two matmuls each, forward once and backward twice.
    scores = 3 * HEADS * (LENGTH + 1) / 2 * 2 * 2 * HEAD
    assert spec.flops_per_token(LENGTH) == 6 * (LAYERS * layer + VOCAB * DIM) + LAYERS * scores


def test_all_to_all_takes_the_slower_link():
    device = device_named("h100")
    size, share = 2**30, 1e9 * device.link_share
    inside = message_seconds("all-to-all", size, range(8), device, 8)
    assert inside == pytest.approx(size * 7 / 8 / device.link_gbs / share)
    across = message_seconds("all-to-all", size, range(32), device, 8)
    assert across == pytest.approx(size * 24 / 32 / device.network_gbs / share)


def test_few_rows_are_bound_by_the_weights():
    device = device_named("h100")

    def seconds(rows: int) -> float:
        costs = OpCosts(flops=2 * rows * EXPERTS * 4096**2)
        costs.kernels[EXPERT_MATMULS, "flops"] = costs.flops
        costs.kernels[EXPERT_MATMULS, "bytes"] = 2 * EXPERTS * (4096**2 + 2 * rows * 4096)
        return rank_time(costs, {}, device, 8).matmuls

    assert seconds(1024) == pytest.approx(2 * 1024 * EXPERTS * 4096**2 / device.matmul_rate)
    assert seconds(16) > 0.99 * 2 * EXPERTS * 4096**2 / device.bandwidth
    assert seconds(16) < 1.1 * seconds(8)


GPUS = 4
TYPED = (
    f"{MOE} cluster=slurm_h100 compile=none training.seq_len=512 training.mixed_precision=bf16 "
    "training.global_batch_size=8 training.micro_batch_size=2 model.layers=6 activation_checkpoint=full "
    "data.tokenizer=bytes"
).split()
ONE = ["parallelism.pp=1", "parallelism.dp_replicate=1", "parallelism.cp=1", "parallelism.tp=1"]


def degrees_of_experts(*more: str) -> list[tuple[int, int]]:
    """Degrees etp and ep of the layouts among which a search has its seeds."""
    space = SearchSpace(to_experiment(compose([*TYPED, *ONE, *more])), GPUS, fixed_keys([*TYPED, *ONE, *more]))
    return [(layout.parallelism.etp, layout.parallelism.ep) for layout in space._layouts("full")]


def test_a_search_tries_every_degree_of_experts():
    assert degrees_of_experts() == [(1, 1), (1, 2), (1, 4)]
    # Channels of all experts divided by tp leave half of the ranks.
    assert degrees_of_experts("parallelism.tp=2") == [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)]
    # Three experts per rank and more: neither 4 ranks nor 2 divide 9.
    assert degrees_of_experts("model.moe.experts=9") == [(1, 1)]
    assert degrees_of_experts("model=llama_debug") == [(1, 1)]


@pytest.mark.night
def test_search_proposes_expert_parallelism():
    found = json.loads(planned("search", "--gpus", str(GPUS), "--json", *TYPED, *ONE))
    degrees = [int(row["command"].partition("parallelism.ep=")[2].split()[0]) for row in found["layouts"]]
    assert sorted(degrees) == [1, 2, 4]
    row = next(row for row, degree in zip(found["layouts"], degrees, strict=True) if degree == 2)
    alone = json.loads(planned(*shlex.split(row["command"])[2:], "plan.worst_expert_load=1", "--json"))
    # Counts of all layers are one storage, whose size is rounded up.
    assert max(rank["peak_allocated_bytes"] for rank in alone["ranks"]) == pytest.approx(
        row["peak_allocated_bytes"], abs=8 * 512
    )
    assert alone["step_seconds"] == pytest.approx(row["step_seconds"], rel=1e-9)
