"""Document source interfaces, for random access and streaming, and warnings about your data.

`data.source` takes the import path of a class with either interface (`data.source=my_package.data.Source`), or of a
function that returns one. A class with a nested dataclass `Options` is called as `(config, options)`, others as
`(config, **data.options)`. Options join the `fingerprint` unless they have their default or are a
`field(compare=False)`. A built-in source may have a static method `open_files` with the same arguments. It returns the
`FileSource` of the files that the documents come from, or None; its objects then have the same `content`.
"""

import contextlib
import hashlib
import os
import time
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from titan_exp.config.data_files import read_manifest, user_folder
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.schema.component import Call, import_callable, import_dotted, require_members
from titan_exp.config.schema.data_sets import open_files, source_arguments, source_member
from titan_exp.config.schema.foreign_code import described, sources
from titan_exp.config.schema.typed_config import typed_options
from titan_exp.config.secrets import revealed


class DataWarning(UserWarning):
    """Warning about your data."""


def warn(sentence: str) -> None:
    """Warn about the data, once per process."""
    warnings.warn(sentence, DataWarning, stacklevel=2)


_format = warnings.formatwarning


@wraps(_format)
def _format_plainly(message: Any, category: type[Warning], *where: Any, **line: Any) -> str:
    return f"{message}\n" if issubclass(category, DataWarning) else _format(message, category, *where, **line)


warnings.formatwarning = _format_plainly


WHOLE_BYTES, WHOLE_FILES = 256 * 2**20, 20_000
"""Maximum size and number of files of a corpus that is read completely; a larger one is sampled."""
SAMPLES, SAMPLE_BYTES = 512, 2**16
"""Number and size of the samples, spaced evenly over the concatenated files and including the first and last bytes."""
SETTLED = 2.0
"""Seconds without a change after which a checksum is cached, because a write within a clock tick keeps the times."""


