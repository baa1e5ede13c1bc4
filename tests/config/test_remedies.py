"""Remedies of refusals, typed: each removes its refusal, for every refusal of the tables and for two at a time."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from tests.config import test_cluster_rules, test_expert_rules, test_rules
from tests.config.composing import experiment, give_gpus
from titan_exp.config import torch_features
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.rules import violations

WORD = re.compile(
    r"(?:^|(?<=[\s(]))((?:\+\+|\+|~)?[a-z_]+(?:\.\w+)*=(?:'[^']*'|\[[^\]]*\]|[^\s,;)]+)|~[a-z_]+(?:\.\w+)+)"
)
"""Override in a remedy."""


class Table(NamedTuple):
    """Table of a test of rules: overrides in the first column, refused ones and others."""

    test: Callable[..., object]
    base: Sequence[str]
    gpus: int = 0


SYMMETRIC = (
    *test_expert_rules.BASE[:1],
    "training.global_batch_size=96",
    "parallelism.token_exchange=symmetric_memory",
)
TABLES = (
    Table(test_rules.test_on_a_machine_without_gpus, test_rules.BASE),
    Table(test_rules.test_on_a_machine_with_eight_gpus, test_rules.BASE, 8),
    Table(
        test_rules.test_options_of_captured_cuda_graphs,
        (*test_rules.BASE, "parallelism.dp_shard=1", "compile.cuda_graphs=true"),
        8,
    ),
    Table(test_cluster_rules.test_what_slurm_is_asked_for, test_cluster_rules.SLURM),
    Table(test_expert_rules.test_experts, test_expert_rules.BASE),
    Table(test_expert_rules.test_multi_token_prediction, (*test_expert_rules.BASE, "model=deepseek_debug")),
    Table(test_expert_rules.test_symmetric_memory, SYMMETRIC),
    Table(test_expert_rules.test_degrees_of_experts, test_expert_rules.DEGREES),
)


def rows(table: Table) -> list[list[str]]:
    """Refused overrides of a table, with its base."""
    (mark,) = [mark for mark in table.test.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    cells = [getattr(row, "values", row) for row in mark.args[1]]
    refused = [overrides for overrides, *others in cells if any(others)]
    return [composed(table.base, test_expert_rules.words(row) if isinstance(row, str) else row) for row in refused]


def composed(base: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Overrides on a base; another model has shapes of its own."""
    other = any(word.startswith("model=") for word in overrides)
    return typed([word for word in base if not (other and word.startswith("model."))], overrides)


def alternatives(remedy: str) -> Iterator[list[str]]:
    """Overrides of each alternative: words side by side belong together, and of `key=a, b or c` the first counts."""
    for part in re.split(r"; or |; |, or |, | or ", remedy):
        words = [word.rstrip(".:") for word in WORD.findall(part)]
        if words and not any("..." in word or "…" in word or word.isupper() for word in words):
            yield words


def found(overrides: Sequence[str]) -> list[Violation]:
    try:
        return violations(experiment(*overrides))
    except UserError as error:
        return list(error.violations)


def typed(overrides: Sequence[str], words: Sequence[str]) -> list[str]:
    """A command line with more words, in place of those with the same key."""
    keys = {word.partition("=")[0].lstrip("+") for word in words}
    return [*(word for word in overrides if word.partition("=")[0].lstrip("+") not in keys), *words]


def failing(overrides: Sequence[str], refusals: Sequence[Violation]) -> list[str]:
    """Remedies that leave their refusal."""
    left = []
    for violation in refusals:
        for words in alternatives(violation.remedy):
            try:
                again = found(typed(overrides, words))
            except (OmegaConfBaseException, HydraException):
                again = [violation]
            if any((one.field, one.reason) == (violation.field, violation.reason) for one in again):
                left.append(f"{' '.join(overrides)}\n  {violation}\n  typed: {' '.join(words)}")
    return left


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch_features, "torchao_version", lambda: "0.18.0")
    give_gpus(monkeypatch, 0)


PAIRS = 25
"""Pairs of refused compositions by day."""


def test_every_remedy_removes_its_refusal(monkeypatch: pytest.MonkeyPatch):
    """One row of the tables for each refusal, whatever its numbers."""
    kinds: set[tuple[str, str]] = set()
    failed: list[str] = []
    for table in TABLES:
        give_gpus(monkeypatch, table.gpus)
        for overrides in rows(table):
            named = {(one.field, re.sub(r"\d+", "", one.reason)): one for one in found(overrides)}
            failed += failing(overrides, [one for kind, one in named.items() if kind not in kinds])
            kinds |= named.keys()
    assert len(kinds) > 180
    assert failed == []


def pairs(count: int, seed: int) -> Iterator[list[str]]:
    """Overrides of two refused compositions that share no key."""
    draw, refused = random.Random(seed), rows(Table(TABLES[0].test, ()))
    while count:
        first, second = draw.sample(refused, 2)
        keys = [{word.partition("=")[0].lstrip("+~").partition(".")[0] for word in row} for row in (first, second)]
        if not keys[0] & keys[1]:
            count -= 1
            yield composed(test_rules.BASE, [*first, *second])


def test_remedies_of_two_refusals_remove_them():
    assert [line for row in pairs(PAIRS, seed=1) for line in failing(row, found(row))] == []


@pytest.mark.night
@pytest.mark.parametrize("seed", range(2, 6))
def test_remedies_of_many_pairs_remove_them(seed: int):
    assert [line for row in pairs(100, seed) for line in failing(row, found(row))] == []
