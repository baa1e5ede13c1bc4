"""Where runs are compared: after how many tokens, and why there."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from titan_exp.compare.run_record import Run
from titan_exp.compare.stats.format_numbers import short_count
from titan_exp.config.errors.user_error import UserError

COUNTED = ("done", "running", "preempted")
"""States of runs that decide where the least advanced is; the others have ended before their time."""


@dataclass(frozen=True)
class TokenBudget:
    """A number of tokens at which metrics are taken."""

    tokens: float
    """Tokens; infinite where every run is taken at its own end."""
    why: str
    """In words, for the heading."""

    def reached(self, run: Run) -> bool:
        """Whether a run has come here; the last step may be one short of a number that was typed."""
        if math.isinf(self.tokens):
            return bool(run.rows)
        return run.tokens >= self.tokens * (1 - 1e-9) and bool(run.rows)


def choose_token_budget(runs: Sequence[Run], at: str) -> TokenBudget:
    """The point that was asked for.

    Args:
        runs: those to compare.
        at: `least` advanced of all runs but failed ones, `done` for the least advanced finished one, `end` for every
            run's own end, or a number of tokens (`30720`, `1e9`, `2.5B`).

    Raises:
        UserError: it is none of these, or no run has come there.
    """
    begun = [run for run in runs if run.tokens]
    if not begun:
        return TokenBudget(0, "no run has logged a step yet")
    if at == "end":
        return TokenBudget(math.inf, "each run at its own end, which is not at equal tokens")
    if at in ("least", "done"):
        counted = [run for run in begun if run.state == "done" or (at == "least" and run.state in COUNTED)]
        return _least(counted or begun, begun)
    tokens = _tokens(at)
    furthest = max(run.tokens for run in begun)
    if tokens > furthest:
        raise UserError(f"at={at}: no run has come so far; the furthest is at {furthest:,} tokens.")
    return TokenBudget(tokens, "as asked for")


def _least(counted: Sequence[Run], begun: Sequence[Run]) -> TokenBudget:
    tokens = min(run.tokens for run in counted)
    if all(run.tokens == tokens for run in begun):
        return TokenBudget(tokens, "where every run ends")
    if all(run.tokens == tokens and run.state == "done" for run in counted):
        return TokenBudget(tokens, "where every finished run ends")
    behind = next(run for run in counted if run.tokens == tokens)
    return TokenBudget(tokens, f"where the least advanced is ({behind.run_id}, {behind.state})")


def _tokens(at: str) -> float:
    scale = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}.get(at[-1:].lower(), 1.0)
    try:
        tokens = float(at[:-1] if scale != 1.0 else at) * scale
    except ValueError:
        tokens = -1.0
    if not (tokens > 0 and math.isfinite(tokens)):
        raise UserError(f"at={at}: write least, done, end, or a number of tokens ({short_count(30720)}, 1e9, 2.5B).")
    return tokens
