"""Data rules: inputs exist and have text, stores are complete, large texts are tokenized first; evaluations."""

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from titan_exp.config import data_files
from titan_exp.config.data_files import Manifest, is_text, matching_files, tokenizer_file, unlimited_split
from titan_exp.config.errors.user_error import UserError, Violation, listed, shown
from titan_exp.config.groups.experiment import Experiment, ModelConfig
from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.config.groups.run import CheckpointConfig, DataConfig, PathsConfig
from titan_exp.config.groups.training import EvaluationConfig, TrainingConfig
from titan_exp.config.schema.data_sets import LOSS, asked, corpus_entries, mixed_stores, open_files, validation_sets
from titan_exp.config.schema.foreign_code import TOKENIZERS, described, sources
from titan_exp.rules.checkpoint import local_checkpoint, recorded_data
from titan_exp.rules.cluster import source_is_known
from titan_exp.rules.rule import Refuse, find_violations, rules

_NAMED = 3


def stores_are_complete(data: DataConfig) -> Iterator[Violation]:
    """Every store exists and is complete, and all have the same tokenizer."""
    if not data.paths:
        reason = "the source tokens reads token stores, and you gave none"
        yield Violation("data.paths", (), reason, "name one, as in data.paths='[stores/mine]'")
    manifests: list[Manifest] = []
    for path in data.paths:
        try:
            manifests.append(data_files.read_manifest(path))
        except UserError as error:
            yield from error.violations
            continue
        damaged = list(islice(manifests[-1].damaged(), _NAMED))
        if damaged:
            problems = "; ".join(f"{name}: {trouble}" for name, trouble in damaged)
            remedy = f"check all of it with titan-exp tokenize check={path}, then copy it again or rebuild it"
            yield Violation("data.paths", path, f"this store is damaged: {problems}", remedy)
    tokenizers = {manifest.tokenizer: manifest.path for manifest in manifests}
    if len(tokenizers) > 1:
        made = listed([f"{path} by {name}" for name, path in tokenizers.items()], "and")
        reason = f"these stores have different tokenizers: {made}"
        yield Violation("data.paths", data.paths, reason, "mix stores of one tokenizer")


def stores_are_large_enough(
    data: DataConfig, training: TrainingConfig, evaluation: EvaluationConfig
) -> Iterator[Violation]:
    """Each store has tokens for a row, and a validation split if the run evaluates."""
    row, manifests = training.seq_len + 1, list(_readable(data))
    for manifest in manifests:
        if manifest.tokens["train"] < row:
            reason = f"{manifest.path} has {manifest.tokens['train']} tokens to train on, and one row takes {row}"
            remedy = f"use training.seq_len={manifest.tokens['train'] - 1} or less, or a larger store"
            yield Violation("training.seq_len", training.seq_len, reason, remedy)
    without = [str(manifest.path) for manifest in manifests if manifest.tokens["validation"] < 2]
    if evaluation.enabled and without:
        reason = f"{listed(without, 'and')} has no validation documents"
        remedy = "use evaluation.every=0, or tokenize into a new store with a data.validation_fraction above 0"
        yield Violation("evaluation.every", evaluation.every, reason, remedy)


def weights_fit(data: DataConfig) -> Iterator[Violation]:
    """Each store has a weight and is listed once."""
    if data.weights and len(data.weights) != len(data.paths):
        reason = f"you gave {len(data.weights)} weights for {len(data.paths)} stores"
        example = shown([1 for _ in data.paths])
        remedy = f"give one for each of data.paths, as in data.weights='{example}', or none to mix them by size"
        yield Violation("data.weights", data.weights, reason, remedy)
    if len(set(data.paths)) < len(data.paths):
        yield Violation("data.paths", data.paths, "you named a store twice", "name it once, with a larger weight")


def store_vocabulary(data: DataConfig) -> int | None:
    """Vocabulary size of the stores' tokenizer; None if no store is readable."""
    return max((manifest.vocab_size for manifest in _readable(data)), default=None)


def _readable(data: DataConfig) -> Iterator[Manifest]:
    for path in data.paths if _reads_stores(data) else ():
        with suppress(UserError):  # reported by `stores_are_complete`
            yield data_files.read_manifest(path)


def _reads_stores(data: DataConfig) -> bool:
    return described(data.source).holds == "tokens"


