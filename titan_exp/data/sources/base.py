"""Sources of documents: the two small interfaces that a source of your own implements, and the choice between sources.

Name your class in YAML (`data.source=my_package.data.Source`); it is called with the `DataConfig` and `data.options`.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.data import DataConfig


@runtime_checkable
class RandomAccessSource(Protocol):
    """Documents that can be read in any order, such as files or rows of a table.

    A class may also have `key(index) -> str`, a document's identity (a path, an id), from which held-out documents are
    chosen and which stays when others are added (default: the index), `fingerprint: str`, which changes whenever the
    documents do (default: the class, the paths, the options and the number of documents), and `finer: str | None`, the
    setting that makes more documents of the same text, offered where there are too few to hold any out.
    """

    def __len__(self) -> int:
        """Number of documents."""
        ...

    def __getitem__(self, index: int, /) -> str:
        """Text of a document; the same on every process and in every run."""
        ...


class PartReader(Protocol):
    """One pass over one part of a streaming source."""

    def __iter__(self) -> Iterator[str]:
        """The part's documents from the present position on; iterating again continues."""
        ...

    def __next__(self) -> str:
        """The next document; StopIteration at the end of the part."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """The present position, as something JSON can hold; `open` continues from it at the next document."""
        ...


@runtime_checkable
class StreamingSource(Protocol):
    """Documents that are read in order, in parts that can be read independently (the files of a large data set).

    Have at least as many parts as `data.virtual_shards` where you can: otherwise shards share a part, and each of them
    reads all of it. A class may also have `fingerprint: str`, as for random access.
    """

    @property
    def parts(self) -> int:
        """Number of parts; fixed for the whole run."""
        ...

    def open(self, part: int, state: Mapping[str, Any] | None) -> PartReader:
        """A new reader of a part, from its beginning or from a reader's `state_dict()`. Called from several threads."""
        ...


Source = RandomAccessSource | StreamingSource


def build_source(config: DataConfig) -> Source:
    """The source of the documents to train on, those held out included. Raises UserError where it cannot be read."""
    if config.source == "python_stdlib":
        from titan_exp.data.sources.python_stdlib import PythonStdlibSource

        return PythonStdlibSource()
    if config.source == "text":
        from titan_exp.data.sources.split_files import SplitFileSource
        from titan_exp.data.sources.text import TextSource

        files = TextSource(config.paths)
        return files if config.document == "file" else SplitFileSource(files, config.document)
    if config.source == "huggingface":
        from titan_exp.data.sources.huggingface import build_huggingface_source

        return build_huggingface_source(config, config.split)
    return _build_own(config)


def build_validation_source(config: DataConfig) -> Source | None:
    """The source of the documents to evaluate on; None where they are held out of the training documents instead."""
    if not has_validation_split(config):
        return None
    from titan_exp.data.sources.huggingface import build_huggingface_source

    assert config.validation_split is not None
    return build_huggingface_source(config, config.validation_split)


def has_validation_split(config: DataConfig) -> bool:
    """Whether evaluation has documents of its own, so that none are held out of the training documents."""
    return config.source == "huggingface" and config.validation_split is not None


def fingerprint(source: Source, config: DataConfig) -> str:
    """What tells this corpus from another, in a line; a source's own `fingerprint` where it has one."""
    own = getattr(source, "fingerprint", None)
    if isinstance(own, str):
        return own
    size = f"{len(source)} documents" if isinstance(source, RandomAccessSource) else f"{source.parts} parts"
    return f"{config.source} {list(config.paths)} {sorted(config.options.items())}: {size}"


def _build_own(config: DataConfig) -> Source:
    from titan_exp.config.schema.import_path import import_dotted

    own = import_dotted(config.source, "data.source")
    try:
        inspect.signature(own).bind(config, **config.options)
    except TypeError as error:
        raise _refusal(
            config,
            f"it cannot be called with the data group and data.options {config.options} ({error})",
            "a class whose __init__ takes (config, **options)",
        ) from error
    source = own(config, **config.options)
    if not isinstance(source, RandomAccessSource | StreamingSource):
        raise _refusal(
            config,
            "its objects are neither a random-access nor a streaming source",
            "a class with __len__ and __getitem__, or with parts and open; see titan_exp/data/sources/base.py",
        )
    return source


def _refusal(config: DataConfig, reason: str, remedy: str) -> UserError:
    return UserError("The data source cannot be used.", [Violation("data.source", config.source, reason, remedy)])
