"""Standing of a registered question: its pairs so far, the verdict, and what it took, for `sweep` and `compare`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from titan_exp.launch.evidence import Rule, Verdict, decide, falls_behind, paired_differences
from titan_exp.launch.registration import Outcome, Registration
from titan_exp.tracking.display import format_count, format_items


@dataclass(frozen=True)
class PairedRun:
    """Run of a pair."""

    value: float | None
    """Metric at the end, not finite if the run diverged; None before the end."""
    tokens: int = 0
    """Tokens trained on so far."""
    seconds: float | None = None
    """Wall-clock time times processes, over all attempts; None if unknown."""


@dataclass(frozen=True)
class Standing:
    """State of a registered question."""

    registration: Registration
    verdict: Verdict
    """Verdict over the pairs that are complete."""
    runs: int
    """Runs that have begun."""
    tokens: int
    """Tokens that all runs have been trained on."""
    process_hours: float | None
    """Hours times processes of all runs, GPU-hours on GPUs; None if unknown."""
    dropped: str = ""
    """Reason for ending the question between looks; empty if it goes on, or ended at a look."""

    @property
    def outcome(self) -> Outcome:
        """Outcome about the candidate; `continue` while the question is open."""
        return "undecided" if self.dropped else self.verdict.outcome

    @property
    def sentence(self) -> str:
        """Outcome, difference, scale, error rate and cost."""
        one, verdict = self.registration, self.verdict
        if self.dropped:
            verdict = replace(verdict, outcome="undecided", next_look=None)
        lower, rate = one.better == "min", not one.changed
        text = verdict.sentence(one.candidate, one.baseline, one.metric, lower=lower, rate=rate)
        when = "between looks" if verdict.pairs else "before the first look"
        if not verdict.pairs and self.dropped:
            text = f"Undecided between {one.candidate} and {one.baseline}."
        if one.changed:
            text += f" It has no error rate, as the question was changed after a look: {'; '.join(one.changed)}."
        if self.dropped:
            text += f" It ended {when}: {self.dropped}."
        return f"{text} At {one.scale}; {self.cost}."

    @property
    def cost(self) -> str:
        """Runs, tokens and hours, and their share of those of all pairs."""
        most = self.registration.looks[-1]
        hours = "" if self.process_hours is None else f", {self.process_hours:.3g} process-hours"
        share = self.tokens / (2 * most * self.registration.tokens)
        return (
            f"{format_items(self.runs, 'run')}, {format_count(self.tokens)} tokens{hours}, {share:.0%} of what all "
            f"{format_items(most, 'pair')} take"
        )


def standing_of(registration: Registration, runs: Mapping[tuple[str, int], PairedRun], dropped: str = "") -> Standing:
    """Standing of a question with its runs by variant and seed; `dropped` is a reason to end it between looks."""
    candidate, baseline = (
        {seed: runs[variant, seed].value for seed in registration.seeds if (variant, seed) in runs}
        for variant in (registration.candidate, registration.baseline)
    )
    differences = paired_differences(candidate, baseline, registration.seeds, registration.better)
    verdict = decide(differences, rule_of(registration))
    begun = [run for run in runs.values() if run.tokens or run.value is not None]
    seconds = [run.seconds for run in begun if run.seconds is not None]
    return Standing(
        registration,
        verdict,
        runs=len(begun),
        tokens=sum(run.tokens for run in begun),
        process_hours=sum(seconds) / 3600 if seconds and len(seconds) == len(begun) else None,
        dropped=dropped if verdict.outcome == "continue" else "",
    )


def rule_of(registration: Registration) -> Rule:
    """Rule by which a question is decided."""
    one = registration
    looks = None if one.anytime else one.looks
    return Rule(one.alpha, looks, one.futility, tries=one.tries, most=one.looks[-1])


def losing(gains: Sequence[float]) -> str:
    """Reason for dropping a candidate between looks, by its gain in pairs that need not be complete; empty if there is
    none.

    It diverged in more pairs than the baseline, or its mean gain is more than a standard error below 0. This says
    nothing about the candidate but that it is not shown to be better, so that it costs no error.
    """
    if len(gains) < 2 or not falls_behind(np.array(gains)):
        return ""
    if (lost := gains.count(-math.inf)) > (won := gains.count(math.inf)):
        return f"it diverged alone in {lost} of {len(gains)} pairs, the baseline in {won}"
    return f"over {len(gains)} pairs its mean is more than a standard error worse, at equal steps of both runs"
