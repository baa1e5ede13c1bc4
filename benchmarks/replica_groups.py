"""Replica-group benchmarks: random kills of real runs on this machine, and the goodput of a simulated fleet."""

import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.bench import Output, benchmark, environment, option
from benchmarks.bench import titan_exp as command

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
    *("evaluation.every=0", "tracking.log_every=1", "checkpoint.every=20", "optimizer.lr=1e-5"),
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


LLAMA3_INTERRUPTIONS, LLAMA3_DAYS, LLAMA3_GPUS = 419, 54, 16_384


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
        # A wait for a dead group is not a moment of the phase.
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
    rank = {"TITAN_EXP_RANK_MAIN": "benchmarks.replica_groups.rank_main"}
    extra = {} if orders is None else {ORDERS: str(orders), **rank}
    words = [*TRAIN, f"training.steps={steps}", f"paths.runs={out}", f"experiment.name={name}", *overrides]
    with (out / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command("train", *words), env=environment(**extra), stdout=log, stderr=log)


def run_folder(out: Path, name: str) -> Path | None:
    """Folder of the only run of a name; None before it exists."""
    return next((path.parent for path in (out / name).glob("*/config.yaml")), None)


def kill_at_random(process: subprocess.Popen[bytes], out: Path, options: "KillOptions") -> None:
    """Give orders until enough kills were made, the time is over or the run has ended."""
    draw, orders = random.Random(options.seed), out / "orders"
    deadline, given, ordered = time.monotonic() + options.seconds, 0, time.monotonic()
    # Groups notice a death when they synchronize.
    phases, pause, seen = (SEMI_SYNC_PHASES, 2 * INTERVAL, (0, 0)) if options.semi_sync else (PHASES, 0, (0, 0))
    while process.poll() is None and time.monotonic() < deadline:
        folder = run_folder(out, "kills")
        rows = read_lines(folder / "metrics.jsonl") if folder is not None else []
        made = len(read_lines(orders / "kills.jsonl"))
        if made >= options.kills:
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
                    "target": draw.choice(("rank", "group")) if options.dp_shard > 1 else "group",
                    "group": draw.randrange(options.groups) if phase not in LEADERS else None,
                    "moment": draw.random(),
                }
                give(orders, phase, order)
                given += 1
            ordered = time.monotonic()
        elif made < given and time.monotonic() - ordered > 6:
            # The phase does not occur soon, or the group is away: any group, in a forward pass or until it commits.
            phase = draw.choice(phases[:4]) if options.semi_sync else "forward"
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


def report(folder: Path, out: Output) -> None:
    """Print the table of all pieces."""
    kills: list[dict[str, Any]] = []
    for piece in sorted(folder.glob("piece-*/result.json")):
        out.say(f"{piece.parent.name} {piece.read_text()}")
        kills += stalls(piece.parent)
    form = {"kills": "d", "stall: median, s": ".2f", "90 %": ".2f", "largest": ".2f"}
    table = out.table({"target, moment": ""} | form, "Kills")
    for kind in [*sorted({(kill["target"], kill["phase"]) for kill in kills}), None]:
        chosen = [kill["stall"] for kill in kills if kind in (None, (kill["target"], kill["phase"]))]
        known = sorted(stall for stall in chosen if math.isfinite(stall))
        if known:
            tail = known[min(len(known) - 1, math.ceil(0.9 * len(known)) - 1)]
            label = "all" if kind is None else f"{kind[0]}, {kind[1]}"
            table.add(label, len(chosen), statistics.median(known), tail, known[-1])


