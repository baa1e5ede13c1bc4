"""Goodput of a fleet of GPUs under failures: restarts from checkpoints against replica groups. A simulation, on paper.

    python benchmarks/replica_group_goodput.py [--gpus 10000] [--groups 20] [--stall 1.5] [--restart-minutes 10] ...

Failures are a Poisson process whose rate is that of the Llama 3 report (arXiv 2407.21783, section 3.3.4): 419
unexpected interruptions in 54 days on 16,384 GPUs, in proportion to GPUs. `--stall` is measured with processes on
a CPU; every other input is an assumption. Goodput is training of the whole fleet, in units of its full speed, over wall
time.

- Restart: a failure costs the steps since the last checkpoint and the restart; saving pauses training. "Best interval"
  is Young's, the square root of twice the pause times the mean time between failures.
- Groups: a failure costs the survivors a stall, a repeated step and, when the group is back, a healing; until then its
  share of the speed is gone. Below `--min-groups` training waits. Spare machines are not modelled in either case.
"""

import argparse
import math
from dataclasses import dataclass, replace

import numpy as np

LLAMA3_INTERRUPTIONS, LLAMA3_DAYS, LLAMA3_GPUS = 419, 54, 16_384


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
    for time, group in zip(np.sort(failures), draw.integers(groups, size=len(failures)), strict=True):
        events.append((float(time), int(group)))
    trained = clock = 0.0
    lost = len(events) * (fleet.stall + fleet.step / 2)  # on the average half of a step is computed again
    for time, group in [*events, (fleet.duration, -1)]:
        # Speed between two failures, piece by piece, as groups come back.
        for point in [*sorted(float(end) for end in back if clock < end < time), time]:
            living = groups - int((back > clock).sum())
            trained += (point - clock) * living / groups if living >= fleet.min_groups else 0.0
            clock = point
        if group >= 0:
            back[group] = time + fleet.restart
            lost += fleet.heal
    saves = fleet.duration / (fleet.checkpoint_every + fleet.checkpoint_pause) * fleet.checkpoint_pause
    return (trained - lost - saves) / fleet.duration


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=10_000)
    parser.add_argument("--groups", type=int, nargs="+", default=[5, 10, 20, 40])
    parser.add_argument("--min-groups", type=int, default=1)
    parser.add_argument("--days", type=float, default=54.0)
    parser.add_argument("--step-seconds", type=float, default=10.0)
    parser.add_argument("--stall", type=float, nargs="+", default=[1.5, 5.0, 60.0], help="seconds of a survivor")
    parser.add_argument("--heal", type=float, default=30.0, help="seconds that all wait while a group heals")
    parser.add_argument("--restart-minutes", type=float, nargs="+", default=[3.0, 10.0, 30.0])
    parser.add_argument("--checkpoint-minutes", type=float, default=30.0)
    parser.add_argument("--checkpoint-pause", type=float, default=5.0, help="seconds that a save pauses training")
    parser.add_argument("--draws", type=int, default=20)
    given = parser.parse_args()

    def fleet(restart: float, stall: float) -> Fleet:
        minutes = (given.checkpoint_minutes * 60, given.checkpoint_pause, given.min_groups)
        return Fleet(given.gpus, given.days, given.step_seconds, stall, given.heal, restart * 60, *minutes)

    rate = fleet(1, 1).failures_per_second
    print(f"{given.gpus:,} GPUs, a failure every {1 / rate / 3600:.2f} h; {given.draws} draws of {given.days:g} days\n")
    print(
        "| restart, min | stall, s | restart from checkpoint | the same, best interval |",
        *(f"{groups} groups |" for groups in given.groups),
    )
    print("|--:|--:|--:|--:|" + "--:|" * len(given.groups))
    for restart in given.restart_minutes:
        for stall in given.stall:
            inputs = fleet(restart, stall)
            draws = range(given.draws)
            best = replace(inputs, checkpoint_every=math.sqrt(2 * inputs.checkpoint_pause / rate))
            cells = [
                np.mean([restart_goodput(case, np.random.default_rng(seed)) for seed in draws])
                for case in (inputs, best)
            ]
            for groups in given.groups:
                cells.append(np.mean([group_goodput(inputs, groups, np.random.default_rng(seed)) for seed in draws]))
            print(f"| {restart:g} | {stall:g} |", *(f"{100 * cell:.1f} % |" for cell in cells))


if __name__ == "__main__":
    main()
