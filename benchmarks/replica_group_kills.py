"""Random SIGKILLs of ranks, replica groups and the lighthouse while `titan-exp train` runs on this machine's CPU.

    python benchmarks/replica_group_kills.py OUT [--kills 25] [--seconds 420] [--seed 0] [--groups 3] [--dp-shard 1]
    python benchmarks/replica_group_kills.py OUT --semi-sync diloco       # or local_sgd, streaming_diloco
    python benchmarks/replica_group_kills.py OUT --report

A call trains one run in OUT/piece-SEED with three groups, and kills at random moments of the forward pass, of the sum
of gradients, of the commit, of the quorum, of healing (the group that receives, and the one that sends) and of a save.
It then trains the same steps with one group, and checks that every step has one row and that the curve is the same to
rounding. In semi-synchronous training it also kills while a fragment is sent, in a synchronization, and while states of
the groups are collected; the other run has as many groups, and the curves differ, since a death changes the mean: the
final losses are compared. A piece that is complete is not run again. `--report` prints a table of all pieces: kills,
and the distribution of the stall, the seconds that the survivors waited or computed again in the rows after a kill.
"""

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
ORDERS = "TITAN_EXP_KILL_ORDERS"
"""Environment variable: folder of the orders that the ranks carry out."""
HEARTBEAT = 1.0
PHASES = ("forward", "all-reduce", "commit", "quorum", "save", "heal: receiver", "heal: sender")
SEMI_SYNC_PHASES = ("forward", "send", "synchronization", "commit", "quorum", "collect", *PHASES[4:])
LEADERS = ("save", "heal: receiver", "heal: sender")
"""Phases of some group; in others the group is drawn."""
NEEDED = {"heal: receiver": 2}
"""Living groups, the healing ones included, without which a kill could end the run; 3 in other phases, since one of
them may be killed while it heals."""
WAIT = 600
"""Seconds for the rest of a run's steps."""
LONGEST = 1.0
"""Seconds of a phase within which a kill happens."""
PAUSE = 0.1
"""Seconds added to every forward pass until the last kill, so that steps do not run out."""
TRAIN = [
    *("model=llama_debug", "training.seq_len=64", "training.global_batch_size=8", "training.micro_batch_size=1"),
    *("training.evaluate_every=0", "tracking.log_every=1", "checkpoint.every=20", "optimizer.lr=1e-5"),
    *("optimizer.eps=1e-4", "cluster.device=cpu", f"cluster.group_heartbeat_seconds={HEARTBEAT:g}"),
    *("cluster.group_timeout_seconds=30", "lr_schedule.warmup_steps=1"),
]
INTERVAL = 4
SEMI_SYNC = {
    "local_sgd": ["semi_sync=local_sgd"],
    "diloco": ["semi_sync=diloco"],
    "streaming_diloco": ["semi_sync=streaming_diloco", "semi_sync.fragments=2", "semi_sync.delay=1"],
}
LAST_ROWS = 50
"""Rows that the final loss is a mean of."""


def rank_main(path: str) -> None:
    """Train as a rank that carries out the orders in its phase."""
    from titan_exp.checkpoint.checkpointer import Checkpointer
    from titan_exp.extensions.replica_groups.groups import ReplicaGroups
    from titan_exp.extensions.replica_groups.semi_sync import SemiSync
    from titan_exp.trainer import rank_main as real
    from titan_exp.trainer.forward_backward import EagerModel

    victim = _Victim(Path(os.environ[ORDERS]))
    join = ReplicaGroups.join

    def joined(groups: Any, step: int, *position: int | None) -> Any:
        victim.groups, victim.step, victim.by_position = groups, step + 1, bool(position)
        return join(groups, step, *position)

    ReplicaGroups.join = joined  # type: ignore[method-assign]
    for owner, name, phase in (
        (ReplicaGroups, "join", "quorum"),
        (EagerModel, "forward_backward", "forward"),
        (ReplicaGroups, "sum_gradients", "all-reduce"),
        (ReplicaGroups, "commit", "commit"),
        (SemiSync, "send", "send"),
        (SemiSync, "apply", "synchronization"),
        (SemiSync, "collect_states", "collect"),
        (Checkpointer, "save", "save"),
        (ReplicaGroups, "receive_state", "heal: receiver"),
        (ReplicaGroups, "_send", "heal: sender"),
    ):
        setattr(owner, name, victim.phase(getattr(owner, name), phase))
    real.main(path)