STORE_OPTIONS = rules(
    Refuse(
        "data.tokenizer",
        lambda data: _reads_stores(data) and data.tokenizer != "store",
        "a token store fixes its tokenizer when you build it",
        "use data.tokenizer=store, or tokenize again",
    ),
    Refuse(
        "data.validation_fraction",
        lambda data: _reads_stores(data) and data.validation_fraction,
        "a token store fixes its validation split when you build it",
        "use data.validation_fraction=0 to take the split of the store, or tokenize into a new store with this "
        "fraction",
    ),
    Refuse(
        "data.tokenizer",
        lambda data: not _reads_stores(data) and data.tokenizer == "store",
        "the source {data.source} reads no token store, which could give the tokenizer",
        "use data.tokenizer=bytes, or give the path of a tokenizer.json",
    ),
    Refuse(
        "data.weights",
        lambda data: not _reads_stores(data) and data.weights,
        "the source {data.source} does not read this key",
        "tokenize each source, and mix the stores: data=tokens data.paths='[a,b]' data.weights=...",
    ),
)
"""Rules for options fixed by the store: tokenizer and validation split."""

_PREVIEW = Refuse(
    "data.preview",
    lambda data, training: (data.preview or 0) > training.steps,
    "the run has only {training.steps} steps",
    "use data.preview={training.steps}",
)
_OF_STORES = rules(stores_are_complete, stores_are_large_enough, weights_fit, when=_reads_stores)
_STORE_RULES = (*_OF_STORES, *STORE_OPTIONS, *rules(_PREVIEW))


_UNSET = {"document": "file"}  # values of keys that choose an input and are never empty, where they are not set
_NEVER_UNSET = ("split", "text_column")  # keys that choose an input and have a value for every source


def source_has_input(data: DataConfig) -> Iterator[Violation]:
    """The source's input files or data set are given and exist."""
    key = described(data.source).files
    if key and not getattr(data, key):
        reason = f"the source {data.source} reads files, and you gave none"
        yield Violation(f"data.{key}", (), reason, f"name them, as in data.{key}='[notes,books/*.txt]'")
    for entry in getattr(data, key) if key else ():
        if not data_files.existing(entry):
            yield data_files.no_such_file(entry, f"data.{key}")
        elif next(matching_files(entry), None) is None:
            reason = "this folder has no files other than hidden ones"
            yield Violation(f"data.{key}", entry, reason, "give a folder with files, or the files themselves")
    violations = asked(data.source, "violations")
    try:
        yield from () if violations is None else violations(data)
    except OSError as error:
        yield _closed(error, "data.source", data.source)


def input_has_text(data: DataConfig) -> Iterator[Violation]:
    """Some file of plain text has text. Files are read until one has."""
    entries = corpus_entries(data) if is_plain_text(data) else ()
    if next(_files(entries), None) is None:
        return
    try:
        if not any(map(is_text, _files(entries))):
            yield Violation("data.paths", entries, "none of these files contains text", "give text files")
        elif data.document != "file" and not any(is_text(path, blank=False) for path in _files(entries)):
            yield Violation("data.document", data.document, "all files of data.paths are blank", "give files with text")
    except OSError as error:
        yield _closed(error, "data.paths", entries)


def no_input_is_ignored(data: DataConfig) -> Iterator[Violation]:
    """The source reads every given input. A user-defined source may read any of them."""
    if data.source not in sources():
        return
    own = described(data.source)
    for key in dict.fromkeys(key for other in sources().values() for key in other.reads if key not in _NEVER_UNSET):
        value = getattr(data, key)
        if key not in own.reads and value and value != _UNSET.get(key):
            yield _ignored(key, value, data.source, [name for name, other in sources().items() if key in other.reads])
    if own.holds != "text" and data.streaming:
        yield _ignored("streaming", True, data.source, [name for name, other in sources().items() if other.is_endless])


def is_plain_text(data: DataConfig) -> bool:
    """True if the documents are the text of files, each of which is one or is divided."""
    return "document" in described(data.source).reads


