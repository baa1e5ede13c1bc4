"""Group `data`: source of documents, tokenizer, order."""

from dataclasses import dataclass, field
from typing import Any, Literal

from titan_exp.config.extension import extended
from titan_exp.config.groups.types import PositiveFloat, PositiveInt, Share
from titan_exp.config.images.image_options import ImageKind


@extended("data")
@dataclass(frozen=True)
class DataConfig:
    """A source of documents, a tokenizer, and a fixed order."""

    source: str
    """Source of data: a file of `titan_exp/data/sources`, or the import path of a class in your own package.
    E.g. `data.source=my_package.data.Source`."""
    paths: tuple[str, ...]
    """Source `text`: files, folders and globs. Source `tokens`: folders that `titan-exp tokenize` wrote. Source
    `latents`: one that `titan-exp encode` wrote. Source `images`: a folder, a pattern of tar files, or a Hugging Face
    data set, as `titan-exp encode` reads it. E.g. `data.paths='[notes,books/*.txt]'`."""
    weights: tuple[PositiveFloat, ...]
    """Source `tokens`: share of the tokens to take from each of `paths`, in any unit; empty is by their sizes, so that
    their epochs end together. Shares are exact to within a row.

    Each store has its own epochs. E.g. `data.weights='[3,7]'`."""
    document: Literal["file", "paragraph", "line"]
    """Source `text`: unit of a document: each file, each paragraph (blank lines separate them), or each line.
    E.g. `data.document=paragraph`."""
    dataset: str | None
    """Source `huggingface`: name on the hub, a local folder, or a loader such as `json` or `parquet`.
    E.g. `data.dataset=allenai/c4`."""
    subset: str | None
    """Source `huggingface`: the data set's configuration name. E.g. `data.subset=en`."""
    data_files: tuple[str, ...]
    """Source `huggingface`: files for the training split, where `dataset` is a loader.
    E.g. `data.data_files='[corpus.jsonl]'`."""
    split: str
    """Source `huggingface`: split to train on. E.g. `data.split=train`."""
    validation_split: str | None
    """Source `huggingface`: split to evaluate on; null holds out `validation_fraction` of the training split.
    E.g. `data.validation_split=validation`."""
    text_column: str
    """Source `huggingface`: column that holds the text. E.g. `data.text_column=content`."""
    streaming: bool
    """Read and tokenize while training, in virtual shards, instead of tokenizing first (source `huggingface`:
    downloading too). An epoch is then no exact pass over the data: shards with fewer tokens begin again earlier.

    Local files above 1 GiB need it, or a store of `titan-exp tokenize`: a run does not tokenize them while its GPUs
    wait. E.g. `data.streaming=true`."""
    shuffle_buffer: PositiveInt
    """Source `huggingface` when streaming: documents among which each virtual shard picks the next.
    E.g. `data.shuffle_buffer=1000`."""
    tokenizer: str
    """`bytes`, or the path of a Hugging Face `tokenizer.json` (or of the folder that holds it). Source `tokens`:
    `store`, the one that the stores were made with. E.g. `data.tokenizer=llama3/tokenizer.json`."""
    validation_fraction: Share
    """Share of documents held out for evaluation, chosen by document and never trained on. Source `tokens`: 0, as a
    store was divided when it was made. E.g. `data.validation_fraction=0.01`."""
    validation_documents: PositiveInt | None
    """At most this many documents of the validation split are evaluated on, the first in the source's order (of each
    store); null is all of them.

    Those left out are not trained on either. E.g. `data.validation_documents=2048`."""
    virtual_shards: PositiveInt
    """Independent streams into which documents are divided that are tokenized while training; part of the experiment,
    as it fixes their order. Best a multiple of the data-parallel degree, and at most the number of files.

    Otherwise several ranks read and tokenize the same shards, in the same order, and shards that share a file each read
    all of it. Text that is tokenized first, and source `tokens`, have none: any row is found at once.
    E.g. `data.virtual_shards=512`."""
    document_mask: bool
    """Tokens attend only within their own document, and the first token of a document is not predicted.
    E.g. `data.document_mask=true`."""
    reset_positions: bool
    """Positions count from each document's start instead of the sequence's. E.g. `data.reset_positions=true`."""
    prefetch: PositiveInt
    """Micro-batches prepared ahead in the background. E.g. `data.prefetch=8`."""
    preview: PositiveInt | None
    """Print the batch that the model sees at this step, decoded, and train nothing; null trains.
    E.g. `data.preview=1`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments for a source of your own. Source `images`: captions, sizes and encoders, as options of
    `titan-exp encode`. E.g. `+data.options.url=...`."""
    images: ImageKind | None = None
    """Source `images`, which are encoded while training: `emoji`, `folder`, `glyphs`, `huggingface` or `webdataset`;
    null for other sources. E.g. `data.images=folder`."""
