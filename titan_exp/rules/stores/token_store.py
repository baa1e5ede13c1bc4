"""Token store rules: complete, one tokenizer, large enough.

File sizes are checked here once per run instead of by every rank.
"""

from collections.abc import Iterator
from itertools import islice

from titan_exp.config.errors.user_error import UserError, Violation, listed
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.paths.data_files import Manifest, read_manifest
from titan_exp.config.schema.builtins import described
from titan_exp.rules.rule import Refuse, rules

_NAMED = 3


def stores_are_complete(data: DataConfig) -> Iterator[Violation]:
    """Every store exists and is complete, and all have the same tokenizer."""
    if not data.paths:
        yield Violation("data.paths", (), "source tokens reads stores, and none is given", "data.paths='[stores/mine]'")
    manifests: list[Manifest] = []
    for path in data.paths:
        try:
            manifests.append(read_manifest(path))
        except UserError as error:
            yield from error.violations
            continue
        damaged = list(islice(manifests[-1].damaged(), _NAMED))
        if damaged:
            problems = "; ".join(f"{name}: {trouble}" for name, trouble in damaged)
            remedy = f"titan-exp tokenize check={path} checks all of it; then copy or rebuild it"
            yield Violation("data.paths", path, f"this store is damaged: {problems}", remedy)
    tokenizers = {manifest.tokenizer: manifest.path for manifest in manifests}
    if len(tokenizers) > 1:
        made = listed([f"{path} by {name}" for name, path in tokenizers.items()], "and")
        yield Violation("data.paths", data.paths, f"the stores have different tokenizers: {made}", "stores of one")


def stores_are_large_enough(data: DataConfig, training: TrainingConfig) -> Iterator[Violation]:
    """Each store has tokens for a row, and a validation split if the run evaluates."""
    row, manifests = training.seq_len + 1, list(_readable(data))
    for manifest in manifests:
        if manifest.tokens["train"] < row:
            reason = f"{manifest.path} has {manifest.tokens['train']} tokens to train on, and a row takes {row}"
            remedy = f"at most training.seq_len={manifest.tokens['train'] - 1}, or a larger store"
            yield Violation("training.seq_len", training.seq_len, reason, remedy)
    if training.evaluate_every and manifests:
        without = [str(manifest.path) for manifest in manifests if manifest.tokens["validation"] < 2]
        if without:
            yield Violation(
                "training.evaluate_every",
                training.evaluate_every,
                f"{listed(without, 'and')} was built without validation documents",
                "training.evaluate_every=0; or titan-exp tokenize with a data.validation_fraction, into a new store",
            )


def weights_fit(data: DataConfig) -> Iterator[Violation]:
    """Each store has a weight and is listed once."""
    if data.weights and len(data.weights) != len(data.paths):
        reason = f"there are {len(data.weights)} weights for {len(data.paths)} stores"
        example = ",".join("1" for _ in data.paths)
        remedy = f"one for each of data.paths: data.weights='[{example}]', or none: by size"
        yield Violation("data.weights", data.weights, reason, remedy)
    if len(set(data.paths)) < len(data.paths):
        yield Violation("data.paths", data.paths, "a store is named twice", "name it once, with a larger weight")


def store_vocabulary(data: DataConfig) -> int | None:
    """Vocabulary size of the stores' tokenizer; None if no store is readable."""
    return max((manifest.vocab_size for manifest in _readable(data)), default=None)


def _readable(data: DataConfig) -> Iterator[Manifest]:
    for path in data.paths if _reads_stores(data) else ():
        try:
            yield read_manifest(path)
        except UserError:
            continue  # reported by `stores_are_complete`


def _reads_stores(data: DataConfig) -> bool:
    return described(data.source).holds == "tokens"


STORE_OPTIONS = rules(
    Refuse(
        "data.tokenizer",
        lambda data: _reads_stores(data) and data.tokenizer != "store",
        "the tokens in a store are those of the tokenizer that it was built with",
        "data.tokenizer=store, or tokenize again",
    ),
    Refuse(
        "data.validation_fraction",
        lambda data: _reads_stores(data) and data.validation_fraction,
        "the validation split was fixed when the store was built",
        "data.validation_fraction=0 takes that; or titan-exp tokenize with this fraction, into a new store",
    ),
    Refuse(
        "data.tokenizer",
        lambda data: not _reads_stores(data) and data.tokenizer == "store",
        "source {data.source} has no store to take it from",
        "data.tokenizer=bytes, or the path of a tokenizer.json",
    ),
    Refuse(
        "data.weights",
        lambda data: not _reads_stores(data) and data.weights,
        "source {data.source} does not read it",
        "titan-exp tokenize each source, and mix the stores: data=tokens data.paths='[a,b]' data.weights=...",
    ),
)
"""Rules for options fixed by the store: tokenizer and validation split."""

RULES = (
    *rules(stores_are_complete, stores_are_large_enough, weights_fit, when=_reads_stores),
    *STORE_OPTIONS,
    *rules(
        Refuse(
            "data.preview",
            lambda data, training: (data.preview or 0) > training.steps,
            "the run has {training.steps} steps",
            "data.preview={training.steps}",
        ),
    ),
)
