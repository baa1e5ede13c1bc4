"""Document source interfaces: random access and streaming.

`data.source` takes the import path of a class with either interface (`data.source=my_package.data.Source`); it is
called with the `DataConfig` and `data.options`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.run import DataConfig
from titan_exp.data.sources.content import CorpusContent


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
    """Documents read in order, in independently readable parts (e.g. files of a large data set).

    Provide at least `data.virtual_shards` parts if possible: each shard that shares a part reads all of it. Optional
    member: `fingerprint: str`, as for random access.
    """

    @property
    def parts(self) -> int:
        """Number of parts; constant for the whole run."""
        ...

    def open(self, part: int, state: Mapping[str, Any] | None) -> PartReader:
        """Read a part from its beginning or from a reader's `state_dict()`. Must be thread-safe."""
        ...


Source = RandomAccessSource | StreamingSource


CONTENT, REVISION = "data.content", "data.revision"
"""Keys of a corpus identity: content of local files; fingerprint of a data set of the hub, which also changes with
files that are not read."""
STREAMING, SHARDS = "data.streaming", "data.virtual_shards"
"""Keys of a corpus identity in one order alone: windows of a text's token store; virtual shards, tokenized while
training."""
MIXTURE = "data.mixture"
"""Key of a corpus identity: order of a mixture whose shares are exact, where earlier versions rounded them."""


def content_identity(source: Source) -> dict[str, str]:
    """Content checksum of a source that reads local files, or revision of a data set of the hub, by key."""
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
            f"the checkpoint was made with {saved.get(key)}",
            f"{'the former files' if key == CONTENT else 'that one'}, or {restart}",
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
        return own
    size = f"{len(source)} documents" if isinstance(source, RandomAccessSource) else f"{source.parts} parts"
    return f"{config.source} {list(config.paths)} {sorted(config.options.items())}: {size}"
