"""Planner accuracy against memory measured with another trainer on a GPU.

`python benchmarks/plan_anchors.py` plans an 8B model at 8,192 tokens a sequence, sharded by FSDP2 over worlds of 8 and
128, and prints GiB beside those of a plain trainer of the same model on an H200 with a fake process group (torch 2.11).
Shapes, precision and layout are equal; modules, loss and the selective activation checkpointing policy differ, so the
errors include the difference between two trainers.
"""

import time
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.machine.devices import offered_devices
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.plan.cuda.devices import DEVICES
from titan_exp.plan.predict import predict
from titan_exp.rules import check

GIB = 2**30
COMMON = [
    "model=llama3_8b",
    "cluster=slurm_h100",
    "compile=none",
    "training.seq_len=8192",
    "training.mixed_precision=bf16",
]


@dataclass(frozen=True)
class Anchor:
    """A measured run."""

    name: str
    overrides: str
    """Overrides of our closest configuration."""
    measured: tuple[float, float, float]
    """GiB allocated, reserved in segments, reserved in expandable segments."""


ANCHORS = [
    Anchor(
        "full recompute, 2 sequences, world 8",
        "activation_checkpoint=full parallelism.dp_shard=8 training.global_batch_size=16",
        (39.998, 53.742, 49.357),
    ),
    Anchor(
        "no recompute, 1 sequence, world 8",
        "parallelism.dp_shard=8 training.global_batch_size=8",
        (68.164, 77.201, 75.855),
    ),
    Anchor(
        "selective, 2 sequences, world 8",
        "activation_checkpoint=selective parallelism.dp_shard=8 training.global_batch_size=16",
        (67.060, 81.555, 77.346),
    ),
    Anchor(
        "selective, 2 sequences, world 128",
        "activation_checkpoint=selective parallelism.dp_shard=128 training.global_batch_size=256 "
        "data.virtual_shards=128",
        (56.551, 66.627, 63.146),
    ),
    Anchor(
        "selective and inductor, 2 sequences, world 8",
        "activation_checkpoint=selective compile=blocks parallelism.dp_shard=8 training.global_batch_size=16",
        (63.060, 75.801, 72.971),
    ),
]


def main() -> None:
    table = Table(box=box.SIMPLE_HEAD, title="Llama 3 8B, 8,192 tokens, GiB: planned / measured", title_justify="left")
    for name in ("", "allocated", "reserved, segments", "reserved, expandable", "planned in"):
        table.add_column(name, justify="left" if not name else "right")
    for anchor in ANCHORS:
        experiment = to_experiment(compose([*COMMON, *anchor.overrides.split()]))
        experiment = resolve_layout(check(experiment), offered_devices(experiment.cluster))
        began = time.perf_counter()
        (rank,) = predict(experiment, DEVICES["h200"]).ranks
        took = time.perf_counter() - began
        assert rank.allocator is not None, "it is planned for CUDA"
        assert rank.expandable, "the default"
        planned = (rank.allocator.allocated, rank.other_segments, rank.bytes)
        cells = [
            f"{guess / GIB:.2f} / {fact:.2f} ({guess / GIB / fact - 1:+.1%})"
            for guess, fact in zip(planned, anchor.measured, strict=True)
        ]
        table.add_row(anchor.name, *cells, f"{took:.0f} s")
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
