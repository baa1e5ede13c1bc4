"""Runs of the memory gate in memory cgroups: whether a run that the gate admits at its limit is killed.

    sudo python benchmarks/memory_gate.py [--cases NAME ...] [--tight 1.0]

Needs root and cgroups (version 1 or 2) on Linux. Each case trains on this machine's CPU for four steps with two
asynchronous saves, first without a limit, which tells its real peak (anonymous and shared memory of all its processes),
and then in a group whose limit is `--tight` times what the gate predicts. There the gate reads the limit of its own
group; it must admit the run, which must not be killed. The last column is the predicted over the real peak.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
DENSE = "model=llama_debug model.dim=1024 model.ffn_dim=4096 model.layers=6 model.heads=16 model.kv_heads=16"
BATCH = "training.seq_len=128 training.global_batch_size=2 training.micro_batch_size=1"
ROWS = "training.seq_len=512 training.global_batch_size=8 training.micro_batch_size=4"
EXPERTS = "model=qwen3_moe_debug model.dim=1024 model.layers=6 model.moe.ffn_dim=1024 model.moe.experts=16"
FLUX = (
    "+experiment=flux_laptop data=images data.paths=[] tracking.images_every=0 model.dim=1024 "
    "model.heads=16 model.rope_axes=[16,24,24] training.global_batch_size=32 training.micro_batch_size=16"
)
CASES = {
    "fp32, async": f"{DENSE} {BATCH}",
    "fp32, async_process": f"{DENSE} {BATCH} checkpoint.mode=async_process",
    "bf16, full recomputation, sync": f"{DENSE} {ROWS} training.mixed_precision=bf16 activation_checkpoint=full "
    "checkpoint.mode=sync",
    "bf16, async": f"{DENSE} {ROWS} training.mixed_precision=bf16",
    "fp32, selective, large logits": f"{DENSE} {ROWS} model.vocab_size=32000 activation_checkpoint=selective",
    "dp_shard=2, async": f"{DENSE} {BATCH} parallelism.dp_shard=2",
    "dp_replicate=2, sync": f"{DENSE} {ROWS} parallelism.dp_replicate=2 checkpoint.mode=sync",
    "tp=2, async": f"{DENSE} {ROWS} parallelism.tp=2",
    "pp=2, 1F1B, async": f"{DENSE} {ROWS} parallelism.pp=2",
    "flux, fp32, async": FLUX,
    "flux, bf16, full, dp_shard=2": f"{FLUX} training.mixed_precision=bf16 activation_checkpoint=full "
    "parallelism.dp_shard=2",
    "experts, ep=2, async": f"{EXPERTS} {ROWS} parallelism.dp_shard=2 parallelism.ep=2",
}
"""Overrides by case."""
COMMON = "cluster.device=cpu training.steps=4 training.evaluate_every=0 checkpoint.every=2 plan.predict=always"


@dataclass(frozen=True)
class Outcome:
    """A run in a group."""

    code: int
    """Exit code of the command."""
    peak: int
    """Most bytes of anonymous and shared memory at once, sampled every 20 ms."""
    kills: int
    """Processes killed at the limit."""
    needed: int | None
    """Bytes that the gate predicted; None if the run was not started."""


class Group:
    """Memory cgroup of this benchmark; version 1 and 2 name its files differently."""

    def __init__(self) -> None:
        mount = Path("/sys/fs/cgroup")
        self._old = (mount / "memory" / "memory.limit_in_bytes").exists()
        self.path = (mount / "memory" if self._old else mount) / f"titan_exp_{os.getpid()}"
        if not self._old:
            (mount / "cgroup.subtree_control").write_text("+memory")
        self.path.mkdir()

    def limit(self, size: int) -> None:
        """Set the limit in bytes."""
        (self.path / ("memory.limit_in_bytes" if self._old else "memory.max")).write_text(str(size))

    @property
    def used(self) -> int:
        """Bytes of anonymous and shared memory."""
        values = self._values("memory.stat")
        return sum(values.get(name, 0) for name in (("rss", "shmem") if self._old else ("anon", "shmem")))

    @property
    def kills(self) -> int:
        """Processes killed since the group was made."""
        return self._values("memory.oom_control" if self._old else "memory.events").get("oom_kill", 0)

    def remove(self) -> None:
        """Remove the group, whose processes have ended."""
        for _ in range(50):
            with suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.1)

    def _values(self, name: str) -> dict[str, int]:
        return {key: int(value) for key, value in map(str.split, (self.path / name).read_text().splitlines())}


def run(overrides: str, limit: int | None) -> Outcome:
    """Train in a group of its own."""
    group = Group()
    try:
        if limit is not None:
            group.limit(limit)
        with tempfile.TemporaryDirectory() as folder:
            words = [*overrides.split(), *COMMON.split(), f"paths.runs={folder}"]
            command = [sys.executable, "-m", "titan_exp", "train", *words]
            with (Path(folder) / "log").open("w+") as log:
                joining = ["sh", "-c", 'echo $$ > "$0"; exec "$@"', str(group.path / "cgroup.procs"), *command]
                process = subprocess.Popen(joining, stdout=log, stderr=subprocess.STDOUT)
                peak = 0
                while process.poll() is None:
                    peak = max(peak, group.used)
                    time.sleep(0.02)
                log.seek(0)
                if process.returncode:
                    print(log.read()[-1500:])
            plans = [json.loads(path.read_text()) for path in Path(folder).glob("*/*/plan.json")]
            needed = plans[0].get("needed_bytes") if plans else None
            return Outcome(process.returncode, peak, group.kills, needed)
    finally:
        group.remove()


def main() -> None:
    """Run the cases and print their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--tight", type=float, default=1.0, help="limit over prediction; 0 for no limit")
    arguments = parser.parse_args()
    print(f"{'case':32} {'predicted':>9} {'real GiB':>9} {'limited':>8} {'killed':>7} {'ratio':>6}")
    for name in arguments.cases:
        free = run(CASES[name], None)
        if free.needed is None:
            print(f"{name:32} was not started")
            continue
        if not arguments.tight:
            print(
                f"{name:32} {free.needed / GIB:9.3f} {free.peak / GIB:9.3f} {'':16} {free.needed / free.peak:6.2f}",
                flush=True,
            )
            continue
        # A page more, since the gate reads a limit in whole pages.
        bound = run(CASES[name], round(free.needed * arguments.tight) + 4096)
        ended = "ran" if bound.code == 0 else "refused" if bound.needed is None else f"code {bound.code}"
        numbers = f"{free.needed / GIB:9.3f} {free.peak / GIB:9.3f} {ended:>8} {bound.kills:7d}"
        print(f"{name:32} {numbers} {free.needed / free.peak:6.2f}", flush=True)


if __name__ == "__main__":
    main()