def run_piece(options: "KillOptions", folder: Path) -> int:
    """Train one run under kills, and an undisturbed one; returns 0 if no step and no rank was lost and the curves of
    synchronous training agree."""
    out = folder / f"piece-{options.seed:02d}"
    if (out / "result.json").exists():
        return 0
    orders = out / "orders"
    orders.mkdir(parents=True, exist_ok=True)
    (orders / "pause").touch()
    began = time.monotonic()
    seed, semi_sync = [f"experiment.seed={options.seed}"], options.semi_sync
    layout = [f"cluster.replica_groups={options.groups}", f"parallelism.dp_shard={options.dp_shard}", *seed]
    if semi_sync:
        words = [f"semi_sync.groups={options.groups}", f"semi_sync.interval={INTERVAL}", "optimizer.lr=1e-3"]
        layout += [*SEMI_SYNC[semi_sync], *words, f"training.global_batch_size={4 * options.groups}"]
    process = train(out, "kills", options.steps, *layout, orders=orders)
    try:
        kill_at_random(process, out, options)
        code = process.wait(timeout=WAIT)
    finally:
        process.terminate()
    one = train(out, "one", options.steps, *(layout if semi_sync else seed))
    try:
        one.wait(timeout=WAIT)
    finally:
        one.terminate()
    result = {"kills": len(read_lines(orders / "kills.jsonl")), "exit": code, **check(out, options.steps)}
    result |= {"seconds": round(time.monotonic() - began), "load": os.getloadavg()[0], "semi_sync": semi_sync}
    (out / "result.json").write_text(json.dumps(result))
    exact = result["rows once and in order"] and result["tokens and rates equal"] and code == result["tracebacks"] == 0
    limit = math.inf if semi_sync else 1e-5
    return 0 if exact and result["loss: largest relative difference"] < limit else 1


@dataclass(frozen=True)
class KillOptions:
    folder: Path | None = option(None, "folder of the pieces; a temporary one without")
    kills: int = option(25, "kills of a piece", smallest=1)
    seconds: int = option(420, "limit of the time of kills", smallest=60)
    seed: int = option(0, "seed and name of the piece")
    groups: int = option(3, "replica groups")
    dp_shard: int = option(1, "ranks of a group")
    steps: int = option(1000, "steps of the run", smallest=60)
    semi_sync: str = option("", "method of semi-synchronous training", choices=sorted(SEMI_SYNC))
    report: bool = option(False, "only print the table of all pieces")


