"""What the planner predicts beside what others have published of their trainer, each difference stated.

`python benchmarks/published_anchors.py [--only WORD]` plans runs of TorchTitan's performance report of December 2024
(`benchmarks/llama3_h100_202412_torchtitan.md` in its repository: Llama 3.1 on H100 with 96 GB of HBM2e at 2.4 TB/s and
500 W, 8 to a host, 400 Gbit/s each) and prints reserved memory and tokens a second of a GPU beside the report's. It is
another trainer on other GPUs than the device table's: this tells whether predictions are of the right size, not how
exact they are. What the planner refuses, asynchronous tensor parallelism, is left out of the plan, and said.
"""

import argparse
import time
from dataclasses import dataclass, replace

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
H100 = replace(DEVICES["h100"], name="H100 96GB HBM2e", memory_gb=103.0, bandwidth_tbs=2.4)
COMMON = ["cluster=slurm_h100", "training.mixed_precision=bf16", "data.virtual_shards=128"]
FLOAT8 = "compile=blocks quantization=float8_tensorwise quantization.float8_all_gather=true"
SMALL = "model=llama3_1_8b training.seq_len=8192 activation_checkpoint=selective training.micro_batch_size=2 "
LONG = "model=llama3_1_8b activation_checkpoint=full training.micro_batch_size=1 parallelism.cp_method=ring " + FLOAT8
LARGE = (
    "model=llama3_1_405b training.seq_len=8192 activation_checkpoint=full training.micro_batch_size=1 "
    "parallelism.dp_shard=8 parallelism.tp=8 parallelism.pp=8 training.global_batch_size=256 "
)


@dataclass(frozen=True)
class Anchor:
    """A published run."""

    name: str
    overrides: str
    """Of ours, which comes nearest."""
    memory: float
    """GiB reserved, the most of all GPUs."""
    speed: float
    """Tokens a second of a GPU."""
    unlike: str = ""
    """What the published run has that the planned one has not."""


ANCHORS = [
    Anchor("8B, fsdp 8", SMALL + "parallelism.dp_shard=8 training.global_batch_size=16", 82.4, 5762),
    Anchor(
        "8B, fsdp 8, compile",
        SMALL + "parallelism.dp_shard=8 training.global_batch_size=16 compile=blocks",
        77.0,
        6667,
    ),
    Anchor(
        "8B, fsdp 8, compile, float8",
        SMALL + f"parallelism.dp_shard=8 training.global_batch_size=16 {FLOAT8}",
        76.8,
        8532,
    ),
    Anchor("8B, fsdp 128", SMALL + "parallelism.dp_shard=128 training.global_batch_size=256", 67.0, 5605),
    Anchor(
        "8B, fsdp 128, compile",
        SMALL + "parallelism.dp_shard=128 training.global_batch_size=256 compile=blocks",
        62.0,
        6514,
    ),
    Anchor(
        "8B, 32k tokens, fsdp 8, compile, float8",
        f"{LONG} training.seq_len=32768 parallelism.dp_shard=8 training.global_batch_size=8",
        83.9,
        3890,
    ),
    Anchor(
        "8B, 64k tokens, fsdp 4 x cp 2, compile, float8",
        f"{LONG} training.seq_len=65536 parallelism.dp_shard=4 parallelism.cp=2 training.global_batch_size=4",
        84.2,
        2540,
    ),
    Anchor(
        "8B, 256k tokens, cp 8, compile, float8",
        f"{LONG} training.seq_len=262144 parallelism.dp_shard=1 parallelism.cp=8 training.global_batch_size=1",
        84.5,
        548,
    ),
    Anchor(
        "70B, fsdp 32 x tp 8, compile, float8",
        "model=llama3_1_70b training.seq_len=8192 activation_checkpoint=full training.micro_batch_size=16 "
        f"parallelism.dp_shard=32 parallelism.tp=8 training.global_batch_size=512 {FLOAT8}",
        71.9,
        829,
    ),
    Anchor("405B, fsdp 8 x tp 8 x pp 8, 1F1B", LARGE, 82.5, 100, "compile, float8, async TP"),
    Anchor(
        "405B, the same, interleaved",
        LARGE + "parallelism.pp_schedule=Interleaved1F1B",
        72.7,
        128,
        "compile, float8, async TP",
    ),
]


def main() -> None:
    """Plan and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="anchors whose names have this in them")
    only = parser.parse_args().only
    chosen = [anchor for anchor in ANCHORS if only in anchor.name]
    table = Table(box=box.SIMPLE_HEAD, title="planned / published, on one H100", title_justify="left")
    for name in ("", "GiB reserved", "tokens/s", "planned without", "planned in"):
        table.add_column(name, justify="right" if name in ("GiB reserved", "tokens/s", "planned in") else "left")
    for anchor in chosen:
        experiment = to_experiment(compose([*COMMON, *anchor.overrides.split()]))
        experiment = resolve_layout(check(experiment), offered_devices(experiment.cluster))
        began = time.perf_counter()
        plan = predict(experiment, H100)
        took = time.perf_counter() - began
        speed = plan.tokens_per_second
        assert speed is not None, "the device's rates are known"
        memory = max(rank.bytes for rank in plan.ranks) / GIB
        cells = [
            f"{memory:.1f} / {anchor.memory:.1f} ({memory / anchor.memory - 1:+.0%})",
            f"{speed:,.0f} / {anchor.speed:,.0f} ({speed / anchor.speed - 1:+.0%})",
        ]
        table.add_row(anchor.name, *cells, anchor.unlike, f"{took:.0f} s")
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