def files_are_divided(data: DataConfig, evaluation: EvaluationConfig) -> Iterator[Violation]:
    """Files that are one document each leave some to train on, and some to evaluate on if the run evaluates."""
    fraction, evaluates = data.validation_fraction, evaluation.enabled
    if not is_plain_text(data) or data.document != "file" or fraction == 0:
        return
    with suppress(OSError):  # named by `input_has_text`
        needed = {True, False} if evaluates else {False}
        for key, path in (pair for entry in corpus_entries(data) for pair in matching_files(entry)):
            if (held_out := data_files.unit_hash(key) < fraction) in needed and is_text(path):
                needed.remove(held_out)
            if not needed:
                return
        files = data_files.distinct_files(corpus_entries(data))
        hashes = [data_files.unit_hash(key) for path, key in files.items() if is_text(path)]
        if len(hashes) == 1 and evaluates:
            reason = "your one file is one document, and a run cannot both train and evaluate on the same document"
            remedy = "use data.document=paragraph (or line) to cut it into documents, or evaluation.every=0"
            yield Violation("data.document", data.document, reason, remedy)
        elif hashes and max(hashes) < fraction:
            yield data_files.none_to_train_on(fraction, len(hashes), data_files.SPLIT_FURTHER["file"])
        elif hashes and evaluates and min(hashes) >= fraction:
            yield data_files.none_held_out(fraction, len(hashes), min(hashes), data_files.SPLIT_FURTHER["file"])


def streamed_validation_is_limited(data: DataConfig, evaluation: EvaluationConfig) -> Iterator[Violation]:
    """A validation split held out of a stream has a limit, since the stream may be endless."""
    if evaluation.enabled and data.validation_fraction and data.validation_split is None and is_unlimited(data):
        yield unlimited_split(data)


def is_unlimited(data: DataConfig) -> bool:
    """True if the documents to evaluate on may have no end."""
    return described(data.source).is_endless and data.streaming and data.validation_documents is None


def vocabulary_fits(data: DataConfig, model: ModelConfig) -> Iterator[Violation]:
    """The embedding has a row for every token id, unless the model reads none."""
    if not model.vocab_size:
        return
    name, rows, path = data.tokenizer, model.vocab_size, tokenizer_file(data.tokenizer)
    if name not in TOKENIZERS and not path.is_file():
        remedy = "give a tokenizer.json or its folder, or use data.tokenizer=bytes"
        if "/" in name:
            folder = Path(name).parent if name.endswith(".json") else Path(name)
            download = f"titan-exp download OWNER/{folder.name} files=tokenizer target={shlex.quote(str(folder))}"
            remedy = f"run {download}, or {remedy}"
        yield Violation("data.tokenizer", name, f"there is no file {path}", remedy)
        return
    try:
        tokens = store_vocabulary(data) if name == "store" else max(data_files.tokenizer_words(name).values()) + 1
    except UserError:
        reason = f"Hugging Face's tokenizers cannot read {path}"
        remedy = "save one with tokenizer.save('tokenizer.json'), or use data.tokenizer=bytes"
        yield Violation("data.tokenizer", name, reason, remedy)
        return
    if tokens is not None and tokens > rows:
        reason = f"the tokenizer {name} has {tokens} tokens, and each needs a row of the embedding"
        remedy = f"use model.vocab_size={tokens} or more (a multiple of 64 is faster: {-(-tokens // 64) * 64})"
        yield Violation("model.vocab_size", rows, reason, remedy)


def unreadable_source(experiment: Experiment) -> list[Violation]:
    """Violations about the source and its tokenizer, for `titan-exp tokenize`."""
    checks = rules(source_is_known, source_has_input, input_has_text, no_input_is_ignored, vocabulary_fits)
    found = find_violations((*checks, *STORE_OPTIONS), experiment)
    return [violation for violation in found if violation.field.startswith("data.")]


def _closed(error: OSError, key: str, value: object) -> Violation:
    reason = f"titan_exp cannot read {error.filename} ({(error.strerror or str(error)).lower()})"
    return Violation(key, value, reason, "give files that you can read")


def _ignored(key: str, value: object, source: str, readers: Sequence[str]) -> Violation:
    reader = max(readers, key=lambda name: (described(name).holds == "text", len(described(name).reads)))
    text = f"'{shown(value)}'" if isinstance(value, tuple) else shown(value)
    remedy = f"use data={reader} data.{key}={text}, or leave it out"
    return Violation(f"data.{key}", value, f"the source {source} does not read this key", remedy)


def _files(entries: Sequence[str]) -> Iterator[Path]:
    return (path for entry in entries for _, path in matching_files(entry))


DATA_RULES = rules(
    *(source_has_input, input_has_text, no_input_is_ignored),
    *(files_are_divided, streamed_validation_is_limited, vocabulary_fits),
)


BYTES_PER_SECOND, MERGED_BYTES_PER_SECOND = 24e6, 2.9e6
"""Text that one core tokenizes in a second, with the tokenizer `bytes` and with one of 30,000 merges: measured on the
standard library's source."""


