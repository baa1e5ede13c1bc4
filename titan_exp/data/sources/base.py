"""Document source interfaces: random access and streaming.

`data.source` takes the import path of a class with either interface (`data.source=my_package.data.Source`); it is
called with the `DataConfig` and `data.options`.
"""

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.extension import provided
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.paths.data_files import read_manifest
from titan_exp.config.schema.builtins import sources
from titan_exp.config.schema.component import Call, import_callable, require_members
from titan_exp.config.secrets import revealed
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


INTERFACE = "titan_exp/data/sources/base.py"
"""File that documents the interface of a source."""


def builtin_source(config: DataConfig) -> ModuleType | None:
    """Module of a built-in source or of an extension's; None for a user's class."""
    name = config.source
    return import_module(provided("sources").get(name, f"titan_exp.data.sources.{name}")) if name in sources() else None


def build_source(config: DataConfig) -> Source:
    """Open the training documents, held-out ones included. Raises UserError if they cannot be read."""
    module = builtin_source(config)
    return _build_own(config) if module is None else module.build(config)


def known_identity(config: DataConfig) -> tuple[dict[str, Any], CorpusContent | None]:
    """Identity of the data as far as it is known without opening the source: entries of `Sampler.corpus`, and the local
    files, if any. Imports no torch. Raises UserError if files are missing."""
    identity: dict[str, Any] = {}
    if config.source == "tokens":
        return {"data.paths": [read_manifest(path).fingerprint for path in config.paths]}, None
    if config.tokenizer != "bytes":
        from titan_exp.data.tokenizers import build_tokenizer  # imports numpy

        identity["data.tokenizer"] = build_tokenizer(config).fingerprint
    files = None if (module := builtin_source(config)) is None else module.open_files(config)
    if files is None:
        return identity, None
    return identity | {CONTENT: files.content.fingerprint()}, files.content


def has_validation_split(config: DataConfig) -> bool:
    """True if the source has a separate validation split, so that no training documents are held out."""
    return config.validation_split is not None and hasattr(builtin_source(config), "build_validation")


def held_out_fraction(config: DataConfig) -> float:
    """Fraction of the training documents that is held out: 0 beside a separate validation split."""
    return 0.0 if has_validation_split(config) else config.validation_fraction


def build_validation_source(config: DataConfig) -> Source | None:
    """Open the source's validation split; None if validation documents are held out of the training documents."""
    module = builtin_source(config)
    return module.build_validation(config) if module is not None and has_validation_split(config) else None


def own_source(config: DataConfig) -> Any:
    """Import a user's class, without opening its data.

    Raises:
        UserError: it cannot be imported, takes other arguments than `(config, **options)`, or is no source.
    """
    own = import_callable(config.source, "data.source", Call(("config",), (), "data.options", config.options))
    if isinstance(own, type) and not hasattr(own, "open"):
        require_members(own, config.source, "data.source", ("__len__", "__getitem__"), INTERFACE)
    return own


def is_stream(own: Any) -> bool:
    """True if a user's class, or the one that a user's function says it returns, is a streaming source."""
    made = own if isinstance(own, type) else getattr(own, "__annotations__", {}).get("return")
    return hasattr(made, "open") and not hasattr(made, "__getitem__")


def _build_own(config: DataConfig) -> Source:
    own, config = own_source(config), revealed(config, "data")
    source = own(config, **config.options)
    if not isinstance(source, RandomAccessSource | StreamingSource):
        reason = "its objects are neither a random-access nor a streaming source"
        remedy = f"a class with __len__ and __getitem__, or with parts and open; see {INTERFACE}"
        raise _refusal(config, reason, remedy)
    if isinstance(source, RandomAccessSource) and len(source) == 0:
        raise _refusal(config, "it has no documents", "a source whose __len__ is 1 or more")
    return source


def _refusal(config: DataConfig, reason: str, remedy: str) -> UserError:
    return UserError("The data source cannot be used.", [Violation("data.source", config.source, reason, remedy)])
