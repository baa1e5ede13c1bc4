"""Plans of captured passes: costs of replays, launches, and the memory pool of a CUDA graph."""

import pytest

from tests.plan.layouts import experiment_of
from titan_exp.plan.caching_allocator import GRAPH, MIB, steady_reserved
from titan_exp.plan.devices import DEVICES
from titan_exp.plan.predict import RankPlan, predict

LAYERS, DIM, MICRO_BATCHES = 4, 64, 6
RUN = (
    f"cluster=slurm_h100 compile=none cluster.device=cuda training.mixed_precision=bf16 model.layers={LAYERS} "
    f"model.attention_backend=flash training.micro_batch_size=2 training.global_batch_size={2 * MICRO_BATCHES} "
    "parallelism.dp_shard=1 cluster.expandable_segments=false"
)
CAPTURED = f"{RUN} compile.cuda_graphs=true"


def rank_of(overrides: str) -> RankPlan:
    (rank,) = predict(experiment_of(overrides), DEVICES["h100"], full=True).ranks
    return rank


def test_replays_compute_as_much_as_passes_and_launch_nothing():
    eager, captured, more = map(rank_of, (RUN, CAPTURED, f"{CAPTURED} training.global_batch_size={4 * MICRO_BATCHES}"))
    costs = captured.trace.costs
    assert costs.flops == eager.trace.costs.flops
    assert more.trace.costs.flops == 2 * costs.flops
    # Sums of gradients stay: they are zeroed, and the first micro-batch adds to them, too.
    assert 0 < costs.bytes_moved - eager.trace.costs.bytes_moved < 3 * captured.trace.gradients
    assert eager.trace.costs.operators > MICRO_BATCHES * 20 * LAYERS
    # Copies of tokens and labels to the addresses that the capture reads.
    assert more.trace.costs.operators - costs.operators == 2 * MICRO_BATCHES


def test_the_pool_of_a_graph_lies_beside_an_evaluation():
    tokens, vocabulary = 2 * 1024, 32000
    words = f"training.seq_len=1024 model.vocab_size={vocabulary} training.loss_chunk_tokens=null"
    eager, alone, evaluated = (
        rank_of(f"{run} {words} evaluation.every={every}") for run, every in ((RUN, 10), (CAPTURED, 0), (CAPTURED, 10))
    )
    assert eager.allocator is not None
    assert alone.allocator is not None
    assert evaluated.allocator is not None
    assert alone.trace.peak.bytes == pytest.approx(eager.trace.peak.bytes, rel=0.02)
    # Of an evaluation, the logits alone; the eager run has room for them, which training took.
    logits = tokens * vocabulary * 2
    assert evaluated.allocator.reserved - alone.allocator.reserved >= logits
    assert evaluated.allocator.reserved - eager.allocator.reserved >= logits


def test_a_graph_keeps_its_pool():
    """By hand: the weights; a warm-up, whose cache the capture releases; the captured pass, whose memory nobody else
    gets; an update."""
    before = [(0, 30 * MIB, 0), (1, 100 * MIB, 1), (1, 0, 1)]
    step = [(2, 100 * MIB, GRAPH), (2, 0, GRAPH), (3, 50 * MIB, 0), (3, 0, 0)]
    found = steady_reserved(before, step, expandable=False)
    assert (found.reserved, found.allocated) == (180 * MIB, 130 * MIB)
    # With less, a pass that is not captured gives its cache back.
    assert steady_reserved(before, step, expandable=False, capacity=170 * MIB) == found
    alike = [(storage, size, stream and 1) for storage, size, stream in step]
    assert steady_reserved(before, alike, expandable=False, capacity=170 * MIB).reserved == 130 * MIB
