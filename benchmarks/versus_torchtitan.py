"""Comparison with torchtitan 0.2.2 on one GPU: tokens/s, memory and first losses from the same weights.

    python benchmarks/versus_torchtitan.py                     # all rows; needs a GPU and torchtitan==0.2.2
    python benchmarks/versus_torchtitan.py --seconds 600 --rows 8b_bf16_compile,options
    python benchmarks/versus_torchtitan.py --rows 8b_bf16_compile+compile.cuda_graphs=true
    python benchmarks/versus_torchtitan.py --plan              # the planner's table of all rows; needs no GPU
    python benchmarks/versus_torchtitan.py --plan --classes    # and kernels of every row: launches, bytes, time
    python benchmarks/versus_torchtitan.py --tiny              # tiny shapes on a CPU, to check both sides

Installs nothing and needs no installed titan_exp. Both train from the same cached weights on the same tokens in the
same order with the same AdamW and a constant learning rate, in turn (A B B A) in fresh processes. The table compares
the median step after warm-up, timed by device events without synchronization, and the peak memory of the timed steps.
Every process's result is flushed to rows.jsonl of the output folder, and table.md is written again after each, so that
a time limit costs only the last rows.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.versus.cases import PEER, rows_named
from benchmarks.versus.job import Job

os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
WARMUP, TIMED = 10, 15
"""Minimum numbers of warm-up and timed steps."""
FILL_HELP = "first write weights and compile every row, N processes at a time; without, 2 on 100 GiB, else 1; 0 if tiny"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "titan_exp" / "versus_torchtitan"
"""Default folder of initial weights."""


def what_is_missing(*, tiny: bool) -> list[str]:
    """Missing requirements of the comparison."""
    import torch

    missing = []
    if importlib.util.find_spec("torchtitan") is None:
        missing.append(f"torchtitan is not importable: make peer installs {PEER} into .peer, for PYTHONPATH=.peer")
    elif (version := importlib.metadata.version("torchtitan")) != PEER:
        missing.append(f"torchtitan is {version}; the goals are about {PEER}, and so are the option names used here")
    if not tiny and not torch.cuda.is_available():
        missing.append("torch finds no CUDA GPU here; --tiny checks both sides on a CPU, --plan plans the rows")
    return missing


def run_one_role(role: str, job: Job, cache: Path) -> int:
    """Run a role in this process; its result is the last line that it prints."""
    if role == "weights":
        from benchmarks.versus.weights import export_weights

        found = {"folder": str(export_weights(job, cache))}
    elif role == "ours":
        from benchmarks.versus.ours import ours

        found = ours(job, cache)
    else:
        from benchmarks.versus.peer import peer

        found = peer(job)
    print(json.dumps(found), flush=True)
    return 0


def print_plans(rows: list[str], output: Path | None, *, classes: bool = False) -> int:
    """Plan rows and print the table; `plan.md` of the output folder, and reserved GiB in `plan.json`, after each row.

    With `classes`, both have a table of each row's kernels too.
    """
    from benchmarks.versus.planned import class_table, plan_row, plan_table, present_device

    def text() -> str:
        return plan_table(planned) + (f"\n{class_table(planned)}" if classes else "")

    planned, device = [], present_device()
    for row in rows:
        planned.append(plan_row(row, device))
        print(f"{row}: planned in {planned[-1].seconds:.0f} s", file=sys.stderr, flush=True)
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            sizes = json.dumps({it.row: it.reserved for it in planned})
            for name, content in (("plan.md", text()), ("plan.json", sizes)):
                partial = output / f"{name}.partial"
                partial.write_text(content, encoding="utf-8")
                partial.replace(output / name)
    print(text(), end="")
    return 0


def processes_that_fill(gib: float) -> int:
    """Number of processes that compile at a time on a GPU of `gib`; each takes up to 50 GiB."""
    return 2 if gib >= 100 else 1


def compare(options: argparse.Namespace, rows: list[str]) -> int:
    """Run the rows of both sides and print the table; returns 1 if a process failed."""
    import torch

    from benchmarks.versus.fit import read_planned, too_large
    from benchmarks.versus.results import Results
    from benchmarks.versus.turns import Budget, Session

    budget = Budget(options.seconds)  # from here on, the caches' included
    jobs = [Job(row, options.warmup, options.steps, options.tiny, tokenizer=options.tokenizer) for row in rows]
    device = f"{platform.processor() or platform.machine()} CPU" if options.tiny else torch.cuda.get_device_name()
    head = f"{time.strftime('%Y-%m-%d')}, {device}, torch {torch.__version__}, {options.warmup} + {options.steps} steps"
    if options.tiny:
        head += ". Tiny shapes in fp32 on a CPU: the rates mean nothing."
    folder = options.output or Path("outputs") / f"versus-{time.strftime('%Y%m%d-%H%M%S')}"
    results = Results(folder, head)
    gib = float("inf") if options.tiny else torch.cuda.get_device_properties(0).total_memory / 2**30
    left_out = too_large(rows, gib, read_planned(options.planned))
    for text in left_out.values():
        results.note(text)
    session = Session(budget, results, options.cache, left_out.keys())
    filling = options.fill_caches
    if filling is None:
        filling = 0 if options.tiny else processes_that_fill(gib)
    if filling:
        session.fill_caches(jobs, filling)
    session.run(jobs, options.rounds)
    print(results.table(), end="")
    print(f"\nResults: {folder / 'rows.jsonl'}, {folder / 'table.md'}", file=sys.stderr)
    return 1 if results.failed else 0


def parse_options(words: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="all", help="comma-separated: all, options, CASE, CASE+OVERRIDE+...")
    parser.add_argument("--seconds", type=float, help="budget; a row that would not fit is left out, with a note")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side, 2 without (A B B A)")
    parser.add_argument("--warmup", type=int, default=WARMUP, help=f"steps before timing, at least {WARMUP}")
    parser.add_argument("--steps", type=int, default=TIMED, help=f"timed steps, at least {TIMED}")
    parser.add_argument(
        "--output", type=Path, help="folder of rows.jsonl, table.md and logs; outputs/versus-TIME without"
    )
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"folder of initial weights, {CACHE} without")
    parser.add_argument("--fill-caches", type=int, metavar="N", help=FILL_HELP)
    parser.add_argument("--tokenizer", default="bytes", help="data.tokenizer of both sides: bytes, or a file")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes in fp32 on a CPU")
    parser.add_argument("--plan", action="store_true", help="plan the rows instead of running them")
    parser.add_argument("--planned", type=Path, help="plan.json of --plan; rows of ours beyond the GPU are left out")
    parser.add_argument(
        "--classes", action="store_true", help="with --plan: launches, bytes and time of a step by class"
    )
    parser.add_argument("--role", choices=("weights", "ours", "peer"), help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Command line; returns 2 if the comparison cannot run here."""
    options = parse_options(words)
    if options.role:
        return run_one_role(options.role, Job(**json.loads(options.job)), options.cache)
    try:
        rows = rows_named(options.rows)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.plan:
        return print_plans(rows, options.output, classes=options.classes)
    if missing := what_is_missing(tiny=options.tiny):
        print("This cannot be compared here:", *(f"  {line}" for line in missing), sep="\n", file=sys.stderr)
        return 2
    if not options.tiny and (options.warmup < WARMUP or options.steps < TIMED):
        print(f"--warmup is at least {WARMUP} and --steps at least {TIMED}.", file=sys.stderr)
        return 2
    return compare(options, rows)


if __name__ == "__main__":
    sys.exit(main())
