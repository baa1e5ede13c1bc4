"""Token budget: the number of tokens at which runs are compared."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from titan_exp.compare.compared_metrics import Metric
from titan_exp.compare.run_record import Run
from titan_exp.config.errors.user_error import UserError

COUNTED = ("done", "running", "preempted")
"""Run states that may limit the budget; other runs ended early."""

UNEQUAL = 0.02
"""Fraction of the budget by which last values may lie apart without a remark: the rows that a mean loss is over."""


@dataclass(frozen=True)
class TokenBudget:
    """Number of tokens at which metrics are read."""

    tokens: float
    """Infinite if every run is compared at its end."""
    why: str
    """Reason, for the heading."""

    def reached(self, run: Run) -> bool:
        """True if a run has trained on that many tokens."""
        if math.isinf(self.tokens):
            return bool(run.rows)
        return run.tokens >= self.tokens * (1 - 1e-9) and bool(run.rows)


def choose_token_budget(runs: Sequence[Run], at: str) -> TokenBudget:
    """Choose the token budget.

    `at` is `least` (the least advanced run that has not failed), `done` (the least advanced finished run), `end` (each
    run at its end), or a number of tokens (`30720`, `1e9`, `2.5B`). Raises UserError for any other value, or if no run
    has that many tokens.
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
        raise UserError(f"at={at}: no run has seen so many tokens; the longest has {furthest:,}.")
    return TokenBudget(tokens, "as requested")


def unequal_tokens(runs: Sequence[Run], metrics: Sequence[Metric], budget: TokenBudget) -> list[str]:
    """One sentence per metric that is logged seldom, so that its last values up to the budget are of unequal tokens."""
    if math.isinf(budget.tokens):
        return []
    found = []
    for metric in metrics:
        logged = [(run, run.series(metric.name, budget.tokens)[0]) for run in runs if budget.reached(run)]
        known = [(tokens, run) for run, tokens in logged if tokens] if metric.needs_point else []
        if not known:
            continue
        first, last = (pick(known, key=lambda entry: entry[0][-1]) for pick in (min, max))
        if last[0][-1] - first[0][-1] <= UNEQUAL * budget.tokens:
            continue
        common = max(set.intersection(*(set(tokens) for tokens, _ in known)), default=None)
        remedy = "" if common is None else f" --at {common:.0f} compares all at equal tokens."
        found.append(
            f"{metric.title} is at unequal tokens: the last value of {first[1].run_id} is at {first[0][-1]:,.0f}, that "
            f"of {last[1].run_id} at {last[0][-1]:,.0f}.{remedy}"
        )
    return found


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
        raise UserError(f"at={at}: must be least, done, end, or a number of tokens (30.72k, 1e9, 2.5B).")
    return tokens