class _Victim:
    """Kills this rank, or all of its group, at a random moment of an ordered phase."""

    def __init__(self, orders: Path) -> None:
        self.orders, self.groups, self.step = orders, None, 0
        self.by_position = False
        """True if quorums know positions, of which a step has two, as in semi-synchronous training."""
        self._seconds: dict[str, float] = {}

    def phase(self, method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def in_phase(*arguments: Any, **named: Any) -> Any:
            began = time.monotonic()
            self._obey(phase)
            if phase == "forward" and (self.orders / "pause").exists():
                time.sleep(PAUSE)
            result = method(*arguments, **named)
            self._seconds[phase] = time.monotonic() - began
            return result

        return in_phase

    def _obey(self, phase: str) -> None:
        groups: Any = self.groups
        path = self.orders / f"{phase}.json"
        if groups is None or not self._survivable(phase) or not path.exists():
            return
        mine = path.with_name(f"claimed-{os.getpid()}")
        try:
            order = json.loads(path.read_text())
            if order["group"] not in (None, groups.group.number):
                return
            path.rename(mine)
        except OSError:
            return  # another rank was first
        threading.Thread(target=self._kill, args=(phase, order), daemon=True).start()
        if phase.startswith("heal"):
            time.sleep(order["moment"] * 0.02)  # a transfer of this model takes a few milliseconds

    def _survivable(self, phase: str) -> bool:
        """True if another group has the run's state, even if one more dies."""
        groups: Any = self.groups
        quorum = groups.quorum
        return quorum is not None and quorum.size >= NEEDED.get(phase, 3) and len(quorum.behind) < quorum.size - 1

    def _kill(self, phase: str, order: dict[str, Any]) -> None:
        # A wait for a dead group is no moment of the phase.
        time.sleep(order["moment"] * min(self._seconds.get(phase, 0.0), LONGEST))
        if not self._survivable(phase):
            return
        number, pids = self.groups.group.number, [os.getpid()]  # type: ignore[union-attr]
        if order["target"] == "group":
            parent = psutil.Process().parent()
            pids = [child.pid for child in parent.children()] if parent is not None else pids
            pids.sort(key=lambda pid: pid == os.getpid())  # itself last
        others = self.groups.quorum.step  # type: ignore[union-attr]
        # A newcomer that heals knows no step of its own.
        step = max(self.step, 1 + ((others + 1) // 2 if self.by_position else others))
        note(self.orders, {"phase": phase, "target": order["target"], "group": number, "step": step})
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def note(orders: Path, kill: dict[str, Any]) -> None:
    """Record a kill."""
    with (orders / "kills.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), **kill}) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a JSON-lines file; empty if there is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def train(out: Path, name: str, steps: int, *overrides: str, orders: Path | None = None) -> subprocess.Popen[bytes]:
    """Start `titan-exp train`."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    if orders is not None:
        environment |= {ORDERS: str(orders), "TITAN_EXP_RANK_MAIN": "benchmarks.replica_group_kills.rank_main"}
    words = [*TRAIN, f"training.steps={steps}", f"paths.runs={out}", f"experiment.name={name}", *overrides]
    with (out / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "titan_exp", "train", *words], env=environment, stdout=log, stderr=log
        )


def run_folder(out: Path, name: str) -> Path | None:
    """Folder of the only run of a name; None before it exists."""
    return next((path.parent for path in (out / name).glob("*/config.yaml")), None)


def kill_at_random(process: subprocess.Popen[bytes], out: Path, arguments: argparse.Namespace) -> None:
    """Give orders until enough kills were made, the time is over or the run has ended."""
    draw, orders = random.Random(arguments.seed), out / "orders"
    deadline, given, ordered = time.monotonic() + arguments.seconds, 0, time.monotonic()
    # Groups notice a death when they synchronize.
    phases, pause, seen = (SEMI_SYNC_PHASES, 2 * INTERVAL, (0, 0)) if arguments.semi_sync else (PHASES, 0, (0, 0))
    while process.poll() is None and time.monotonic() < deadline:
        folder = run_folder(out, "kills")
        rows = read_lines(folder / "metrics.jsonl") if folder is not None else []
        made = len(read_lines(orders / "kills.jsonl"))
        if made >= arguments.kills:
            break
        if rows and made > seen[0]:
            seen = made, int(rows[-1]["step"])
        noticed = rows and rows[-1]["step"] >= seen[1] + pause
        if noticed and rows[-1]["participants"] >= 2 and made >= given:
            if draw.random() < 0.1:
                given += kill_lighthouse(process, orders, int(rows[-1]["step"]) + 1)
            else:
                phase = draw.choice(phases)
                order = {
                    "target": draw.choice(("rank", "group")) if arguments.dp_shard > 1 else "group",
                    "group": draw.randrange(arguments.groups) if phase not in LEADERS else None,
                    "moment": draw.random(),
                }
                give(orders, phase, order)
                given += 1
            ordered = time.monotonic()
        elif made < given and time.monotonic() - ordered > 6:
            # The phase does not occur soon, or the group is away: any group, in a forward pass or until it commits.
            phase = draw.choice(phases[:4]) if arguments.semi_sync else "forward"
            for path in orders.glob("*.json"):
                path.unlink(missing_ok=True)
            give(orders, phase, {"target": "group", "group": None, "moment": draw.random()})
            given, ordered = made + 1, time.monotonic()
        time.sleep(0.2 + 0.5 * draw.random())
    for path in (*orders.glob("*.json"), orders / "pause"):
        path.unlink(missing_ok=True)


def give(orders: Path, phase: str, order: dict[str, Any]) -> None:
    """Write an order at once as a whole."""
    draft = orders / "draft"
    draft.write_text(json.dumps(order))
    draft.rename(orders / f"{phase}.json")


def kill_lighthouse(process: subprocess.Popen[bytes], orders: Path, step: int) -> int:
    """Kill the lighthouse; returns 1 if there was one."""
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "titan_exp.extensions.replica_groups.lighthouse" in child.cmdline():
                note(orders, {"phase": "any", "target": "lighthouse", "group": None, "step": step})
                child.kill()
                return 1
    return 0


def check(out: Path, steps: int) -> dict[str, Any]:
    """Compare rows of the run with those of one group; returns what was found."""
    found, expected = (read_lines(run_folder(out, name) / "metrics.jsonl") for name in ("kills", "one"))  # type: ignore[operator]
    worst = {"loss": 0.0, "grad_norm": 0.0}
    for row, other in zip(found, expected, strict=False):
        worst = {name: max(value, abs(row[name] / other[name] - 1)) for name, value in worst.items()}
    return {
        "steps": steps,
        "rows once and in order": [row["step"] for row in found] == list(range(1, steps + 1)),
        "tokens and rates equal": all(
            row[name] == other[name] for row, other in zip(found, expected, strict=True) for name in ("tokens", "lr")
        )
        if len(found) == len(expected)
        else False,
        "attempts": max(int(row["attempt"]) for row in found),
        "tracebacks": sum("Traceback" in log.read_text() for log in out.glob("kills/*/logs/*/*/rank-*.log")),
        **{f"final loss, {name}": final_loss(rows) for name, rows in (("kills", found), ("undisturbed", expected))},
        "first loss": expected[0]["loss"],
        **{f"{name}: largest relative difference": value for name, value in worst.items()},
    }


def final_loss(rows: list[dict[str, Any]]) -> float:
    """Mean loss of the last rows."""
    return statistics.fmean(row["loss"] for row in rows[-LAST_ROWS:])


def stalls(out: Path) -> list[dict[str, Any]]:
    """Kills, each with the stall of the survivors in the rows of its step and the next, or of the synchronization in
    which they noticed it."""
    folder = run_folder(out, "kills")
    assert folder is not None
    rows = {row["step"]: row for row in read_lines(folder / "metrics.jsonl")}
    kills = read_lines(out / "orders" / "kills.jsonl")
    later = INTERVAL if json.loads((out / "result.json").read_text()).get("semi_sync") else 1
    for kill in kills:
        near = [rows[step]["stall"] for step in range(kill["step"], kill["step"] + later + 1) if step in rows]
        kill["stall"] = max(near, default=math.nan)
    return kills


def report(out: Path) -> None:
    """Print the table of all pieces."""
    kills: list[dict[str, Any]] = []
    for piece in sorted(out.glob("piece-*/result.json")):
        print(piece.parent.name, json.dumps(json.loads(piece.read_text())))
        kills += stalls(piece.parent)
    print("\n| target, moment | kills | stall: median, s | 90 % | largest |\n|---|--:|--:|--:|--:|")
    kinds = sorted({(kill["target"], kill["phase"]) for kill in kills})
    for kind in [*kinds, None]:
        chosen = [kill["stall"] for kill in kills if kind in (None, (kill["target"], kill["phase"]))]
        known = sorted(stall for stall in chosen if math.isfinite(stall))
        if known:
            tail = known[min(len(known) - 1, math.ceil(0.9 * len(known)) - 1)]
            label = "all" if kind is None else f"{kind[0]}, {kind[1]}"
            print(f"| {label} | {len(chosen)} | {statistics.median(known):.2f} | {tail:.2f} | {known[-1]:.2f} |")


def run_piece(arguments: argparse.Namespace) -> int:
    """Train one run under kills, and an undisturbed one; returns 0 if no step and no rank was lost and the curves of
    synchronous training agree."""
    out = arguments.out / f"piece-{arguments.seed:02d}"
    if (out / "result.json").exists():
        print((out / "result.json").read_text())
        return 0
    orders = out / "orders"
    orders.mkdir(parents=True, exist_ok=True)
    (orders / "pause").touch()
    began = time.monotonic()
    seed, semi_sync = [f"experiment.seed={arguments.seed}"], arguments.semi_sync
    layout = [f"cluster.replica_groups={arguments.groups}", f"parallelism.dp_shard={arguments.dp_shard}", *seed]
    if semi_sync:
        words = [f"semi_sync.groups={arguments.groups}", f"semi_sync.interval={INTERVAL}", "optimizer.lr=1e-3"]
        layout += [*SEMI_SYNC[semi_sync], *words, f"training.global_batch_size={4 * arguments.groups}"]
    process = train(out, "kills", arguments.steps, *layout, orders=orders)
    try:
        kill_at_random(process, out, arguments)
        code = process.wait(timeout=WAIT)
    finally:
        process.terminate()
    one = train(out, "one", arguments.steps, *(layout if semi_sync else seed))
    try:
        one.wait(timeout=WAIT)
    finally:
        one.terminate()
    result = {"kills": len(read_lines(orders / "kills.jsonl")), "exit": code, **check(out, arguments.steps)}
    result |= {"seconds": round(time.monotonic() - began), "load": os.getloadavg()[0], "semi_sync": semi_sync}
    (out / "result.json").write_text(json.dumps(result))
    print(json.dumps(result, indent=2))
    exact = result["rows once and in order"] and result["tokens and rates equal"] and code == result["tracebacks"] == 0
    limit = math.inf if semi_sync else 1e-5
    return 0 if exact and result["loss: largest relative difference"] < limit else 1


def main() -> int:
    """Run a piece or print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    for name, value in (("kills", 25), ("seconds", 420), ("seed", 0), ("groups", 3), ("dp-shard", 1), ("steps", 1000)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--semi-sync", choices=sorted(SEMI_SYNC), default="", help="method of semi-synchronous training"
    )
    parser.add_argument("--report", action="store_true", help="print the table of all pieces")
    arguments = parser.parse_args()
    arguments.out = arguments.out.resolve()
    if arguments.report:
        report(arguments.out)
        return 0
    return run_piece(arguments)


if __name__ == "__main__":
    sys.exit(main())
