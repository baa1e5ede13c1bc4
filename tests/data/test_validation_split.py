import re
from collections.abc import Iterable

import pytest

from tests.config.composing import experiment as composed
from tests.data.corpora import OwnTable, experiment
from titan_exp.config.data_files import unit_hash
from titan_exp.config.errors.user_error import UserError
from titan_exp.data.source_check import training_subset, validation_subset
from titan_exp.data.sources.base import RandomAccessSource
from titan_exp.data.sources.python_stdlib import build

CONFIG = experiment().data


class Named:
    """Documents that are their own keys."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> str:
        return self.names[index]

    def key(self, index: int) -> str:
        return self[index]


def contents(part: RandomAccessSource) -> set[str]:
    return {part[index] for index in range(len(part))}


@pytest.mark.parametrize("source", [OwnTable(CONFIG, documents=500), Named(f"d{number}" for number in range(500))])
def test_every_document_is_in_exactly_one_split(source: RandomAccessSource):
    training, held_out = training_subset(source, 0.1), validation_subset(source, 0.1)
    assert contents(training) | contents(held_out) == contents(source)
    assert len(training) + len(held_out) == 500
    assert 25 < len(held_out) < 75


def test_held_out_documents_are_nested_by_fraction():
    source = OwnTable(CONFIG, documents=500)
    assert contents(validation_subset(source, 0.05)) < contents(validation_subset(source, 0.2))


def test_keyed_documents_keep_their_split_when_others_change():
    before, after = Named(f"d{number}" for number in range(300)), Named(f"d{number}" for number in range(100, 600))
    both = set(before.names) & set(after.names)
    assert contents(validation_subset(before, 0.1)) & both == contents(validation_subset(after, 0.1)) & both


def test_hashes_never_change():
    """A change would leak held-out documents into the training of existing runs."""
    assert unit_hash("argparse.py") == pytest.approx(0.32998643888054546)
    assert contents(validation_subset(Named("abcdefghij"), 0.3)) == {"a", "c", "h", "i", "j"}


def test_an_empty_validation_split_is_refused_with_a_working_fraction():
    source = OwnTable(CONFIG, documents=5)
    with pytest.raises(UserError, match=r"none of the 5 documents") as caught:
        validation_subset(source, 0.001)
    offered = re.search(r"data\.validation_fraction=([\d.]+)", str(caught.value).partition("\n    ")[2])
    assert offered is not None
    assert len(validation_subset(source, float(offered[1]))) >= 1
    with pytest.raises(UserError, match=r"evaluation\.every=0"):
        validation_subset(OwnTable(CONFIG, documents=1), 0.001)


def test_an_empty_training_split_is_refused():
    with pytest.raises(UserError, match="none of the 1 documents to train on"):
        training_subset(Named("a"), 0.999999)


def test_the_smoke_overlay_holds_out_files_of_this_python():
    data = composed("+experiment=smoke").data
    assert len(validation_subset(build(data), data.validation_fraction)) > 0
