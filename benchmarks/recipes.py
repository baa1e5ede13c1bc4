"""Loss of numeric recipes, trained for a few hundred steps from the same weights on the same data.

python benchmarks/recipes.py [steps=200] [only=CASE] [key=value ...]

`only` selects the baseline and the cases with that prefix.

Recipes are emulated where the device does not support them, so this measures numerics, not speed. The table compares
mean losses of the last sixth of the steps. The rows after the baseline, bf16 with other summation orders, show the
noise level; single steps differ more.
"""

import os
import platform
import shutil
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import mean

os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
sys.path.insert(0, str(Path(__file__).parents[1]))

BASE = [
    *("model=llama_debug", "training.seq_len=128", "training.global_batch_size=16", "training.evaluate_every=0"),
    *("training.mixed_precision=bf16", "tracking.log_every=1", "checkpoint=none", "parallelism.dp_shard=1"),
    *("optimizer.lr=1e-3", "lr_schedule.warmup_steps=20", "lr_schedule.decay_steps=50"),
]

CASES = {
    "bf16": [],
    "bf16, sums in another order": ["training.micro_batch_size=4"],
    "bf16, sums in a third order": ["training.micro_batch_size=2"],
    "bf16, another attention kernel": ["model.attention_backend=math"],
    "fp32": ["training.mixed_precision=fp32"],
    "float8_tensorwise": ["quantization=float8_tensorwise"],
    "float8_rowwise": ["quantization=float8_rowwise"],
    "float8_rowwise_gw_hp": ["quantization=float8_rowwise_gw_hp"],
    "mxfp8": ["quantization=mxfp8"],
    "mxfp8, first and last block high": [
        "quantization=mxfp8",
        "quantization.high_precision_first=1",
        "quantization.high_precision_last=1",
    ],
    "nvfp4": ["quantization=nvfp4"],
    "nvfp4, stochastic rounding": ["quantization=nvfp4", "quantization.stochastic_rounding=true"],
    "nvfp4, first and last block high": [
        "quantization=nvfp4",
        "quantization.high_precision_first=1",
        "quantization.high_precision_last=1",
    ],
    "moments in bf16": ["optimizer.state_precision=bf16"],
    "moments in int8": ["optimizer.state_precision=int8"],
    "moments in fp8": ["optimizer.state_precision=fp8"],
}


def main(arguments: list[str]) -> None:
    """Train every case and print the table."""
    import torch

    own = {"steps": "200", "only": ""}
    words = [word for word in arguments if word.partition("=")[0] not in own]
    own |= {key: value for key, _, value in (word.partition("=") for word in arguments) if key in own}
    steps = int(own["steps"])
    print(f"{platform.processor() or platform.machine()}, {os.environ['OMP_NUM_THREADS']} threads, ", end="")
    print(f"torch {torch.__version__}, torchao {version('torchao')}, {steps} steps\n")
    print(f"| {'case':33s} | loss at the end | − bf16 | largest of a step | s |\n|---|--:|--:|--:|--:|")
    baseline: list[float] = []
    for name, overrides in CASES.items():
        if name != "bf16" and not name.startswith(own["only"]):
            continue
        begin = time.perf_counter()
        losses = curve([*BASE, f"training.steps={steps}", *overrides, *words])
        baseline = baseline or losses
        end = steps * 5 // 6
        less = [mine - theirs for mine, theirs in zip(losses, baseline, strict=True)]
        apart = f"{mean(less[end:]):+.4f} | {max(map(abs, less)):.4f}" if name != "bf16" else " | "
        print(f"| {name:33s} | {mean(losses[end:]):.4f} | {apart} | {time.perf_counter() - begin:.0f} |", flush=True)


def curve(overrides: list[str]) -> list[float]:
    """Losses of a run on this device."""
    from titan_exp.config.hydra.compose import compose
    from titan_exp.config.layout.resolved_layout import resolve_layout
    from titan_exp.config.schema.typed_config import to_experiment, to_yaml
    from titan_exp.rules import check
    from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
    from titan_exp.tracking.run_folder.run_folder import RunFolder
    from titan_exp.trainer.distributed import joined
    from titan_exp.trainer.trainer import Trainer

    experiment = check(resolve_layout(to_experiment(compose(overrides)), 1))
    path = Path(tempfile.mkdtemp())
    try:
        folder = RunFolder(path)
        folder.config.write_text(to_yaml(experiment))
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TITAN_EXP_RENDEZVOUS": str(path / "meet")}
        with joined(experiment.cluster) as device:
            trainer = Trainer(experiment, folder, device)
            trainer.restore()
            trainer.run()
            trainer.report.close("done")
        return [float(row["loss"] or 0) for row in read_metrics(folder.metrics)]
    finally:
        shutil.rmtree(path)


if __name__ == "__main__":
    main(sys.argv[1:])
