"""Memory breakdown of a step, and the out-of-memory report."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.config.composing import experiment
from tests.trainer.committed import committed
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.trainer.profiling.memory_snapshot import MemoryBreakdown, MemoryCategory, memory_breakdown
from titan_exp.trainer.rank_main import OutOfMemory, explain_oom, is_out_of_memory, main, oom_report, remedies

SMALL = [
    "+experiment=smoke",
    "training.steps=6",
    "evaluation.every=0",
    "tracking.log_every=1",
    "checkpoint=none",
]
HUNGRY = ["model.architecture=tests.trainer.hungry_model.Hungry", "parallelism.dp_shard=1"]


def test_every_tensor_is_counted_once():
    model = nn.Linear(64, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    memory = memory_breakdown(torch.device("cpu"), [model], optimizer)
    sizes = {category.name: category.size for category in memory.categories}
    weights = (64 * 32 + 32) * 4
    assert sizes["weights"] == sizes["gradients"] == weights
    assert sizes["optimizer state"] == 2 * weights + 2 * 4  # and a count of steps for each
    assert sum(sizes.values()) == memory.used
    assert memory.categories[0].name.startswith("everything else"), "the largest comes first"
    assert "weight: exp_avg" in memory.text()


def test_an_out_of_memory_error_names_consumers_and_remedies(tmp_path: Path):
    folder = committed(tmp_path / "run", [*SMALL, *HUNGRY, "profiling.memory_step=2"])
    with pytest.raises(OutOfMemory) as caught:
        main(str(folder.path))
    words = str(caught.value)
    assert "can't allocate memory: you tried to allocate" in words
    assert "Rank 0 ran out of memory in step 3" in words
    assert "lower with training.loss_chunk_tokens=2048" in words
    assert isinstance(caught.value.__cause__, RuntimeError), "the traceback of where it happened stays"
    for name in ("memory-full-rank-00000.txt", "memory-step-00000002-rank-00000.txt"):
        text = (folder.traces / name).read_text()
        assert "resident in this process" in text
        assert "optimizer state" in text


def test_other_errors_are_left_alone(tmp_path: Path):
    run = resolve_layout(experiment(*SMALL), 1)
    with (
        pytest.raises(RuntimeError, match=r"^something else$"),
        explain_oom(run, tmp_path, torch.device("cpu"), lambda: None),
    ):
        raise RuntimeError("something else")
    assert list(tmp_path.iterdir()) == []


def test_errors_of_every_allocator_are_known():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("memory format"))


def test_options_in_use_are_no_remedies():
    plain = resolve_layout(experiment("model=llama_debug"), 1)
    lowered = resolve_layout(
        experiment(
            *("model=llama_debug", "activation_checkpoint=full", "compile=blocks", "training.loss_chunk_tokens=64"),
            *("optimizer.state_precision=bf16", "training.micro_batch_size=1"),
        ),
        1,
    )
    rest, states = MemoryCategory("everything else: activations", 1), MemoryCategory("optimizer state", 1)
    assert "activation_checkpoint=full" in remedies(rest, plain, "cuda")
    assert "optimizer.state_precision=int8" in remedies(states, plain, "cuda")
    assert "parallelism.cpu_offload=true, which is slow" in remedies(states, plain, "cuda")
    assert "parallelism.cpu_offload=true, which is slow" not in remedies(states, plain, "cpu")
    assert remedies(rest, lowered, "cuda") == ["parallelism.cp=2, or a shorter training.seq_len"]
    assert not any("state_precision" in remedy for remedy in remedies(states, lowered, "cuda"))


def test_little_consumers_are_left_out():
    run = resolve_layout(experiment("model=llama_debug"), 1)
    categories = (MemoryCategory("weights", 99 * 2**30), MemoryCategory("gradients", 2**30))
    memory = MemoryBreakdown("cuda", 100 * 2**30, 110 * 2**30, 140 * 2**30, categories)
    text = oom_report(memory, run, rank=3, when="in step 7")
    assert text.startswith("Rank 3 ran out of memory in step 7: 100 GiB of 140 GiB were in use.\n")
    assert "gradients" not in text
    assert "lower with parallelism.dp_shard=2, on twice as many devices" in text


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_snapshot_of_a_gpu_is_written_for_the_viewer(tmp_path: Path):
    folder = committed(tmp_path / "run", [*SMALL, "parallelism.dp_shard=1", "profiling.memory_step=2"])
    main(str(folder.path))
    assert (folder.traces / "memory-step-00000002-rank-00000.pickle").stat().st_size > 0
    assert "allocated on the device" in (folder.traces / "memory-step-00000002-rank-00000.txt").read_text()