class CorpusContent:
    """Files of a corpus, in order."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._paths: list[Path] = []
        self._ends = [0]
        self._stamp = hashlib.blake2b(f"{WHOLE_BYTES} {WHOLE_FILES} {SAMPLES} {SAMPLE_BYTES}".encode(), digest_size=16)
        self._changed = 0.0
        self.modified = 0.0
        """Newest modification time of a file, in Unix time."""

    def add(self, key: str, path: Path, stat: os.stat_result) -> None:
        """Append a file under `key`, its path relative to the corpus."""
        self._keys.append(key)
        self._paths.append(path)
        self._ends.append(self._ends[-1] + stat.st_size)
        self.modified = max(self.modified, stat.st_mtime)
        self._changed = max(self._changed, stat.st_mtime, stat.st_ctime)
        identity = (key, os.path.abspath(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        self._stamp.update(repr(identity).encode(errors="surrogateescape"))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return self._ends[-1]

    @property
    def stamp(self) -> str:
        """Digest of paths, sizes, times and inodes of the files; it changes with any change of a file."""
        return self._stamp.hexdigest()

    @property
    def is_sampled(self) -> bool:
        """True if the corpus is too large to be read completely."""
        return self.size > WHOLE_BYTES or len(self._paths) > WHOLE_FILES

    def fingerprint(self) -> str:
        """Identity in words: numbers of files and bytes, and the checksum."""
        with contextlib.suppress(OSError):
            return self._cache_file().read_text(encoding="utf-8")
        settled = time.time() - self._changed > SETTLED
        kind = f"{SAMPLES} samples" if self.is_sampled else "content"
        count = f"{len(self._paths)} file{'s' * (len(self._paths) != 1)}"
        text = f"{count}, {self._ends[-1]} bytes, {kind} {self._checksum()}"
        if settled:
            with contextlib.suppress(OSError):  # no home folder, or a full disk
                cached = self._cache_file()
                cached.parent.mkdir(parents=True, exist_ok=True)
                temporary = cached.with_suffix(f".{os.getpid()}.tmp")
                temporary.write_text(text, encoding="utf-8")
                os.replace(temporary, cached)
        return text

    def _cache_file(self) -> Path:
        return user_folder("XDG_CACHE_HOME", ".cache") / "corpora" / self.stamp

    def _checksum(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for key, begin, end in zip(self._keys, self._ends, self._ends[1:], strict=False):
            digest.update(f"{key}\0{end - begin}\0".encode(errors="surrogateescape"))
        if self.is_sampled:
            last = max(0, self._ends[-1] - SAMPLE_BYTES)
            # As a set: a small corpus of many files would have duplicates.
            for offset in sorted({last * number // (SAMPLES - 1) for number in range(SAMPLES)}):
                number = bisect_right(self._ends, offset) - 1
                with self._paths[number].open("rb", buffering=0) as file:
                    file.seek(offset - self._ends[number])
                    digest.update(file.read(SAMPLE_BYTES))
        else:
            for path in self._paths:
                with path.open("rb") as file:
                    hashlib.file_digest(file, lambda: digest)
        return digest.hexdigest()


@runtime_checkable
class RandomAccessSource(Protocol):
    """Documents indexed by number, such as files or rows of a table.

    Optional members: `key(index) -> str`, a stable document identity (path, id) hashed for the held-out split (default:
    the index); `fingerprint: str`, which changes with the documents, so that they can be tokenized once before training
    (without one, class, paths, options and number of documents are compared, and documents are tokenized while
    training); `split_further: str | None`, a setting that splits the same text into more documents, suggested when
    there are too few to hold any out.
    """

    def __len__(self) -> int:
        """Number of documents."""
        ...

    def __getitem__(self, index: int, /) -> str:
        """Text of a document, identical in every process and run."""
        ...


class PartReader(Protocol):
    """Reader of one pass over one part of a streaming source."""

    def __iter__(self) -> Iterator[str]:
        """Iterate over the remaining documents of the part; iterating again continues."""
        ...

    def __next__(self) -> str:
        """Next document; StopIteration at the end of the part."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """JSON-serializable position; `StreamingSource.open` resumes from it at the next document."""
        ...


@runtime_checkable
class StreamingSource(Protocol):
    """Documents read in order, in independently readable parts (e.g. files of a large data set). Provide at least
    `data.virtual_shards` parts if you can, because each shard that shares a part reads all of it. Optional member:
    `fingerprint: str`, as for random access."""

    @property
    def parts(self) -> int:
        """Number of parts; constant for the whole run."""
        ...

    def open(self, part: int, state: Mapping[str, Any] | None) -> PartReader:
        """Read a part from its beginning or from a reader's `state_dict()`. Must be thread-safe."""
        ...


Source = RandomAccessSource | StreamingSource


CONTENT, REVISION = "data.content", "data.revision"
"""Keys of a corpus identity: the content of local files, and the fingerprint of a data set on the hub, which also
changes with files that are not read."""
STREAMING, SHARDS = "data.streaming", "data.virtual_shards"
"""Keys of a corpus identity that exist in one order only: windows of a text's token store, and virtual shards tokenized
while training."""
MIXTURE = "data.mixture"
"""Key of a corpus identity: the order of a mixture with exact shares; earlier versions rounded shares."""


def content_identity(source: Source) -> dict[str, str]:
    """Content checksum of a source that reads local files, or revision of a data set on the hub, by key."""
    content, revision = getattr(source, "content", None), getattr(source, "revision", None)
    if isinstance(content, CorpusContent):
        return {CONTENT: content.fingerprint()}
    return {REVISION: revision} if isinstance(revision, str) else {}


def require_same_data(
    saved: Mapping[str, Any],
    present: Mapping[str, Any],
    keys: Iterable[str],
    restart: str = "checkpoint.continue_data=restart in a new run",
) -> None:
    """Raise UserError if these keys of two corpus identities differ; `restart` begins with the present data."""
    violations = [
        Violation(
            key,
            present.get(key),
            f"this checkpoint read {saved.get(key)}",
            f"use {'the former files' if key == CONTENT else 'that one'}, or {restart}",
        )
        for key in sorted(keys)
        if saved.get(key) != present.get(key)
    ]
    if violations:
        raise UserError("The run cannot continue on other data.", violations)


