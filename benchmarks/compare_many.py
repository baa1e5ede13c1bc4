"""Benchmark of `titan-exp compare` on many run folders.

`python benchmarks/compare_many.py [RUNS]`, 1,000 by default. The folders are copies of one real run of 50 steps with
other seeds and learning rates; reading, comparing and drawing are timed separately, best of three, in this process.
"""

import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from titan_exp.compare.comparison import compare
from titan_exp.compare.output.comparison_page import to_html
from titan_exp.compare.runs import select

SEEDS = 4


def train(runs: Path) -> Path:
    words = ["+experiment=smoke", "experiment.name=one", "training.steps=50", "checkpoint=none", f"paths.runs={runs}"]
    subprocess.run([sys.executable, "-m", "titan_exp", "train", *words], check=True, capture_output=True)
    return next((runs / "one").iterdir())


def copies(model: Path, folder: Path, count: int) -> None:
    config = yaml.safe_load((model / "config.yaml").read_text())
    code = json.loads((model / "code.json").read_text())
    small = ("env.json", "state.json", "attempts.jsonl", "metrics.jsonl", "overrides.yaml")
    texts = {name: (model / name).read_text() for name in small}
    for number in range(count):
        config["experiment"]["seed"], config["optimizer"]["lr"] = number % SEEDS, 1e-4 * (1 + number // SEEDS)
        run = folder / f"{number:012x}"
        run.mkdir(parents=True)
        texts["config.yaml"] = yaml.safe_dump(config, sort_keys=False)
        texts["code.json"] = json.dumps({**code, "run_id": run.name, "experiment_id": run.name})
        for name, text in texts.items():
            (run / name).write_text(text)


def best(work: Callable[[], Any]) -> tuple[float, Any]:
    times: list[float] = []
    result = None
    for _ in range(3):
        begin = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - begin)
    return min(times), result


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as place:
        runs = Path(place)
        copies(train(runs), runs / "many", count)
        reading, selection = best(lambda: select(["many"], runs))
        comparing, comparison = best(lambda: compare(selection))
        drawing, page = best(lambda: to_html(comparison))
    print(f"{count:,} runs of 50 rows, {len(comparison.rows)} rows of {SEEDS} seeds; {platform.processor() or 'CPU'}")
    print(f"read {reading:.2f} s, compare {comparing:.2f} s, page {drawing:.2f} s ({len(page) / 2**20:.1f} MiB)")


if __name__ == "__main__":
    main()
