"""Mutations of tasks, each of which a test by day must notice."""

from typing import Any

import numpy as np

from tests.patching import Mutation, noticed

PACKAGE = "titan_exp.extensions.tasks"
ENCODING, SCORES, HARNESS, FORMATS = (
    f"tests/extensions/tasks/test_{name}.py" for name in ("encoding", "scores", "harness", "formats")
)


def spaces_stay_in_the_context(original: Any) -> Any:
    def rows(self: Any, choices: Any) -> Any:
        for context, text in choices:
            before = self.encode(context)
            after = self.encode(context + text)[len(before) :]
            before = before if len(before) else self.prefix
            yield np.append(before, after), len(before), text

    return rows


def both_parts_are_encoded_alone(original: Any) -> Any:
    def rows(self: Any, choices: Any) -> Any:
        for tokens, first, text in original(self, choices):
            yield np.append(tokens[:first], self.encode(text)), first, text

    return rows


def the_item_is_its_neighbour_too(original: Any) -> Any:
    def item(records: Any, index: int, shots: int, delimiter: str) -> Any:
        twins = [*records]
        twins[index - 1] = records[index]
        return original(twins, index, shots, delimiter)

    return item


def drawn_once(self: Any, document: Any) -> Any:
    """Examples of which copies of the item are taken away, and the first others put in their place."""
    drawn = self.random.sample(self.pool, self.shots + 1) if self.leave_out else self.pool
    return [one for one in [*drawn, *self.pool] if one != document][: self.shots]


def quotient(original: Any) -> Any:
    def score(encoded: Any, log_likelihoods: Any, greedy: Any = None, neutral: Any = None) -> Any:
        if neutral is not None:
            neutral = log_likelihoods - log_likelihoods / np.where(neutral == 0, -1, neutral)
        return original(encoded, log_likelihoods, greedy, neutral)

    return score


MUTATIONS: dict[str, Mutation] = {
    "spaces of the border stay in the context": (
        f"{PACKAGE}.encoding._Encoder._by_border",
        spaces_stay_in_the_context,
        f"{ENCODING}::test_the_space_of_the_border_is_scored",
    ),
    "a continuation is encoded alone": (
        f"{PACKAGE}.encoding._Encoder._by_border",
        both_parts_are_encoded_alone,
        f"{ENCODING}::test_a_merge_across_the_border",
    ),
    "characters are counted with the delimiter": (
        f"{PACKAGE}.encoding._lengths",
        lambda original: lambda rows, answers, texts: original(rows, texts, texts),
        f"{SCORES}::test_lengths_leave_the_delimiter_out",
    ),
    "the last window is lost": (
        f"{PACKAGE}.encoding._Encoder._document",
        lambda original: lambda self, item, text: original(self, item, text)[:-1],
        f"{ENCODING}::test_windows_are_those_of_the_harness",
    ),
    "PMI is a quotient": (
        f"{PACKAGE}.scores.score",
        quotient,
        f"{SCORES}::test_pmi_is_a_difference",
    ),
    "the last of equal choices wins": (
        f"{PACKAGE}.scores._hits",
        lambda original: lambda measure, gold: original(measure[:, ::-1], gold[:, ::-1]),
        f"{SCORES}::test_the_first_of_equal_choices_wins_and_ties_are_counted",
    ),
    "documents have a mean of ratios": (
        f"{PACKAGE}.scores.mean_and_error",
        lambda original: lambda values, weights: original(values, np.ones(len(values))),
        f"{SCORES}::test_documents_are_ratios_of_sums",
    ),
    "seeds count as items": (
        f"{PACKAGE}.compare.crossed",
        lambda original: lambda differences: (*original(differences)[:2], 1e6),
        f"{SCORES}::test_false_positives_of_seeds_and_items",
    ),
    "an item may be among its examples": (
        f"{PACKAGE}.formats._Rendering._drawn",
        lambda original: lambda self, document: self.random.sample(self.pool, self.shots),
        f"{HARNESS}::test_prompts_and_scores_are_those_of_the_harness",
    ),
    "copies of an item are not drawn again": (
        f"{PACKAGE}.formats._Rendering._drawn",
        lambda original: drawn_once,
        f"{HARNESS}::test_prompts_and_scores_are_those_of_the_harness[same]",
    ),
    "an item of CORE may be among its examples": (
        f"{PACKAGE}.formats._core_item",
        the_item_is_its_neighbour_too,
        f"{FORMATS}::test_shots_leave_out_the_item_itself",
    ),
    "a gold choice may lie outside": (
        f"{PACKAGE}.formats.Item.__post_init__",
        lambda original: lambda self: None,
        f"{FORMATS}::test_damaged_requests_are_refused",
    ),
}

test_mutation_is_noticed = noticed("tests.extensions.tasks.score_mutations", MUTATIONS)
