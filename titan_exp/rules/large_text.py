"""Large text rule: a text that takes long to tokenize is a token store before the run, or is streamed on purpose."""

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from titan_exp.config.errors.user_error import UserError, Violation, listed, shown
from titan_exp.config.groups.run import CheckpointConfig, DataConfig, PathsConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.paths import data_files
from titan_exp.config.schema.builtins import described
from titan_exp.config.schema.sources import corpus_entries, open_files
from titan_exp.rules.continue_from import local_checkpoint, recorded_data
from titan_exp.rules.data import is_plain_text, streamed_validation_is_limited
from titan_exp.rules.rule import rules

BYTES_PER_SECOND, MERGED_BYTES_PER_SECOND = 24e6, 2.9e6
"""Text that one core tokenizes in a second, with the tokenizer `bytes` and with one of 30,000 merges: measured on the
standard library's source."""


def large_text_is_tokenized_first(
    data: DataConfig, checkpoint: CheckpointConfig, paths: PathsConfig, training: TrainingConfig
) -> Iterator[Violation]:
    """A text on this machine above `LARGEST_TEXT` is a token store, unless it is streamed or a parent reads it so."""
    entries, size = () if data.streaming else corpus_entries(data), 0
    with suppress(OSError, UserError):  # another rule says what is wrong
        size = data_files.corpus_size(entries, only_text=is_plain_text(data))
        if size > data_files.LARGEST_TEXT and described(data.source).has_options:  # which may leave files out
            size = files.content.size if (files := open_files(data)) is not None else size
    if size <= data_files.LARGEST_TEXT or _parent_reads_it(checkpoint, paths):
        return
    seconds = size / (BYTES_PER_SECOND if data.tokenizer == "bytes" else MERGED_BYTES_PER_SECOND)
    reason = (
        f"there are {size / 2**30:.3g} GiB of text. For an epoch to read each document once, all of it is tokenized "
        f"first; this run would do that while its GPUs wait, for {max(1, round(seconds / 60))} min of one core or more"
    )
    streamed = ["data.streaming=true"]
    if any(streamed_validation_is_limited(replace(data, streaming=True), training)):
        streamed.append("data.validation_documents=1024")
    remedy = (
        f"{_store_command(data, entries)}; or {' '.join(streamed)}, with which an epoch is no exact pass: each of "
        f"{data.virtual_shards} virtual shards reads its documents once before any again, and those with fewer tokens "
        "begin again earlier"
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
    return (
        f"titan-exp tokenize {shlex.join(words)}, then data=tokens data.paths='[{store}]' in place of "
        f"{listed([f'data={data.source}', *given], 'and')}"
    )


def _parent_reads_it(checkpoint: CheckpointConfig, paths: PathsConfig) -> bool:
    """True if a parent's order is kept, in which texts of any size are tokenized while training, or may be kept."""
    if checkpoint.continue_from is None or checkpoint.continue_data != "same":
        return False
    path = local_checkpoint(checkpoint, paths)
    return path is None or "data.streaming" not in recorded_data(path.parent.parent)


LAUNCH_RULES = rules(large_text_is_tokenized_first)
"""Rules of a run that is launched without a checkpoint: one that has read a text in virtual shards keeps them, and
one that is planned may wait for its store."""