def fingerprint(source: Source, config: DataConfig) -> str:
    """One-line identity of a corpus: the source's own `fingerprint`, or one from its settings and size."""
    own = getattr(source, "fingerprint", None)
    if isinstance(own, str):
        return own + _chosen_options(getattr(source, "Options", None), config)
    size = f"{len(source)} documents" if isinstance(source, RandomAccessSource) else f"{source.parts} parts"
    return f"{config.source} {list(config.paths)} {sorted(config.options.items())}: {size}"


def _chosen_options(kind: Any, config: DataConfig) -> str:
    """Options that choose documents and differ from their defaults; a `field(compare=False)` chooses none."""
    if not is_dataclass(kind):
        return ""
    chosen = {}
    typed = typed_options(kind, config.options, "data.options")  # type: ignore[arg-type]  # secrets stay hidden
    for field in filter(lambda field: field.compare, fields(kind)):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if (value := getattr(typed, field.name)) != default:
            chosen[field.name] = value
    return f", options {chosen}" if chosen else ""


INTERFACE = "titan_exp/data/sources/base.py"  # file that documents the interface of a source


def build_source(config: DataConfig) -> Source:
    """Open the training documents, held-out ones included. Raises UserError if they cannot be read."""
    build = source_member(config.source, "build") or own_source(config)
    options = source_member(config.source, "Options") or getattr(build, "Options", None)
    if config.source in sources() or is_dataclass(options):
        source = build(*source_arguments(options, config))
    else:
        given = revealed(config, "data")
        source = build(given, **given.options)
    if not isinstance(source, RandomAccessSource | StreamingSource):
        reason = "an object of it is neither a random-access nor a streaming source"
        remedy = f"write a class with __len__ and __getitem__, or with parts and open (see {INTERFACE})"
        raise _refusal(config, reason, remedy)
    if isinstance(source, RandomAccessSource) and len(source) == 0:
        raise _refusal(config, "this source has no documents", "give a source whose __len__ is 1 or more")
    return source


def known_identity(config: DataConfig) -> tuple[dict[str, Any], CorpusContent | None]:
    """Identity of the data, as far as it is known without opening the source: entries of `Sampler.corpus`, and the
    local files, if any. Imports no torch. Raises UserError if files are missing."""
    identity: dict[str, Any] = {}
    if described(config.source).holds == "tokens":
        return {"data.paths": [read_manifest(path).fingerprint for path in config.paths]}, None
    if config.tokenizer != "bytes":
        from titan_exp.data.tokenizers import build_tokenizer  # this imports numpy

        identity["data.tokenizer"] = build_tokenizer(config).fingerprint
    if (files := open_files(config)) is None:
        return identity, None
    return identity | {CONTENT: files.content.fingerprint()}, files.content


def has_validation_split(config: DataConfig) -> bool:
    """True if the source has a separate validation split, so that no training documents are held out."""
    return config.validation_split is not None and source_member(config.source, "build_validation") is not None


def held_out_fraction(config: DataConfig) -> float:
    """Fraction of the training documents that is held out; 0 with a separate validation split."""
    return 0.0 if has_validation_split(config) else config.validation_fraction


def build_validation_source(config: DataConfig) -> Source | None:
    """Open the source's validation split; None if validation documents are held out of the training documents."""
    return source_member(config.source, "build_validation")(config) if has_validation_split(config) else None


def own_source(config: DataConfig) -> Any:
    """Import your source class without opening its data. Raises UserError if it cannot be imported, takes other
    arguments than `(config, options)`, with `Options`, or otherwise `(config, **options)`, or is not a source."""
    typed = is_dataclass(getattr(import_dotted(config.source, "data.source"), "Options", None))
    call = Call(("config", "options")) if typed else Call(("config",), (), "data.options", config.options)
    own = import_callable(config.source, "data.source", call)
    if isinstance(own, type) and not hasattr(own, "open"):
        require_members(own, config.source, "data.source", ("__len__", "__getitem__"), INTERFACE)
    return own


def _refusal(config: DataConfig, reason: str, remedy: str) -> UserError:
    return UserError("Cannot use this data source.", [Violation("data.source", config.source, reason, remedy)])