def large_text_is_tokenized_first(
    data: DataConfig, checkpoint: CheckpointConfig, paths: PathsConfig, evaluation: EvaluationConfig
) -> Iterator[Violation]:
    """A text on this machine above `LARGEST_TEXT` is a token store, unless it is streamed or a parent reads it so."""
    entries, size = () if data.streaming else corpus_entries(data), 0
    with suppress(OSError, UserError):  # another rule says what is wrong
        size = data_files.corpus_size(entries, only_text=is_plain_text(data))
        if size > data_files.LARGEST_TEXT and described(data.source).has_options:  # which may leave files out
            size = files.content.size if (files := open_files(data)) is not None else size
    if size <= data_files.LARGEST_TEXT:
        return
    # A parent whose order is kept has tokenized texts of any size while training, or may have.
    if checkpoint.continue_from is not None and checkpoint.continue_data == "same":
        path = local_checkpoint(checkpoint, paths)
        if path is None or "data.streaming" not in recorded_data(path.parent.parent):
            return
    seconds = size / (BYTES_PER_SECOND if data.tokenizer == "bytes" else MERGED_BYTES_PER_SECOND)
    reason = (
        f"you have {size / 2**30:.3g} GiB of text. To read each document once in an epoch, the run would first "
        f"tokenize all of it while its GPUs wait, which takes one core at least {max(1, round(seconds / 60))} min"
    )
    streamed = ["data.streaming=true"]
    if any(streamed_validation_is_limited(replace(data, streaming=True), evaluation)):
        streamed.append("data.validation_documents=1024")
    remedy = (
        f"{_store_command(data, entries)}. Or use {' '.join(streamed)}, and accept that an epoch is not an exact pass: "
        f"each of the {data.virtual_shards} virtual shards reads all its documents before it repeats one, and shards "
        "with fewer tokens repeat sooner"
    )
    yield Violation("data.streaming", False, reason, remedy)


def _store_command(data: DataConfig, entries: tuple[str, ...]) -> str:
    """Command that makes a store of the same documents, and the overrides that train from it."""
    from titan_exp.config.hydra.nondefault import quoted  # imports Hydra

    values = {key: getattr(data, key) for key in (*described(data.source).reads, "tokenizer", "validation_fraction")}
    given = {f"data.{key}": shown(value, quoted) for key, value in values.items() if value not in (None, ())}
    given |= {f"++data.options.{key}": shown(value, quoted) for key, value in data.options.items()}
    names = re.findall(r"(?<![^/])[\w-]+(?=[\w.-]*(?:/|$))", str(Path(entries[0]).expanduser().absolute()))
    store = f"stores/{names[-1] if names else 'text'}"
    words = [f"data={data.source}", *(f"{key}={value}" for key, value in given.items()), f"out={store}"]
    before = listed([f"data={data.source}", *given], "and")
    command = f"run titan-exp tokenize {shlex.join(words)}"
    return f"{command}, then train with data=tokens data.paths='[{store}]' instead of {before}"


LARGE_TEXT_LAUNCH_RULES = rules(large_text_is_tokenized_first)
"""Rules of a run that is launched without a checkpoint: one that has read a text in virtual shards keeps them, and
one that is planned may wait for its store."""


def sets_are_read(whole: Experiment) -> Iterator[Violation]:
    """The data of every set keeps the rules of data, and holds documents out if it says so."""
    try:
        sets = validation_sets(whole)
    except UserError as error:
        yield from error.violations
        return
    for name, found in sets.items():
        config, key = whole.evaluation.sets[name], f"evaluation.sets.{name}"
        every = whole.evaluation.every if config.holds_out else 0
        try:
            checked = replace(found, evaluation=replace(found.evaluation, every=every))
            wrong = find_violations((*DATA_RULES, *_STORE_RULES), checked)
            wrong += [unlimited_split(found.data)] if not config.holds_out and is_unlimited(found.data) else []
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
            reason = f"a run of training.seq_len={training.seq_len} takes no more"
            yield Violation(f"{key}.seq_len", length, reason, remedy)
        elif parallelism.pp > 1 or parallelism.cp > 1:
            axis = "pp" if parallelism.pp > 1 else "cp"
            reason = f"with parallelism.{axis}={getattr(parallelism, axis)} all sequences have one length"
            yield Violation(f"{key}.seq_len", length, reason, remedy)


_OF_SETS = rules(
    *(sets_are_read, sets_fit, sets_have_names_of_their_own),
    when=lambda evaluation: evaluation.sets and evaluation.enabled,
)
RULES = (*DATA_RULES, *_STORE_RULES, *_OF_SETS)
