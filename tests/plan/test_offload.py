"""CPU offload on CUDA: memory of GPU and host, and copies between them."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.config.composing import llama
from titan_exp.config.devices import offered_devices
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.plan.devices import device_named
from titan_exp.plan.predict import Plan, predict
from titan_exp.plan.tables import plan_to_json, print_plan
from titan_exp.plan.trace.trace_step import Trace
from titan_exp.rules import check

SMALL = [
    "model=llama_debug",
    "cluster=slurm_h100",
    "compile=none",
    "training.seq_len=128",
    "training.mixed_precision=bf16",
    "training.global_batch_size=8",
    # Whole logits of a large vocabulary, so that the peak is at the loss in every layout.
    "model.vocab_size=4096",
    "training.loss_chunk_tokens=null",
    # The events are those of a step.
    "evaluation.every=0",
]
OFFLOADED = "parallelism.cpu_offload=true"
SHARDS, MIN_BLOCK = 2, 512


def planned(*words: str) -> Plan:
    experiment = to_experiment(compose([*SMALL, *words]))
    return predict(resolve_layout(check(experiment), offered_devices(experiment.cluster)), device_named("h100"))


def traced(*words: str) -> Trace:
    return planned(*words).ranks[0].trace


def block_shards() -> list[int]:
    """Numbers that each parameter of a block has on one rank, in their order, by hand from the model's sizes."""
    model = llama(*SMALL)
    heads, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    whole = [
        model.dim,
        (heads + 2 * keys) * model.dim,
        heads * model.dim,
        model.dim,
        2 * model.ffn_dim * model.dim,
        model.ffn_dim * model.dim,
    ]
    return [numbers // SHARDS for numbers in whole]


def all_shards() -> list[int]:
    model = llama(*SMALL)
    ends = [model.vocab_size * model.dim, model.dim, model.vocab_size * model.dim]
    return [*block_shards() * model.layers, *(numbers // SHARDS for numbers in ends)]


def power_of_two(size: int) -> int:
    found = 1
    while found < size:
        found *= 2
    return found


def blocks(size: int) -> int:
    return -(-size // MIN_BLOCK) * MIN_BLOCK


def stream_of_copies(trace: Trace) -> int:
    size = blocks(4 * block_shards()[-1])
    return next(stream for _, taken, stream in trace.step_events if taken == size and stream != 0)


@pytest.fixture(scope="module")
def offloaded() -> Trace:
    return traced(OFFLOADED, f"parallelism.dp_shard={SHARDS}")


def test_state_is_on_the_host(offloaded: Trace):
    host, shards = offloaded.host, all_shards()
    assert host is not None
    assert offloaded.persistent["parameters"] == offloaded.persistent["optimizer"] == 0
    # Two moments, and how many steps were made, of each.
    assert host.persistent["parameters"] == 4 * sum(shards)
    assert host.persistent["optimizer"] == 8 * sum(shards) + 4 * len(shards)
    assert offloaded.gradients == host.peak.by_category["gradients"]
    # Pinned blocks are powers of two; the optimizer's state is not pinned.
    pinned = sum(power_of_two(4 * numbers) for numbers in shards)
    assert host.peak.by_category["parameters"] == host.peak.by_category["gradients"] == pinned
    assert host.peak.by_category["optimizer"] >= host.persistent["optimizer"]


def test_copies_are_counted(offloaded: Trace):
    shards, layers = all_shards(), to_experiment(compose(SMALL)).model.layers
    # Of a step, every parameter is gathered once, and those of all blocks but the last again to go back.
    gathered = 4 * sum(shards) + 4 * sum(block_shards()) * (layers - 1)
    assert offloaded.costs.messages["host", "to the GPU"] == gathered
    assert offloaded.costs.messages["host", "to the host"] == 4 * sum(shards)
    # Tokens and labels.
    assert offloaded.costs.messages["host", "to the GPU, waited for"] == 2 * 4 * 128 * 8


def test_copies_are_freed_after_the_cast(offloaded: Trace):
    """`FSDPParam.all_gather_inputs` copies a parameter in fp32, casts it, and frees the copy before the next."""
    shards = block_shards()
    births = {storage: (size, stream) for storage, size, stream in offloaded.step_events if size}
    expected = []
    for numbers in shards:
        expected += [blocks(4 * numbers), blocks(2 * numbers), -blocks(4 * numbers)]
    expected.append(blocks(2 * SHARDS * sum(shards)))
    copy_in = stream_of_copies(offloaded)
    story = []
    for storage, size, _ in offloaded.step_events:
        born, stream = births.get(storage, (0, None))
        if stream == copy_in:
            story.append(size or -born)
    found = [place for place in range(len(story)) if story[place : place + len(expected)] == expected]
    layers = to_experiment(compose(SMALL)).model.layers
    assert len(found) == 2 * layers - 1


def test_gradients_are_freed_on_the_gpu_when_copied(offloaded: Trace):
    """`foreach_reduce` keeps no reference to what it has reduced, since the stream's next use comes after the copy."""
    births = {storage: (size, stream) for storage, size, stream in offloaded.step_events if size}
    reduced = blocks(4 * sum(block_shards()))
    others = (0, stream_of_copies(offloaded))
    alive = most = times = 0
    for storage, size, _ in offloaded.step_events:
        born, stream = births.get(storage, (0, 0))
        if born != reduced or stream in others:
            continue
        alive += 1 if size else -1
        most, times = max(most, alive), times + bool(size)
    assert (most, alive, times) == (1, 0, to_experiment(compose(SMALL)).model.layers)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("parallelism.dp_shard=1", marks=pytest.mark.night),
        pytest.param("parallelism=hsdp", marks=pytest.mark.night),
        pytest.param("parallelism=ddp", marks=pytest.mark.night),
        "parallelism.tp=2 parallelism.dp_shard=2",
        pytest.param("parallelism.dp_shard=2 optimizer.state_precision=bf16", marks=pytest.mark.night),
    ],
)
def test_offload_saves_exactly_the_state(layout: str):
    here, there = traced(*layout.split()), traced(*layout.split(), OFFLOADED)
    state = sum(here.persistent[name] for name in ("parameters", "optimizer"))
    assert state > 0
    # With and without offload, a micro-batch is copied to the GPU when it is computed.
    batch = here.peak.by_category["other"] - there.peak.by_category["other"]
    assert here.peak.where == there.peak.where == "forward, head and loss"
    # A lone data rank looks up the embedding in fp32, and with offload, which keeps FSDP, in a bf16 copy.
    model = llama(*SMALL)
    copy = 2 * model.vocab_size * model.dim if "dp_shard=1" in layout else 0
    assert here.peak.bytes - there.peak.bytes == state + batch - copy
    assert batch == 0
    # Only FSDP reduces the norm over the lone rank of a mesh; a lone data rank has FSDP only with offload.
    sent, expected = (
        {key: size for key, size in costs.messages.items() if key[0] not in ("host", "itself")}
        for costs in (there.costs, here.costs)
    )
    assert sent == expected
    assert there.costs.flops == here.costs.flops


@pytest.mark.night
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compiled_code_runs_on_the_fake_gpu(backend: str):
    words = [*SMALL, "parallelism.dp_shard=2", "compile=blocks", f"compile.backend={backend}"]
    here, there = (as_typed(*words, override) for override in ("parallelism.cpu_offload=false", OFFLOADED))
    state = sum(here["peak_by_category"][name] for name in ("parameters", "optimizer"))
    batch = here["peak_by_category"]["other"] - there["peak_by_category"]["other"]
    assert here["peak_allocated_bytes"] - there["peak_allocated_bytes"] == state + batch > 0


def as_typed(*words: str) -> dict[str, Any]:
    """Plan of one rank in its own process, since jaxtyping's checks in tests cannot be compiled."""
    command = [sys.executable, "-m", "titan_exp", "plan", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return json.loads(done.stdout)["ranks"][0]


@pytest.mark.night
def test_pipeline_ranks_share_the_nodes_memory():
    plan = planned(OFFLOADED, "parallelism.pp=2", "parallelism.dp_shard=8", "parallelism.pp_microbatches=1")
    first, second = (rank.trace.host for rank in plan.ranks)
    assert first is not None
    assert second is not None
    # A node of eight has all ranks of one stage.
    assert plan.host_bytes_per_node == 8 * max(first.peak.bytes, second.peak.bytes)
    assert plan_to_json(plan)["ranks"][1]["host"]["peak_bytes"] == second.peak.bytes


@pytest.mark.night
def test_copies_take_time_and_host_operators_do_not(capsys: pytest.CaptureFixture[str]):
    plan, before = (planned("parallelism.dp_shard=2", word) for word in (OFFLOADED, "parallelism.cpu_offload=false"))
    (rank,), (other,) = plan.ranks, before.ranks
    assert rank.time is not None
    assert other.time is not None
    copied = sum(rank.trace.costs.messages["host", way] for way in ("to the GPU", "to the host"))
    seconds = copied / (64e9 * device_named("h100").link_share)
    assert rank.time.behind - other.time.behind == pytest.approx(seconds)
    # A lone rank gathers nothing, and waits for its parameters.
    alone = planned("parallelism.dp_shard=1", OFFLOADED).ranks[0]
    assert alone.time is not None
    assert alone.time.exposed > 0
    # Clipping and AdamW read weights, gradients and two moments.
    assert rank.trace.costs.host_bytes > 16 * rank.trace.gradients // 4 > other.trace.costs.host_bytes == 0
    assert rank.trace.costs.bytes_moved < other.trace.costs.bytes_moved
    print_plan(plan)
    said = capsys.readouterr().out
    assert "On the host: " in said
    assert "estimates below leave that out" in said
