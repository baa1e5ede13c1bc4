"""Mutations of registered questions, each of which a test by day must notice."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tests.patching import Mutation, noticed

EVIDENCE, LOOKS = "tests/compare/test_evidence.py", "tests/launch/test_looks.py"
LADDER = "tests/compare/test_ladder.py"
DISCOVERIES, LEDGER = "tests/compare/test_discoveries.py", "tests/launch/test_ledger.py"
VERDICT, SWEEP = "titan_exp.launch", "titan_exp.launch.sweep"


def other_seed_for_the_candidate(original: Any) -> Any:
    def look(self: Any, number: int) -> Any:
        points = original(self, number)
        moved = dict(zip(self.seeds, (*self.seeds[1:], self.seeds[0]), strict=True))
        return [
            point if point.variant == self.variants[1] else self._points[point.variant, moved[point.seed]]
            for point in points
        ]

    return look


def finished_pairs_alone(original: Any) -> Any:
    def differences(a: Any, b: Any, seeds: Sequence[Any], better: str = "min") -> list[float]:
        return [one for one in original(a, b, seeds, better) if abs(one) < float("inf")]

    return differences


def late_pairs_passed_over(original: Any) -> Any:
    def differences(a: Any, b: Any, seeds: Sequence[Any], better: str = "min") -> list[float]:
        return original(a, b, [seed for seed in seeds if None not in (a.get(seed), b.get(seed))], better)

    return differences


def withheld_without_effect(original: Any) -> Any:
    def decide(differences: Sequence[float], rule: Any) -> Any:
        found = original(differences, rule)
        return dataclasses.replace(found, outcome="better") if found.why == "withheld" else found

    return decide


def without(name: str) -> Callable[[Any], Any]:
    """Registration whose changes of a field are not noticed."""

    def make(original: Any) -> Any:
        return lambda self, before, *keys: original(
            self, dataclasses.replace(before, **{name: getattr(self, name)}), *keys
        )

    return make


def crowned(original: Any) -> Any:
    def hopeless(self: Any, plan: Any) -> str:
        return original(self, plan) or ("it leads" if len(plan.planned) > 2 else "")

    return hopeless


def called_measured(original: Any) -> Any:
    def tested(*arguments: Any) -> Any:
        held_out, beyond, why = original(*arguments)
        return held_out, beyond and dataclasses.replace(beyond, measured=beyond.loss), why

    return tested


MUTATIONS: dict[str, Mutation] = {
    "looks are not counted": (
        f"{VERDICT}.evidence.nominal_level",
        lambda original: lambda looks, alpha: alpha,
        f"{EVIDENCE}::test_false_verdicts_are_as_rare_as_stated",
    ),
    "e-values are looked at as p-values of one look": (
        f"{VERDICT}.evidence.Rule.per_side",
        lambda original: property(lambda self: original.fget(self) * (4 if self.looks is None else 1)),
        f"{EVIDENCE}::test_false_verdicts_are_as_rare_as_stated",
    ),
    "tries do not share alpha": (
        f"{VERDICT}.evidence.Rule.per_side",
        lambda original: property(lambda self: self.alpha / self.sides),
        f"{EVIDENCE}::test_tries_share_alpha",
    ),
    "runs of a pair have different seeds": (
        f"{SWEEP}.looks.Looks._look",
        other_seed_for_the_candidate,
        f"{LOOKS}::test_pairs_share_their_seed_and_nothing_else",
    ),
    "pairs share a seed": (
        f"{SWEEP}.looks.drawn_seeds",
        lambda original: lambda name, candidate, baseline, number: original(name, candidate, baseline, 1) * number,
        f"{LOOKS}::test_pairs_share_their_seed_and_nothing_else",
    ),
    "questions share their seeds": (
        f"{SWEEP}.looks.drawn_seeds",
        lambda original: lambda name, candidate, baseline, number: original("", candidate, baseline, number),
        f"{LOOKS}::test_pairs_share_their_seed_and_nothing_else",
    ),
    "diverged runs are dropped": (
        f"{VERDICT}.evidence.paired_differences",
        finished_pairs_alone,
        f"{LOOKS}::test_a_run_that_diverged_is_an_outcome",
    ),
    "evidence for the arm that diverged more often counts": (
        f"{VERDICT}.evidence.decide",
        withheld_without_effect,
        f"{EVIDENCE}::test_a_diverged_run_withholds_better",
    ),
    "late pairs are passed over": (
        f"{VERDICT}.evidence.paired_differences",
        late_pairs_passed_over,
        f"{EVIDENCE}::test_pairs_are_those_of_one_seed_in_order",
    ),
    "alpha may change after a look": (
        f"{VERDICT}.ledger.Registration.changes",
        without("alpha"),
        f"{LOOKS}::test_a_question_is_not_changed_after_a_look",
    ),
    "a configuration may change after a look": (
        f"{VERDICT}.ledger.Registration.changes",
        without("arms"),
        f"{LOOKS}::test_a_question_is_not_changed_after_a_look",
    ),
    "a lead within runs ends the question": (
        f"{SWEEP}.looks.Looks.hopeless",
        crowned,
        f"{LOOKS}::test_a_candidate_that_loses_within_its_runs_is_dropped_and_none_crowned",
    ),
    "an extrapolated loss is called measured": (
        "titan_exp.compare.study_outcome._tested",
        called_measured,
        f"{LADDER}::test_a_ladder_shows_its_rungs_and_the_law_of_them",
    ),
    "a law that fails its test is extrapolated": (
        "titan_exp.compare.statistics.HoldOut.holds",
        lambda original: property(lambda self: True),
        f"{LADDER}::test_a_law_that_fails_its_test_is_not_extrapolated",
    ),
    "a look is not entered into the ledger": (
        f"{SWEEP}.shipped_study.enter",
        lambda original: lambda runs, question: None if question.pairs else original(runs, question),
        f"{LEDGER}::test_a_row_for_the_registration_and_for_each_look",
    ),
    "a question counts once for each row": (
        f"{VERDICT}.ledger.Ledger.questions",
        lambda original: property(lambda self: list(self.rows)),
        f"{DISCOVERIES}::test_discoveries_are_those_of_the_definitions",
    ),
    "e-LOND goes by e-value instead of registration": (
        "titan_exp.compare.discoveries.e_lond",
        lambda original: lambda e_values, alpha: original(sorted(e_values, reverse=True), alpha),
        f"{DISCOVERIES}::test_discoveries_are_those_of_the_definitions",
    ),
}

test_mutation_is_noticed = noticed("tests.launch.verdict_mutations", MUTATIONS)
