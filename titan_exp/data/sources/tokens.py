"""Source `tokens`: a token store written by `titan-exp tokenize`, or a mixture of several."""

import functools
from collections.abc import Callable

from titan_exp.config.data_files import read_manifest, store_splits
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.schema.foreign_code import SourceDescription
from titan_exp.data.token_store import TokenSequence, TokenSplit, build_store_sampler, open_split

DESCRIPTION = SourceDescription(reads=("paths",), holds="tokens", is_store=True)
build_sampler = build_store_sampler


def validation_splits(config: DataConfig, all_documents: bool) -> dict[str, Callable[[], TokenSequence]]:
    """Openers of each store's validation split, by store name (empty for a single store); with `all_documents`, of
    every split, by store and split. Raises UserError if a store has no validation documents."""
    for path in () if all_documents else config.paths:
        if read_manifest(path).tokens.get("validation", 0) < 2:
            reason = "this store has no validation documents"
            violation = Violation("data.paths", path, reason, "use evaluation.every=0, or another store")
            raise UserError("There is nothing to evaluate on.", [violation])
    return {
        name: functools.partial(open_split, TokenSplit(*split), config.validation_documents)
        for name, split in store_splits(config.paths, all_documents=all_documents).items()
    }