@benchmark
def replica_group_kills(options: KillOptions, out: Output) -> int:
    """Random SIGKILLs of ranks, replica groups and the lighthouse while `titan-exp train` runs on this machine's CPU.

    python -m benchmarks replica-group-kills --folder OUT [--kills 25] [--seed 0]
    python -m benchmarks replica-group-kills --folder OUT --semi-sync diloco       # or local_sgd, streaming_diloco
    python -m benchmarks replica-group-kills --folder OUT --report

    A call trains one run in OUT/piece-SEED with three groups, and kills at random moments of the forward pass, of the
    sum of gradients, of the commit, of the quorum, of healing (the group that receives, and the one that sends) and of
    a save. It then trains the same steps with one group, and checks that every step has one row and that the curve is
    the same to rounding. In semi-synchronous training it also kills while a fragment is sent, in a synchronization, and
    while states of the groups are collected; the other run has as many groups, and the curves differ, since a death
    changes the mean: the final losses are compared. A piece that is complete is not run again. The table has all
    pieces: kills, and the distribution of the stall, the seconds that the survivors waited or computed again in the
    rows after a kill.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        code = 0 if options.report else run_piece(options, folder)
        report(folder, out)
    return code


@dataclass(frozen=True)
class Fleet:
    """Inputs. Times in seconds."""

    gpus: int
    days: float
    step: float
    stall: float
    heal: float
    restart: float
    checkpoint_every: float
    checkpoint_pause: float
    min_groups: int

    @property
    def failures_per_second(self) -> float:
        """Rate of failures of the whole fleet."""
        return LLAMA3_INTERRUPTIONS / (LLAMA3_DAYS * 86_400 * LLAMA3_GPUS) * self.gpus

    @property
    def duration(self) -> float:
        """Simulated wall time."""
        return self.days * 86_400


def restart_goodput(fleet: Fleet, draw: np.random.Generator) -> float:
    """Every failure ends the run, which continues from its newest checkpoint."""
    now = trained = 0.0
    while now < fleet.duration:
        # A failure during the restart begins it again.
        life = draw.exponential(1 / fleet.failures_per_second)
        now += life
        useful = life - fleet.restart
        if useful > 0:
            trained += math.floor(useful / (fleet.checkpoint_every + fleet.checkpoint_pause)) * fleet.checkpoint_every
    return trained / now


def group_goodput(fleet: Fleet, groups: int, draw: np.random.Generator) -> float:
    """A failure ends one group, which comes back after the restart time and heals from another."""
    failures = draw.uniform(0, fleet.duration, draw.poisson(fleet.failures_per_second * fleet.duration))
    back = np.zeros(groups)
    events: list[tuple[float, int]] = []
    for moment, group in zip(np.sort(failures), draw.integers(groups, size=len(failures)), strict=True):
        events.append((float(moment), int(group)))
    trained = clock = 0.0
    lost = len(events) * (fleet.stall + fleet.step / 2)  # on the average half of a step is computed again
    for moment, group in [*events, (fleet.duration, -1)]:
        # Speed between two failures, piece by piece, as groups come back.
        for point in [*sorted(float(end) for end in back if clock < end < moment), moment]:
            living = groups - int((back > clock).sum())
            trained += (point - clock) * living / groups if living >= fleet.min_groups else 0.0
            clock = point
        if group >= 0:
            back[group] = moment + fleet.restart
            lost += fleet.heal
    saves = fleet.duration / (fleet.checkpoint_every + fleet.checkpoint_pause) * fleet.checkpoint_pause
    return (trained - lost - saves) / fleet.duration


@dataclass(frozen=True)
class GoodputOptions:
    gpus: int = option(10_000, "GPUs of the fleet")
    groups: tuple[int, ...] = option((5, 10, 20, 40), "numbers of groups", smallest=(5,))
    min_groups: int = option(1, "living groups below which training waits")
    days: float = option(54.0, "simulated days", smallest=1.0)
    step_seconds: float = option(10.0, "seconds of a step")
    stall: tuple[float, ...] = option((1.5, 5.0, 60.0), "seconds that a failure costs a survivor", smallest=(1.5,))
    heal: float = option(30.0, "seconds that all wait while a group heals")
    restart_minutes: tuple[float, ...] = option((3.0, 10.0, 30.0), "minutes of a restart", smallest=(10.0,))
    checkpoint_minutes: float = option(30.0, "minutes between two checkpoints")
    checkpoint_pause: float = option(5.0, "seconds that a save pauses training")
    draws: int = option(20, "simulations of a cell", smallest=1)

    def fleet(self, restart: float, stall: float) -> Fleet:
        """Inputs of a row; `restart` in minutes."""
        minutes = (self.checkpoint_minutes * 60, self.checkpoint_pause, self.min_groups)
        return Fleet(self.gpus, self.days, self.step_seconds, stall, self.heal, restart * 60, *minutes)


@benchmark
def replica_group_goodput(options: GoodputOptions, out: Output) -> None:
    """Goodput of a fleet of GPUs under failures: restarts from checkpoints against replica groups. A simulation.

    Failures are a Poisson process whose rate is that of the Llama 3 report (arXiv 2407.21783, section 3.3.4): 419
    unexpected interruptions in 54 days on 16,384 GPUs, in proportion to GPUs. `--stall` is measured with processes on a
    CPU; every other input is an assumption. Goodput is training of the whole fleet, in units of its full speed, over
    wall time.

    - Restart: a failure costs the steps since the last checkpoint and the restart; saving pauses training. "Best
      interval" is Young's, the square root of twice the pause times the mean time between failures.
    - Groups: a failure costs the survivors a stall, a repeated step and, when the group is back, a healing; until then
      its share of the speed is gone. Below `--min-groups` training waits. Spare machines are not modelled in either
      case.
    """
    rate = options.fleet(1, 1).failures_per_second
    form = {"restart, min": "g", "stall, s": "g", "restart from checkpoint": ".1%", "the same, best interval": ".1%"}
    title = f"{options.gpus:,} GPUs, a failure every {1 / rate / 3600:.2f} h; {options.draws} draws of"
    groups = {f"{number} groups": ".1%" for number in options.groups}
    table = out.table(form | groups, f"{title} {options.days:g} days")
    for restart in options.restart_minutes:
        for stall in options.stall:
            inputs = options.fleet(restart, stall)
            best = replace(inputs, checkpoint_every=math.sqrt(2 * inputs.checkpoint_pause / rate))
            draws = [
                [
                    restart_goodput(inputs, np.random.default_rng(seed)),
                    restart_goodput(best, np.random.default_rng(seed)),
                ]
                + [group_goodput(inputs, number, np.random.default_rng(seed)) for number in options.groups]
                for seed in range(options.draws)
            ]
            table.add(restart, stall, *np.mean(draws, axis=0).tolist())
