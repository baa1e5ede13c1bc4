"""Small layouts whose prediction is compared with what real ranks do, and the comparison itself."""

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tests.ranks import run_ranks
from titan_exp.config.compose import compose
from titan_exp.config.convert import load_experiment, to_experiment, to_yaml
from titan_exp.config.experiment import Experiment
from titan_exp.config.layout import resolve_layout, world_size
from titan_exp.config.rules import check
from titan_exp.plan.trace import Trace, trace_step
from titan_exp.plan.world import pretended_rank, ranks_of_pipeline
from titan_exp.tracking.run_folder import RunFolder

SMALL = [
    "model=llama_debug",
    "training.steps=4",
    "training.seq_len=64",
    "training.global_batch_size=8",
    "training.evaluate_every=0",
    "checkpoint=none",
    "cluster.device=cpu",
]

LAYOUTS = {
    "one device": "",
    "fsdp 2, accumulated": "parallelism.dp_shard=2 training.micro_batch_size=1",
    "fsdp 4, bf16, full recompute": "parallelism.dp_shard=4 training.mixed_precision=bf16 activation_checkpoint=full",
    "fsdp 2, chunked loss": "parallelism.dp_shard=2 training.loss_chunk_tokens=37",
    "hsdp 2x2": "parallelism=hsdp activation_checkpoint=every_n activation_checkpoint.every=2",
    "ddp 2, bf16": "parallelism=ddp training.mixed_precision=bf16 optimizer.implementation=foreach",
    "tp 2": "parallelism.tp=2 parallelism.dp_shard=1",
    "tp 2, no sequence parallelism, bf16": "parallelism.tp=2 parallelism.sequence_parallel=false "
    "parallelism.loss_parallel=false training.mixed_precision=bf16",
    "fsdp 2 x tp 2, selective": "parallelism.dp_shard=2 parallelism.tp=2 activation_checkpoint=selective",
    "pp 2, 1F1B": "parallelism.pp=2 parallelism.pp_microbatches=4",
    "pp 2 x fsdp 2, ZBV": "parallelism.pp=2 parallelism.dp_shard=2 parallelism.pp_schedule=ZBVZeroBubble "
    "parallelism.pp_microbatches=4",
    "cp 2, ring": "parallelism.cp=2",
    "cp 2, all-gather, document mask": "parallelism.cp=2 parallelism.cp_method=allgather data.document_mask=true",
    "cp 2, Ulysses": "parallelism.cp=2 parallelism.cp_method=ulysses",
    "pp 2 x cp 2 x tp 2": "parallelism.pp=2 parallelism.cp=2 parallelism.tp=2 parallelism.pp_microbatches=2",
    "8-bit moments, offload": "parallelism.dp_shard=2 optimizer.state_precision=int8 parallelism.cpu_offload=true",
}
"""Overrides by name."""


@dataclass(frozen=True)
class Numbers:
    """What is compared, of one pipeline rank."""

    parameters: int
    gradients: int
    optimizer: int
    messages: dict[tuple[str, str], int]
    flops: int
    peak: int
    passing: int
    """Of the peak, what is neither parameter nor optimizer state."""
    standing: int
    """Of that, what stands there between steps: buffers and the batch."""
    allocated: int = 0
    """Most that torch's own allocator has handed out in a step beyond what it had before; measured only."""


def experiment_of(overrides: str) -> Experiment:
    """The experiment that is planned and run."""
    return check(resolve_layout(to_experiment(compose([*SMALL, *overrides.split()])), 1))


def predicted(experiment: Experiment, path: Path, mutate: Callable[[], None] | None = None) -> list[Numbers]:
    """Of each pipeline rank, by one process, whose annotations of shapes are not checked: they know no sharding."""
    _write(experiment, path)
    (found,) = run_ranks(1, _foretell, str(path), mutate)
    return [Numbers(**numbers) for numbers in found]


def measured(experiment: Experiment, path: Path, mutate: Callable[[], None] | None = None) -> list[Numbers]:
    """Of each pipeline rank, on as many processes as the layout has. `mutate` is called first in each of them."""
    _write(experiment, path)
    results = run_ranks(world_size(experiment), _on_rank, str(path), mutate)
    return [Numbers(**results[rank]) for rank in ranks_of_pipeline(experiment)]


def _write(experiment: Experiment, path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    RunFolder(path).config.write_text(to_yaml(experiment))


def _foretell(path: str, mutate: Callable[[], None] | None) -> list[dict[str, Any]]:
    if mutate is not None:
        mutate()
    experiment = load_experiment(RunFolder(path).config)
    found = []
    for rank in ranks_of_pipeline(experiment):
        with pretended_rank(experiment, rank) as it:
            found.append(asdict(_numbers(trace_step(it.parts, it.step, first_step=it.shortest_step))))
    return found


def _numbers(trace: Trace) -> Numbers:
    settled = trace.kept["parameters"] + trace.kept["optimizer"]
    return Numbers(
        trace.kept["parameters"],
        trace.gradients,
        trace.kept["optimizer"],
        dict(trace.work.messages),
        trace.work.flops,
        trace.peak.bytes,
        trace.peak.bytes - settled,
        trace.kept["other"],
    )


def _on_rank(path: str, mutate: Callable[[], None] | None) -> dict[str, Any]:
    """The trainer itself, its steps watched."""
    if mutate is not None:
        mutate()
    from titan_exp.trainer.assemble import Assembly
    from titan_exp.trainer.distributed import joined
    from titan_exp.trainer.step import agree, train_step
    from titan_exp.trainer.train import Trainer

    torch.set_num_threads(1)
    folder = RunFolder(path)
    experiment = load_experiment(folder.config)
    with joined(experiment.cluster) as device:
        trainer = Trainer(experiment, folder, device)

        batches = [next(trainer.loader) for _ in range(trainer.accumulation)]
        tokens, _, _ = agree(batches, trainer.mesh, stop=False, save=False)

        def step() -> None:
            lr, clip = trainer.schedule(1), experiment.training.max_grad_norm
            train_step(
                trainer.model, trainer.optimizer, batches, tokens=tokens, lr=lr, max_grad_norm=clip, mesh=trainer.mesh
            )

        # The parts are handed on, not put together again.
        parts = Assembly(trainer.mesh, None, trainer.model, trainer.optimizer)  # type: ignore[arg-type]
        numbers = asdict(_numbers(trace_step(parts, step))) | {"allocated": _allocated(step, Path(path))}
        trainer.report.close("done")
        return numbers


def _allocated(step: Callable[[], None], path: Path) -> int:
    """The largest sum of allocations and frees of a step, as torch's profiler reports them."""
    trace = path / f"trace-{os.environ['RANK']}.json"
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    profiler.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    changes = [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]
    return max(itertools.accumulate(changes))
