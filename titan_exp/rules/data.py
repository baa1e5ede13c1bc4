"""Data rules: source, validation split and tokenizer."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from titan_exp.config.errors.user_error import UserError, Violation, shown
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.paths.data_files import (
    SPLIT_FURTHER,
    distinct_files,
    existing,
    is_text,
    matching_files,
    no_such_file,
    none_held_out,
    none_to_train_on,
    tokenizer_file,
    tokenizer_words,
    unit_hash,
    unlimited_split,
)
from titan_exp.config.schema.builtins import TOKENIZERS, described, sources
from titan_exp.config.schema.sources import asked, corpus_entries
from titan_exp.rules.import_paths import source_is_known
from titan_exp.rules.rule import find_violations, rules
from titan_exp.rules.stores.token_store import STORE_OPTIONS, store_vocabulary

_UNSET = {"document": "file"}
"""Values of keys that choose an input and are never empty, where they are not set."""
_NEVER_UNSET = ("split", "text_column")
"""Keys that choose an input and have a value for every source."""


def source_has_input(data: DataConfig) -> Iterator[Violation]:
    """The source's input files or data set are given and exist."""
    key, violations = described(data.source).files, asked(data.source, "violations")
    entries = getattr(data, key) if key else ()
    if key and not entries:
        reason = f"source {data.source} reads files, and none is given"
        yield Violation(f"data.{key}", (), reason, f"data.{key}='[notes,books/*.txt]'")
    for entry in entries:
        if not existing(entry):
            yield no_such_file(entry, f"data.{key}")
        elif next(matching_files(entry), None) is None:
            reason = "there is no file in it, hidden ones left out"
            yield Violation(f"data.{key}", entry, reason, "a folder with files, or files")
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
            yield Violation("data.paths", entries, "no file there contains text", "text files")
        elif data.document != "file" and not any(is_text(path, blank=False) for path in _files(entries)):
            yield Violation("data.document", data.document, "all files of data.paths are blank", "files with text")
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


def files_are_divided(data: DataConfig, training: TrainingConfig) -> Iterator[Violation]:
    """Files that are one document each leave some to train on, and some to evaluate on if the run evaluates."""
    fraction, evaluates = data.validation_fraction, bool(training.evaluate_every)
    if not is_plain_text(data) or data.document != "file" or fraction == 0:
        return
    with suppress(OSError):  # named by `input_has_text`
        needed = {True, False} if evaluates else {False}
        for key, path in (pair for entry in corpus_entries(data) for pair in matching_files(entry)):
            if (held_out := unit_hash(key) < fraction) in needed and is_text(path):
                needed.remove(held_out)
            if not needed:
                return
        hashes = [unit_hash(key) for path, key in distinct_files(corpus_entries(data)).items() if is_text(path)]
        if len(hashes) == 1 and evaluates:
            reason = "the one file is the one document, which cannot be both trained and evaluated on"
            remedy = "data.document=paragraph (or line) makes documents of its parts; or training.evaluate_every=0"
            yield Violation("data.document", data.document, reason, remedy)
        elif hashes and max(hashes) < fraction:
            yield none_to_train_on(fraction, len(hashes), SPLIT_FURTHER["file"])
        elif hashes and evaluates and min(hashes) >= fraction:
            yield none_held_out(fraction, len(hashes), min(hashes), SPLIT_FURTHER["file"])


def streamed_validation_is_limited(data: DataConfig, training: TrainingConfig) -> Iterator[Violation]:
    """A validation split held out of a stream has a limit, since the stream may be endless."""
    streamed = described(data.source).is_endless and data.streaming and data.validation_split is None
    held_out = training.evaluate_every and data.validation_fraction
    if streamed and held_out and data.validation_documents is None:
        yield unlimited_split(data)


def vocabulary_fits(data: DataConfig, model: ModelConfig) -> Iterator[Violation]:
    """The embedding has a row for every token id, unless the model reads none."""
    if not model.vocab_size:
        return
    name, rows, path = data.tokenizer, model.vocab_size, tokenizer_file(data.tokenizer)
    if name not in TOKENIZERS and not path.is_file():
        remedy = "a tokenizer.json, its folder, or data.tokenizer=bytes"
        yield Violation("data.tokenizer", name, f"there is no file {path}", remedy)
        return
    try:
        tokens = store_vocabulary(data) if name == "store" else max(tokenizer_words(name).values()) + 1
    except UserError:
        reason = f"{path} is not a tokenizer.json of Hugging Face's tokenizers"
        remedy = "save one with tokenizer.save('tokenizer.json'), or data.tokenizer=bytes"
        yield Violation("data.tokenizer", name, reason, remedy)
        return
    if tokens is not None and tokens > rows:
        reason = f"the tokenizer {name} has {tokens} tokens, and each needs a row of the embedding"
        remedy = f"at least model.vocab_size={tokens}; a multiple of 64 is faster: {-(-tokens // 64) * 64}"
        yield Violation("model.vocab_size", rows, reason, remedy)


def unreadable_source(experiment: Experiment) -> list[Violation]:
    """Violations about the source and its tokenizer, for `titan-exp tokenize`."""
    checks = rules(source_is_known, source_has_input, input_has_text, no_input_is_ignored, vocabulary_fits)
    return [
        violation
        for violation in find_violations((*checks, *STORE_OPTIONS), experiment)
        if violation.field.startswith("data.")
    ]


def _closed(error: OSError, key: str, value: object) -> Violation:
    reason = f"{error.filename} cannot be read ({(error.strerror or str(error)).lower()})"
    return Violation(key, value, reason, "files that you can read")


def _ignored(key: str, value: object, source: str, readers: Sequence[str]) -> Violation:
    reader = max(readers, key=lambda name: (described(name).holds == "text", len(described(name).reads)))
    remedy = f"data={reader} data.{key}={_quoted(value)}, or leave it out"
    return Violation(f"data.{key}", value, f"source {source} does not read it", remedy)


def _quoted(value: object) -> str:
    text = shown(value)
    return f"'{text}'" if text.startswith("[") else text


def _files(entries: Sequence[str]) -> Iterator[Path]:
    return (path for entry in entries for _, path in matching_files(entry))


RULES = rules(
    source_has_input,
    input_has_text,
    no_input_is_ignored,
    files_are_divided,
    streamed_validation_is_limited,
    vocabulary_fits,
)
