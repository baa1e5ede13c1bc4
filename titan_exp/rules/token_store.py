"""Rules about token stores: that they are whole, belong together, and hold what the run asks of them.

Sizes of all files are looked at here, once for a run, and not by every rank.
"""

from collections.abc import Iterator
from itertools import islice

from titan_exp.config.errors.did_you_mean import listed
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.data import DataConfig
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.paths.token_store_manifest import Manifest, read_manifest

_NAMED = 3


def stores_are_whole(experiment: Experiment) -> Iterator[Violation]:
    """Every store is there, complete, and of one tokenizer."""
    data = experiment.data
    if data.source != "tokens":
        return
    if not data.paths:
        yield Violation("data.paths", (), "source tokens reads stores, and none is named", "data.paths='[stores/mine]'")
    manifests: list[Manifest] = []
    for path in data.paths:
        try:
            manifests.append(read_manifest(path))
        except UserError as error:
            yield from error.violations
            continue
        damaged = list(islice(manifests[-1].damaged(), _NAMED))
        if damaged:
            words = "; ".join(f"{name}: {trouble}" for name, trouble in damaged)
            remedy = f"titan-exp tokenize check={path} looks at all of it; then copy it, or make it, anew"
            yield Violation("data.paths", path, f"this store is damaged: {words}", remedy)
    tokenizers = {manifest.tokenizer: manifest.path for manifest in manifests}
    if len(tokenizers) > 1:
        made = listed([f"{path} by {name}" for name, path in tokenizers.items()], "and")
        yield Violation("data.paths", data.paths, f"the stores have different tokenizers: {made}", "stores of one")


def stores_have_enough(experiment: Experiment) -> Iterator[Violation]:
    """A row fits into each store, and there is something to evaluate on."""
    data, row = experiment.data, experiment.training.seq_len + 1
    manifests = list(_readable(data))
    for manifest in manifests:
        if manifest.tokens["train"] < row:
            yield Violation(
                "training.seq_len",
                experiment.training.seq_len,
                f"{manifest.path} has {manifest.tokens['train']} tokens to train on, and a row takes {row}",
                f"at most training.seq_len={manifest.tokens['train'] - 1}, or a larger store",
            )
    if experiment.training.evaluate_every and manifests:
        without = [str(manifest.path) for manifest in manifests if manifest.tokens["validation"] < 2]
        if without:
            yield Violation(
                "training.evaluate_every",
                experiment.training.evaluate_every,
                f"{listed(without, 'and')} was made without documents to evaluate on",
                "training.evaluate_every=0; or titan-exp tokenize with a data.validation_fraction, into a new store",
            )


def weights_fit(experiment: Experiment) -> Iterator[Violation]:
    """There is a weight for each store, and each store is named once."""
    data = experiment.data
    if data.source != "tokens":
        return
    if data.weights and len(data.weights) != len(data.paths):
        yield Violation(
            "data.weights",
            data.weights,
            f"there are {len(data.weights)} weights for {len(data.paths)} stores",
            f"one for each of data.paths: data.weights='[{','.join('1' for _ in data.paths)}]', or none: by size",
        )
    if len(set(data.paths)) < len(data.paths):
        yield Violation("data.paths", data.paths, "a store is named twice", "name it once, with a larger weight")


def store_says_the_rest(experiment: Experiment) -> Iterator[Violation]:
    """Tokenizer and held-out documents were decided when a store was made."""
    data = experiment.data
    if data.source == "tokens":
        if data.tokenizer != "store":
            reason = "the tokens in a store are those of the tokenizer that it was made with"
            yield Violation("data.tokenizer", data.tokenizer, reason, "data.tokenizer=store, or tokenize anew")
        if data.validation_fraction:
            yield Violation(
                "data.validation_fraction",
                data.validation_fraction,
                "what is held out was decided when the store was made",
                "data.validation_fraction=0 takes that; or titan-exp tokenize with this fraction, into a new store",
            )
        return
    if data.tokenizer == "store":
        reason = f"source {data.source} has no store to take it from"
        yield Violation("data.tokenizer", "store", reason, "data.tokenizer=bytes, or the path of a tokenizer.json")
    if data.weights:
        reason = f"source {data.source} does not read it"
        remedy = "titan-exp tokenize each source, and mix the stores: data=tokens data.paths='[a,b]' data.weights=..."
        yield Violation("data.weights", data.weights, reason, remedy)


def preview_is_a_step(experiment: Experiment) -> Iterator[Violation]:
    """The step to look at is one of the run's."""
    step, steps = experiment.data.preview, experiment.training.steps
    if step is not None and step > steps:
        yield Violation("data.preview", step, f"the run has {steps} steps", f"data.preview={steps}")


def store_vocabulary(data: DataConfig) -> int | None:
    """Tokens of the tokenizer that the stores were made with; None where no store can be read."""
    return max((manifest.vocab_size for manifest in _readable(data)), default=None)


def _readable(data: DataConfig) -> Iterator[Manifest]:
    for path in data.paths if data.source == "tokens" else ():
        try:
            yield read_manifest(path)
        except UserError:
            continue  # said by `stores_are_whole`


RULES = (stores_are_whole, stores_have_enough, weights_fit, store_says_the_rest, preview_is_a_step)
