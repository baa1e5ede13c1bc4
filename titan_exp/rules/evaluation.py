"""Rules about evaluations."""

import re
from collections.abc import Iterator
from dataclasses import replace

from titan_exp.config.data_files import unlimited_split
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.groups.training import EvaluationConfig, TrainingConfig
from titan_exp.config.schema.data_sets import LOSS, mixed_stores, validation_sets
from titan_exp.rules.data import DATA_RULES, STORE_RULES, is_unlimited
from titan_exp.rules.rule import find_violations, rules


def sets_are_read(whole: Experiment) -> Iterator[Violation]:
    """The data of every set keeps the rules of data, and holds documents out if it says so."""
    try:
        sets = validation_sets(whole)
    except UserError as error:
        yield from error.violations
        return
    for name, found in sets.items():
        yield from _violations(whole, name, found)


def _violations(whole: Experiment, name: str, found: Experiment) -> Iterator[Violation]:
    """Violations of the rules of data by one set, under its keys."""
    config, key = whole.evaluation.sets[name], f"evaluation.sets.{name}"
    every = whole.evaluation.every if config.holds_out else 0
    try:
        checked = replace(found, evaluation=replace(found.evaluation, every=every))
        wrong = find_violations((*DATA_RULES, *STORE_RULES), checked)
        if not config.holds_out and is_unlimited(found.data):
            wrong.append(unlimited_split(found.data))
    except UserError as error:
        wrong = [*error.violations]
    for one in wrong:
        own = one.field.startswith("data.")
        remedy = one.remedy.replace("data.", f"{key}.data.") if own else one.remedy
        yield replace(one, field=f"{key}.{one.field}" if own else key, remedy=remedy)


def sets_have_names_of_their_own(evaluation: EvaluationConfig, data: DataConfig) -> Iterator[Violation]:
    """No set is named like a store of the run's mixture, or its parent folder where that is part of the store's
    name."""
    stores = {store.partition("/")[0]: store for store in mixed_stores(data)}
    for name in evaluation.sets.keys() & stores.keys():
        reason = f"the run's mixture has the store {stores[name]}, which logs {LOSS}/{stores[name]}"
        yield Violation(f"evaluation.sets.{name}", "", reason, "give the set another name")


def sets_fit(
    evaluation: EvaluationConfig, training: TrainingConfig, parallelism: ParallelismConfig
) -> Iterator[Violation]:
    """Names of sets are words, and a sequence length of its own is one that the layout takes."""
    for name, found in evaluation.sets.items():
        key, length = f"evaluation.sets.{name}", found.seq_len
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
            yield Violation(key, "", "a name has letters, digits, ., _ and - only", "give the set such a name")
        if length is None or length == training.seq_len:
            continue
        remedy = f"leave it out, or use {key}.seq_len={training.seq_len}"
        if length > training.seq_len:
            yield Violation(
                f"{key}.seq_len", length, f"a run of training.seq_len={training.seq_len} takes no more", remedy
            )
        elif parallelism.pp > 1 or parallelism.cp > 1:
            axis = "pp" if parallelism.pp > 1 else "cp"
            reason = f"with parallelism.{axis}={getattr(parallelism, axis)} all sequences have one length"
            yield Violation(f"{key}.seq_len", length, reason, remedy)


EVALUATION_RULES = rules(
    sets_are_read,
    sets_fit,
    sets_have_names_of_their_own,
    when=lambda evaluation: evaluation.sets and evaluation.enabled,
)
