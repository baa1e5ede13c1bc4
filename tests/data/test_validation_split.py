import re
from collections.abc import Iterable

import pytest

from tests.data.corpora import OwnTable, experiment
from titan_exp.config.errors.user_error import UserError
from titan_exp.data.sources.base import RandomAccessSource
from titan_exp.data.validation_split import training_subset, unit_hash, validation_subset

CONFIG = experiment().data


class Named:
    """Documents that are their own names."""

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
def test_every_document_is_on_exactly_one_side(source: RandomAccessSource):
    training, held_out = training_subset(source, 0.1), validation_subset(source, 0.1)
    assert contents(training) | contents(held_out) == contents(source)
    assert len(training) + len(held_out) == 500
    assert 25 < len(held_out) < 75


def test_a_larger_fraction_keeps_what_a_smaller_one_held_out():
    source = OwnTable(CONFIG, documents=500)
    assert contents(validation_subset(source, 0.05)) < contents(validation_subset(source, 0.2))


def test_named_documents_stay_on_their_side_when_others_come_and_go():
    before, after = Named(f"d{number}" for number in range(300)), Named(f"d{number}" for number in range(100, 600))
    both = set(before.names) & set(after.names)
    assert contents(validation_subset(before, 0.1)) & both == contents(validation_subset(after, 0.1)) & both


def test_places_are_the_same_for_ever():
    """They decide what has been trained on: a change of them would leak held-out documents into runs under way."""
    assert unit_hash("argparse.py") == pytest.approx(0.32998643888054546)
    assert contents(validation_subset(Named("abcdefghij"), 0.3)) == {"a", "c", "h", "i", "j"}


def test_nothing_held_out_offers_a_fraction_that_works():
    source = OwnTable(CONFIG, documents=5)
    with pytest.raises(UserError, match=r"none of the 5 documents") as caught:
        validation_subset(source, 0.001)
    offered = re.search(r"data\.validation_fraction=([\d.]+)", str(caught.value).partition("\n    ")[2])
    assert offered is not None
    assert len(validation_subset(source, float(offered[1]))) >= 1
    with pytest.raises(UserError, match=r"training\.evaluate_every=0"):
        validation_subset(OwnTable(CONFIG, documents=1), 0.001)


def test_everything_held_out_is_an_error():
    with pytest.raises(UserError, match="none of the 1 documents to train on"):
        training_subset(Named("a"), 0.999999)
