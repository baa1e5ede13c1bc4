"""Validation from token stores: the split of the text, per source of a mixture."""

from pathlib import Path
from typing import Any

import pytest

from tests.data.corpora import experiment
from tests.data.store_sources import STREAM, TEXTS
from tests.data.stores import make, over
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.data.batch import Batch
from titan_exp.data.validation_loader import SplitBatches, ValidationLoader


def batches(run: Experiment, dp_rank: int = 0, dp_degree: int = 1) -> ValidationLoader:
    return ValidationLoader(run.data, run.training.seq_len, dp_rank=dp_rank, dp_degree=dp_degree, micro_batch_size=3)


def listed(loader: ValidationLoader | SplitBatches) -> list[list[Any]]:
    def lists(batch: Batch) -> list[Any]:
        optional = [None if tensor is None else tensor.tolist() for tensor in (batch.positions, batch.documents)]
        return [batch.tokens.tolist(), batch.labels.tolist(), *optional]

    return [lists(batch) for batch in loader]


@pytest.mark.parametrize("source", [TEXTS, STREAM])
@pytest.mark.parametrize("limit", [None, 4, 1000])
def test_a_store_has_the_validation_rows_of_its_text(source: str, limit: int | None, tmp_path: Path):
    store = make(tmp_path / "store", source=source)
    data: dict[str, Any] = {"document_mask": True, "reset_positions": True, "validation_documents": limit}
    if source == STREAM and limit is None:
        data["validation_documents"] = 10_000
    text = experiment(source=source, validation_fraction=0.2, batch=24, **data)
    for rank in range(2):
        assert listed(batches(over(store, **data), rank, 2)) == listed(batches(text, rank, 2))


def test_each_source_of_a_mixture_has_its_own_validation_split(tmp_path: Path):
    stores = [make(tmp_path / "a"), make(tmp_path / "b", options={"documents": 35})]
    mixed = batches(over(*stores, weights=(1.0, 9.0)))
    assert list(mixed.sources) == ["a", "b"]
    for store in stores:
        assert listed(mixed.sources[store.path.name]) == listed(batches(over(store)))
    assert listed(mixed) == [batch for part in mixed.sources.values() for batch in listed(part)]
    assert len(mixed) == len(listed(mixed))


def test_a_store_without_validation_documents_is_refused(tmp_path: Path):
    store = make(tmp_path / "store", validation_fraction=0.0)
    with pytest.raises(UserError, match="has no validation documents"):
        batches(over(store))
